"""The configuration: the values that it refuses, and its output as TOML. Each error is one sentence that names the key
and the remedy."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tlt.cli import main
from tlt.config import ConfigError, load_config, parse_config
from tlt.config.recipe import SECTIONS, commented, resolved
from tlt.config.section import is_state

RECIPE = """
[model]
path = "some/model"

[[data.tasks]]
name = "chain_sum"
weight = 2.0
params = { min_terms = 2 }

[rollout]
group_size = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def refusal(recipe: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_error_names_the_command_line_or_the_recipe(recipe: Path) -> None:
    assert load_config(recipe, ["--run.trackers", "wandb,mine:Mine"]).run.trackers == ["wandb", "mine:Mine"]
    said = f"{recipe} or the command line: unknown key train.learning_rat: did you mean train.learning_rate?"
    assert refusal(recipe, "--train.learning_rat=1").startswith(said)
    for wrong, said in (("groupsize = 4", "unknown key rollout.groupsize"), ("group_size = 0", "rollout.group_size")):
        recipe.write_text(RECIPE.replace("group_size = 4", wrong))
        assert refusal(recipe).startswith(f"{recipe}: {said}")


def test_the_responses_of_a_step_are_bounded(recipe: Path) -> None:
    load_config(recipe, ["--rollout.prompts_per_step", "250000", "--rollout.group_size", "4"])
    for name, number in (("prompts_per_step", 250_001), ("group_size", 2**63 - 1)):
        message = refusal(recipe, "--rollout.prompts_per_step", "250000", f"--rollout.{name}", str(number))
        assert f"rollout.{name} = {number}" in message
        assert "is more than 1,000,000 responses per step: lower one of them" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rollout.group_size", value) for value in ("many", "2.5", "true", "1")),
        *(("rollout.temperature", value) for value in ("-1", "nan", "inf")),
        *(("engine.max_rows", value) for value in ("0", "all")),
        *[("rollout.top_p", "1.5"), ("rollout.stop_strings", "one"), ("model.dtype", "float16"), ("engine", "3")],
        *[("speculation.drafter", "eagel"), ("train.loss", "reinforce"), ("run.seed", "-1"), ("run.overwrite", "1")],
        *[("engine.kv_memory_mb", "-1"), ("train.epochs", "1001")],
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_the_value(recipe: Path, key: str, value: str) -> None:
    section, _, name = key.partition(".")
    message = refusal(recipe, f"--{section}.{name}", value) if name else refusal_of({key: 3})
    assert f"{key}: " in message
    assert f"(got {value}" in message.replace('"', "").lower()


def refusal_of(section: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": {"path": "m"}, "data": {"tasks": [{"name": "chain_sum"}]}} | section)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"model": {}}, "model.path is missing"),
        (
            {"data": {"tasks": [{"name": "a", "params": {"weights": [1.0, math.nan]}}]}},
            "data.tasks.0.params.weights.1: must be a finite number (got nan)",
        ),
        ({"data": {}}, "data.tasks"),
        ({"data": {"tasks": [{"name": "a", "params": {"x": {1}}}]}}, "input was not a valid JSON value"),
        ({"engine": {"vllm": {"x": Path()}}}, "input was not a valid JSON value"),
        ({"data": {"tasks": [{"name": "a"}], "path": "b.jsonl"}}, "data.path"),
        ({"data": {"path": "b.jsonl"}}, "reward.name = 'reasoning_gym' needs data.tasks"),
        ({"data": {"tasks": [{"name": "a"}], "template": "no place"}}, "{question}"),
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature"),
        ({"rollout": {"prompts_per_step": 2}, "train": {"updates_per_step": 3}}, "train.updates_per_step"),
        ({"model": {"path": "m", "dtype": "float64", "device": "cuda:0"}}, "model.device"),
        ({"train": {"schedule": "cosine", "steps": 5, "warmup_steps": 5}}, "train.warmup_steps"),
        ({"train": {"shard": True}}, "train.shard needs several workers: set cluster.workers"),
        ({"train": {"importance_cap": 2.0}, "rollout": {"top_k": 20}}, "train.importance_cap"),
    ],
)
def test_an_invalid_recipe_is_refused(sections: dict[str, Any], says: str) -> None:
    assert says in refusal_of(sections)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("rollout.group_size", "16", 16),
        ("rollout.temperature", "1", 1.0),
        ("train.learning_rate", "3e-5", 3e-5),
        ("data.shuffle", "false", False),
        ("run.folder", "runs/a b", "runs/a b"),
        ("run.folder", '"quoted"', "quoted"),
        ("rollout.stop_strings", '["</answer>", "a=b"]', ["</answer>", "a=b"]),
        ("data.template", "x={question}", "x={question}"),
        *(("run.folder", text, text) for text in ("2026-11-21", "123", "1e3", "true")),
    ],
)
def test_an_override_is_typed(recipe: Path, key: str, text: str, value: object) -> None:
    for words in ([f"--{key}={text}"], [f"--{key}", text]):
        found = reduce(getattr, key.split("."), load_config(recipe, words))
        assert found == value
        assert type(found) is type(value)


