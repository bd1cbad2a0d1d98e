"""The public interface: its names, their stability, and its examples."""

from __future__ import annotations

import inspect
import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
from tiny import tiny_tree, write_recipe

import tlt

EXAMPLES = Path(__file__).parent.parent / "examples"

# A change here is a change of the public interface: of the minor version where something is added, else of the major.
SURFACE = {
    "Config": "",  # its fields are those of a recipe
    "Engine": "busy generate release_requests keep_ahead look_ahead release round rows start stats submit swap",
    "Policy": "(folder, dtype, device, config, rollout, reference=None)",
    "Prompt": "(prompt_id, text, token_ids, data, answer_column='answer', prefill='', counts_by_task=True, messages)",
    "Request": "(prompt, index, epoch, seed, sampling)",
    "Response": "(request, token_ids, logprobs, full_logprobs, finish_reason, text='', reward=None, outcome='', "
    "scores, advantage=None, decoded, proposed='', old_logprobs=None, answer='', replies)",
    "SamplingParams": "(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=512, stop_token_ids=(), stop_strings=(), "
    "continues=False)",
    "Tools": "()",
    "TrainBatch": "(prompt_ids, response_ids, advantages, rollout_logprobs, rewards, old_logprobs, masked, masks)",
    "load_config": "(recipe, overrides=())",
    "load_engine": "(model, speculation=None, engine=None, longest=None)",
    "make_policy": "(config, folder=None)",
    "make_requests": "(prompts, samples, sampling, seed, domain='generate')",
    "train": "(config, resume=False, display=None, wrap=None, force=())",
    "train_drafter": "(config, folder, harvest_tokens, seconds)",
}


def signature(thing: object) -> str:
    """Return names and plain defaults of parameters, without types."""
    parts, keywords_alone = [], False
    for name, parameter in inspect.signature(thing).parameters.items():  # type: ignore[arg-type]
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords_alone:
            parts.append("*")
            keywords_alone = True
        plain = isinstance(parameter.default, str | int | float | tuple | None.__class__)
        parts.append(f"{name}={parameter.default!r}" if plain and not keywords_alone else name)
    return f"({', '.join(parts)})"


def test_the_public_names_and_signatures_are_fixed() -> None:
    assert sorted(tlt.__all__) == sorted(SURFACE)
    for name, pinned in SURFACE.items():
        thing = getattr(tlt, name)
        if name in ("Config", "Engine"):
            assert all(hasattr(thing, member) for member in pinned.split()), name
        else:
            assert signature(thing) == pinned, name


def test_every_name_has_its_docstring_and_is_the_one_of_its_module() -> None:
    for name in tlt.__all__:
        thing = getattr(tlt, name)
        assert getattr(sys.modules[thing.__module__], name) is thing
        if name != "Config":
            assert inspect.getdoc(thing), name
    assert set(tlt.__all__) <= set(dir(tlt))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tlt.nonsense


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Return a folder with a tiny model and a recipe for it."""
    rollout = {"group_size": 2, "max_new_tokens": 12}
    write_recipe(home / "recipe.toml", tiny_tree(home, rollout=rollout, train={"steps": 3}))
    rows = [json.dumps({"question": f"what is {i}?"}) for i in range(20)]
    (home / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return home


def run_example(name: str, *arguments: object) -> str:
    """Run an example as a program, but in this process, because a new one takes seconds for its imports."""
    written = io.StringIO()
    with redirect_stdout(written), patch.object(sys, "argv", [name, *map(str, arguments)]):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return written.getvalue()


def test_decoding_with_speculation(home: Path) -> None:
    said = run_example("decode.py", home / "model")
    assert said.count("What is 17 + 25?") == 4
    tokens, accepted = said.splitlines()[-1].split(" tokens, ")
    assert int(tokens) >= 8
    assert float(accepted.split()[0]) >= 1.0


def test_training_a_drafter(home: Path) -> None:
    said = run_example("train_drafter.py", home / "recipe.toml", home / "drafter", 200, 1)
    (home / "mine").touch()
    assert {path.stat().st_mode for path in (home / "drafter").iterdir()} == {(home / "mine").stat().st_mode}
    assert (home / "drafter" / "model.safetensors").is_file()
    assert "eagle" in said.splitlines()[-1]
    curve = json.loads((home / "drafter" / "training.json").read_text())["curve"]
    assert [point["seconds"] for point in curve] == sorted({point["seconds"] for point in curve})
    assert all(1.0 <= point["accept_length"] <= 8.0 for point in curve), "the mean over a chain of 7 guesses"


def test_a_users_own_loop_learns_and_decodes_with_the_new_weights(home: Path) -> None:
    first = run_example("own_loop.py", home / "recipe.toml")
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in first.splitlines()]
    assert len(rewards) == 3
    assert run_example("own_loop.py", home / "recipe.toml") == first, "the same seeds give the same run"