def test_arguments_for_vllm_are_refused_with_another_backend(recipe: Path) -> None:
    given = ["--engine.vllm.enforce_eager", "true", "--model.dtype", "float32"]
    assert load_config(recipe, [*given, "--engine.backend", "vllm"]).engine.vllm == {"enforce_eager": True}
    with pytest.raises(ConfigError, match=r"engine\.vllm\.enforce_eager needs engine\.backend = 'vllm': set that, or"):
        load_config(recipe, given)
    assert not load_config(recipe, [*given, "--engine.vllm", "{}"]).engine.vllm


UNLEARNED = ("off", "suffix")
SET_BY_THE_RUN = ("model.hub", "data.hub", "data.now", "eval.hub")


def test_the_last_override_wins_and_an_empty_one_removes_an_optional_field(recipe: Path) -> None:
    config = load_config(recipe, ["--train.steps", "3", "--rollout.group_size=8", "--train.steps=5"])
    assert (config.train.steps, config.rollout.group_size) == (5, 8)
    named = ["--speculation.drafter", "adaptive", "--speculation.path", "drafter"]
    assert load_config(recipe, named).speculation.path == "drafter"
    assert load_config(recipe, [*named, "--speculation.path", ""]).speculation.path is None


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["--train.steps"], "--train.steps has no value"),
        (["--trian.steps=1"], "unknown key trian: did you mean train?"),
        (["--engine.zzz", "1"], "kv_memory_mb"),  # all known keys
        (["--stpes", "3"], "unknown option --stpes: did you mean --train.steps?"),
        (["train.steps", "3"], "unknown option train.steps: did you mean --train.steps?"),
        (["--learning_rate", "3"], "did you mean --train.learning_rate or --speculation.training.learning_rate?"),
        (["--seed", "3"], "unknown option --seed: did you mean --run.seed?"),
        (
            ["--no-such-option", "3"],
            "unknown option --no-such-option: --help shows the options, and a field is --",
        ),
        (["--chek"], "unknown option --chek: --help shows the options"),
        (["--chek", "--train.steps", "3"], "unknown option --chek: --help shows the options"),
        (["--stpes"], "unknown option --stpes: did you mean --train.steps?"),
        (["--train.top_p", "1"], "unknown key train.top_p: the field is rollout.top_p"),
        (["--model.path.deeper", "3"], "path is a value"),
        (
            ["--rollout.stop_strings", "a,b"],
            """list in TOML, such as --rollout.stop_strings '["a", "b"]' (got "a,b")""",
        ),
        (
            ["--reward.terms", "[{'name': 'math'}]"],
            """in TOML, such as --reward.terms '[{ name = "a" }]' (got "[{'na""",
        ),
        (["--data.chat_arguments", "a"], """in TOML, such as --data.chat_arguments '{ name = "a" }' (got "a")"""),
        (["--data.tasks.name", "a"], "tasks is a value"),
        (["--data.chat_arguments.day", "2026-11-25"], "chat_arguments.day: must be in quotes, as text"),
        (["--engine.vllm.times", "[08:00:00]"], "engine.vllm.times.0: must be in quotes, as text (got 08:00:00)"),
        (["--rollout.stop_strings", '["</answer>", ""]'], "rollout.stop_strings.1: "),  # it would end every response
        *((["--speculation.path=f", f"--speculation.drafter={name}"], f"{name}' does not use") for name in UNLEARNED),
        *(([f"--{key}=x"], f"{key} is set by the run: remove it") for key in SET_BY_THE_RUN),
    ],
)
def test_a_malformed_override_is_refused(recipe: Path, overrides: list[str], says: str) -> None:
    assert says in refusal(recipe, *overrides)


def test_the_defaults_are_those_of_the_field() -> None:
    config = parse_config({"model": {"path": "m"}, "data": {"path": "p"}, "reward": {"name": "exact"}})
    train = config.train
    assert (train.learning_rate, train.adam_beta2) == (1e-6, 0.999)
    assert (config.model.dtype, train.loss, config.run.save_every > 0) == ("auto", "ppo", True)


@pytest.mark.parametrize("change", [lambda text: b"\xef\xbb\xbf" + text, lambda text: text.replace(b"\n", b"\r\n")])
def test_a_recipe_as_editors_of_windows_save_it(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    text = b"[model]\npath = 'C:\\new\\model'\n[data]\n\tpath = 'a'\n[reward]\nname = 'exact'\n"
    (tmp_path / "recipe.toml").write_bytes(change(text))
    config = load_config(tmp_path / "recipe.toml")
    assert (config.model.path, config.data.path) == ("C:\\new\\model", "a")


ROOT = Path(__file__).parent.parent


REQUIRED = {"model": {"path": "model"}, "data": {"path": "prompts.jsonl"}, "reward": {"name": "exact"}}


def test_the_default_recipe_is_the_defaults() -> None:
    tree = tomllib.loads(commented())
    for section, fields in REQUIRED.items():
        tree[section] |= fields
    assert parse_config(tree) == parse_config({name: dict(fields) for name, fields in REQUIRED.items()})


def test_every_field_is_printed_once_with_its_meaning() -> None:
    for section, model in SECTIONS.items():
        lines = commented(section).splitlines()
        for name, field in model.model_fields.items():
            if is_state(field):
                assert f"{name} = " not in commented(section)
                continue
            assert any(re.match(rf"(# )?({name} = |\[\[?{section}\.{name}\]\]?)", line) for line in lines), name
            if field.description:
                assert field.description.split()[0] in commented(section)
        assert all(len(line) <= 120 for line in lines)


def test_commented_fields_can_be_uncommented() -> None:
    text = re.sub(r"^# ((?:\w+ = |\[\[).*)$", r"\1", commented(), flags=re.MULTILINE)
    text = re.sub(r"^(\w+) =  \((required|not set)\)$", r"# \1", text, flags=re.MULTILINE)
    tree = tomllib.loads(text)
    assert tree["data"]["tasks"] == [{"weight": 1.0, "params": {}, "stage": 0}]


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_a_resolved_recipe_is_the_recipe(recipe: Path, tmp_path: Path) -> None:
    overrides = ["--run.folder", 'odd "name" \\ é', "--train.steps", "7"]
    config = load_config(recipe, overrides)
    saved = tmp_path / "resolved.toml"
    saved.write_text(resolved(config), encoding="utf-8")
    assert load_config(saved) == config


def test_a_resolved_recipe_marks_what_is_not_the_default() -> None:
    text = resolved(parse_config(REQUIRED | {"train": {"steps": 7}}))
    assert "steps = 7  # default: 100" in text
    assert "\nwarmup_steps = 0\n" in text


def test_the_command_prints_all_or_a_section_or_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*argv: str) -> tuple[str, str]:
        with pytest.raises(SystemExit, match="0"):
            main(["config", *argv])
        return capsys.readouterr()

    assert printed() == (commented(), "")
    assert printed("train") == (commented("train"), "")
    assert "\n[speculation.training]\n" in printed("speculation")[0]
    recipe = str(ROOT / "recipes" / "quickstart.toml")
    assert printed(recipe, "--train.steps", "3")[0] == resolved(load_config(recipe, ["--train.steps", "3"]))
