"""Invalid inputs, each with the one sentence that `tlt train` prints before it exits with 2. There is no traceback.

A case breaks one thing of a valid recipe, model, data file, reward, disk or checkpoint."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_tree
from transformers import MistralConfig, MistralForCausalLM

from tlt.cli import main
from tlt.run.display import Display
from tlt.run.train import train


class Case:
    """Valid recipe as a tree, its files under `home`, and further arguments of the command."""

    def __init__(self, home: Path) -> None:
        self.home, self.options = home, [] if home.name != "resumed" else ["--resume"]
        self.tree = tiny_tree(home, run={"save_every": 1}, rollout={"max_new_tokens": 4})
        self.model, self.prompts, self.run = home / "model", home / "prompts.jsonl", home / "run"

    def set(self, section: str, **values: Any) -> None:
        self.tree[section] = self.tree.get(section, {}) | values

    def recipe(self) -> str:
        lines = []
        for name, section in self.tree.items():
            lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in section.items())]
        path = self.home / "recipe.toml"
        if not path.exists():
            path.write_text("\n".join(lines), encoding="utf-8")
        return str(path)

    def edit(self, path: Path, change: Callable[[bytes], bytes]) -> None:
        path.write_bytes(change(path.read_bytes()))

    def edit_json(self, path: Path, **changes: Any) -> None:
        tree = json.loads(path.read_text(encoding="utf-8")) | changes
        path.write_text(json.dumps(tree), encoding="utf-8")

    def module(self, source: str) -> None:
        (self.home / "own_rewards.py").write_text(source, encoding="utf-8")

    @property
    def weights(self) -> Path:
        return self.model / "model.safetensors"

    def saved(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step_{step:08d}"


def _toml(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def change_weights(case: Case, fault: str) -> None:
    weights = load_file(case.weights)
    norm = weights.pop("model.norm.weight")
    if fault == "a shape":
        weights["model.norm.weight"] = norm[:-1].contiguous()
    elif fault == "NaN":  # of a token that is in no prompt
        weights["model.norm.weight"] = norm
        weights["model.embed_tokens.weight"][3, 0] = math.nan
    save_file(weights, case.weights, metadata={"format": "pt"})



def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def damage_all(case: Case) -> None:
    for step in (1, 2):
        case.edit(case.saved(step) / "optimizer.safetensors", half)


def save_mistral(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 257}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=8, eos_token_id=256)).save_pretrained(folder)


def own_reward(case: Case, name: str) -> None:
    case.module(ODD_REWARDS)
    case.set("reward", name=f"own_rewards:{name}", folder=str(case.home))


ODD_REWARDS = """
async def late(prompt, answer):
    return "soon"

def table(prompt, answer):
    return {"reward": 1.0}


def of_a_column(prompt, answer, solution):
    return 0.0

def raises(prompt, answer):
    raise KeyError("answer")
"""

FRESH: dict[str, tuple[Callable[[Case], Any], str]] = {
    # -- the recipe
    "an unknown option": (lambda c: c.options.append("--bogus"), "--bogus"),
    **{
        name: (lambda c, text=text: (c.home / "recipe.toml").write_text(text), r"recipe\.toml is not valid TOML")
        for name, text in (
            *[("no TOML", "[model\n"), ("a number of many digits", "x = " + "1" * 5000)],
            ("a recipe that is nested too deeply", "x = " + "[" * 100_000),
        )
    },
    "a recipe that is UTF-16": (
        lambda c: c.edit(Path(c.recipe()), lambda text: text.decode().encode("utf-16")),
        r"recipe\.toml is not valid TOML \(it is UTF-16 or UTF-32: save it as UTF-8\)$",
    ),
    "a recipe that is Latin-1": (
        lambda c: c.edit(Path(c.recipe()), lambda text: text + b"# caf\xe9"),
        r"recipe\.toml is not valid TOML \(byte \d+ is not UTF-8: save it as UTF-8\)$",
    ),
    "a key twice": (
        lambda c: c.edit(Path(c.recipe()), lambda text: text + b"\nseed = 2\n"),
        r"recipe\.toml is not valid TOML \(Cannot overwrite a value .*line \d+",
    ),

    "a path of Windows": (
        lambda c: c.edit(Path(c.recipe()), lambda text: text.replace(b"/model", rb"\new model")),
        r"the path '.*\\new model' has a control character: write paths with '\\' in single quotes$",
    ),
    "a number in quotes": (lambda c: c.options.extend(["--train.steps", "'5'"]), r'train\.steps: .*integer.*"5"'),
    "a temperature of minus nothing": (
        lambda c: c.set("rollout", temperature=-0.0),
        r"rollout\.temperature = 0 .*above 0",
    ),
    "no device": (lambda c: c.set("model", device="cuda:9", dtype="float32"), r"model\.device = 'cuda:9'.*'cpu'"),
    "unknown reward": (lambda c: c.set("reward", name="exakt"), r"unknown reward\.name 'exakt': did you mean 'exact'\?"),
    "two rewards": (
        lambda c: c.set("reward", terms=[{"name": "exact"}]),
        r"either reward\.name or \[\[reward\.terms\]\]",
    ),
    "unknown key of a term": (
        lambda c: c.tree.update(reward={"terms": [{"name": "exact", "wieght": 1.0}]}),
        r"reward\.terms\.0\.wieght: did you mean weight\?",
    ),
    "no pattern": (lambda c: c.set("reward", name="format"), r"'format' needs reward\.pattern"),
    "bad pattern": (lambda c: c.set("reward", name="format", pattern="(a"), r"'\(a' is not a regular expression"),
    "a pattern that repeats too often": (
        lambda c: c.set("reward", name="format", pattern="a{99999999999}"),
        r"reward\.pattern 'a\{99999999999\}' is not a regular expression",
    ),
    "a pattern that is nested too deeply": (
        lambda c: c.set("reward", name="format", pattern="(" * 3000 + ")" * 3000),
        r"is not a regular expression: .*recursion",
    ),
    "no lengths": (lambda c: c.set("reward", name="length"), r"reward\.length_to above reward\.length_from"),
    "nothing held out": (lambda c: c.set("eval", every=1), r"eval\.every needs eval\.path"),
    # -- the model folder and its tokenizer
    "no config.json": (lambda c: (c.model / "config.json").unlink(), r"config\.json"),
    "broken config.json": (lambda c: c.edit(c.model / "config.json", half), r"config\.json"),
    "unknown family": (lambda c: c.edit_json(c.model / "config.json", model_type="vit"), r"vit.*causal language model"),
    **{
        f"a byte-order mark in {name}": (
            lambda c, name=name: c.edit(c.model / name, lambda text: b"\xef\xbb\xbf" + text),
            rf"{name} begins with a byte-order mark: save it as UTF-8 without one$",
        )
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    },
    "a config.json that is UTF-16": (
        lambda c: c.edit(c.model / "config.json", lambda text: text.decode().encode("utf-16")),
        r"config\.json begins with a byte-order mark: save it as UTF-8 without one",
    ),
    "no weights": (lambda c: c.weights.unlink(), r"safetensors"),
    "truncated weights": (lambda c: c.edit(c.weights, half), r"model\.safetensors"),
    "a lost weight": (lambda c: change_weights(c, "lost"), r"model\.norm\.weight"),
    "a weight of another shape": (lambda c: change_weights(c, "a shape"), r"model\.norm\.weight"),
    "no tokenizer": (lambda c: (c.model / "tokenizer.json").unlink(), r"has no tokenizer that can be loaded"),
    "broken tokenizer": (lambda c: c.edit(c.model / "tokenizer.json", half), r"has no tokenizer that can be loaded"),
    "tokens beyond the model": (
        lambda c: c.edit(c.model / "tokenizer.json", lambda text: text.replace(b'"a": 64', b'"a": 9999')),
        r"token 9999.*vocabulary of 257",
    ),
    "no end token": (
        lambda c: (
            c.edit_json(c.model / "config.json", eos_token_id=None),
            c.edit_json(c.model / "tokenizer_config.json", eos_token=None),
            (c.model / "generation_config.json").unlink(),
        ),
        r"names an end token.*set eos_token_id there, or set rollout\.stop_strings",
    ),
    "end tokens beyond the model": (
        lambda c: (
            c.edit_json(c.model / "config.json", eos_token_id=300),
            c.edit_json(c.model / "tokenizer_config.json", eos_token=None),
            c.edit_json(c.model / "generation_config.json", eos_token_id=[300, 301]),
        ),
        r"names an end token below the vocab_size of 257",
    ),
    "a weight that is NaN": (lambda c: change_weights(c, "NaN"), r"embed_tokens\.weight of the policy is not finite in"),
    **{
        f"the device {name}": (
            lambda c, name=name: c.set("model", device=name),
            rf"model\.device: .*\(got \"{name}\"\)",
        )
        for name in ("foo", "mps", "meta", "cuda:x", "cuda:-1")
    },
    "a name on the hub": (
        lambda c: c.set("model", path="Qwen/Qwen3-0.6B"),
        r"there is no Qwen/Qwen3-0\.6B on this machine.*HF_HUB_OFFLINE is set.* hf download Qwen/Qwen3-0\.6B on",
    ),
    "a model folder that is not there": (
        lambda c: c.set("model", path=str(c.home / "none")),
        r"^tlt: there is no folder .*/none: give the folder of a Hugging Face checkpoint, or a name on the hub ",
    ),
    **{
        f"a {name} that is a list": (
            lambda c, name=name: (c.model / name).write_text("[]"),
            rf"{said}{name}.* must hold a JSON object, not a list",
        )
        for name, said in (
            *[("generation_config.json", ""), ("config.json", "")],
            ("tokenizer_config.json", "has no tokenizer that can be loaded .*"),
        )
    },
    "a tokenizer.json of nothing": (
        lambda c: (c.model / "tokenizer.json").write_text("{}"),
        r"has no tokenizer that can be loaded",
    ),
    "an end token that is a text": (
        lambda c: c.edit_json(c.model / "generation_config.json", eos_token_id="256"),
        r"has '256' for an eos_token_id: give a token's number",
    ),
    "a field of the wrong type": (
        lambda c: c.edit_json(c.model / "config.json", hidden_size="thirty-two"),
        r"config\.json does not describe a valid model .*hidden_size",
    ),
    "a size of nothing": (
        lambda c: c.edit_json(c.model / "config.json", num_key_value_heads=0),
        r"config\.json",
    ),
    "a window that a response may outgrow": (
        lambda c: save_mistral(c.model),
        r"may reach 17 tokens, but config\.json has sliding_window = 8, as the rollout decoder attends to all",
    ),
    "responses that outgrow the positions": (
        lambda c: c.set("rollout", max_new_tokens=511),
        r"config\.json has max_position_embeddings = 512: lower rollout\.max_new_tokens to at most 499$",
    ),
    "layers that contradict their types": (
        lambda c: c.edit_json(c.model / "config.json", num_hidden_layers=3),
        r"config\.json does not describe a valid model .*layer",
    ),
    "no chat template": (lambda c: c.set("data", chat=True), r"no chat template: set data\.chat = false"),
    # -- data
    "a data set's name on the hub": (
        lambda c: c.set("data", path="openai/gsm8k"),
        r"there is no openai/gsm8k on this machine.*HF_HUB_OFFLINE is set.* hf download openai/gsm8k --repo-type data",
    ),
    "a file in a folder that is not there": (
        lambda c: c.set("data", path="data/none.jsonl"),
        r"^tlt: there is no file data/none\.jsonl: give a \.jsonl",
    ),

    "bytes that are no text": (lambda c: c.prompts.write_bytes(b'{"question": "\xff"}'), r"prompts\.jsonl, line 1"),
    "half of a surrogate pair": (
        lambda c: c.prompts.write_text('{"question": "a\\ud800"}'),
        r"prompt 0 contains a lone surrogate, which is not text: 'a\\ud800'",
    ),
    "a row that is nested too deeply": (
        lambda c: c.prompts.write_text('{"question": ' + "[" * 100_000),
        r"prompts\.jsonl, line 1 is not JSON: it is nested too deeply",
    ),

    "an empty prompt": (lambda c: c.prompts.write_text('{"question": ""}'), r"prompt 0 is empty"),
    # -- rewards
    "no module": (lambda c: c.set("reward", name="no_such:f"), r"'no_such:f' cannot be imported .*'module:function'"),
    "no function": (lambda c: c.set("reward", name="tiny_rewards:f"), r"'tiny_rewards:f' cannot be imported"),

    "a reward that asks for a column": (
        lambda c: own_reward(c, "of_a_column"),
        r"needs the argument 'solution': available names are prompt, answer, .*, question",
    ),
    "no callable": (lambda c: c.set("reward", name="tiny_rewards:constant"), r"is not a function"),
    "a module that raises": (
        lambda c: (c.module("1 / 0\n"), c.set("reward", name="own_rewards:f")),
        r"own_rewards:f.*ZeroDivisionError",
    ),
    "a module that exits": (
        lambda c: (c.module("import os; os._exit(0)\n"), c.set("reward", name="own_rewards:f")),
        r"reward own_rewards:f cannot start: its process ended",
    ),
    **{
        f"nothing rewarded: {name}": (
            lambda c, name=name: own_reward(c, name),
            rf"none of the 6 responses of step 2 has a reward \(6 {outcome}\), nor has any response of the previous",
        )
        for name, outcome in (("late", "not a number"), ("table", "not a number"), ("raises", "error"))
    },

    "no answers under the default": (
        lambda c: (c.set("reward", name="exact"), c.prompts.write_text('{"question": "new", "solution": "1"}')),
        r"prompt 0 has no answer .*: set data\.answer_column; its other columns are question, solution",
    ),
    "no answers held out": (
        lambda c: (
            c.set("reward", name="exact"),
            c.set("eval", every=1, path=str(c.home / "held_out.jsonl")),
            (c.home / "held_out.jsonl").write_text('{"question": "new", "solution": "1"}'),
        ),
        r"prompt 0 has no answer to compare with \('new'\): set data\.answer_column",
    ),

    **{
        f"{field} beyond all reason": (
            lambda c, section=section, field=field, value=value: c.set(section, **{field: value}),
            rf"{section}\.{field}: .*less than or equal to",
        )
        for section, field, value in (
            *[("train", "learning_rate", 1e30), ("train", "weight_decay", 1e10), ("train", "kl_weight", 1e300)],
            *[("data", "size", 10**15), ("eval", "size", 10**15), ("reward", "memory_mb", 10**14)],
        )
    },
    # -- the folder of the run
    "a folder that cannot be": (
        lambda c: c.set("run", folder=str(c.prompts / "run")),
        r"prompts\.jsonl/run cannot be made \(Not a directory\): set another --run\.folder",
    ),
    "an occupied folder": (
        lambda c: c.saved(1).mkdir(parents=True),
        r"already contains a run: continue it with --resume",
    ),
    "force without resume": (lambda c: c.options.extend(["--force", "train.steps"]), r"--force needs --resume"),
    "nothing to resume": (lambda c: c.options.append("--resume"), r"no complete checkpoint in .*--run\.overwrite true"),
}

RESUMED: dict[str, tuple[Callable[[Case], Any], str]] = {
    "no checkpoints folder": (lambda c: shutil.rmtree(c.run / "checkpoints"), r"there is no complete checkpoint"),
    "truncated": (damage_all, r"damaged: step_00000002 \(optimizer\.safetensors.*step_00000001"),
    "another recipe": (lambda c: c.set("train", learning_rate=0.5), r"train\.learning_rate = 0\.5, but .* has 0\.001"),
    "fewer steps": (lambda c: c.set("train", steps=1), r"train\.steps = 1 is below 2, the number of steps done"),

    "an unknown field to force": (
        lambda c: c.options.extend(["--force", "train.lr"]),
        r"--force train\.lr: there is no",
    ),
    "a manifest of nothing": (
        lambda c: [(c.saved(step) / "manifest.json").write_text("{}") for step in (1, 2)],
        r"damaged: step_00000002 \(manifest\.json does not list",
    ),
    "a manifest that is a list": (
        lambda c: [(c.saved(step) / "manifest.json").write_text("[]") for step in (1, 2)],
        r"damaged: step_00000002 \(manifest\.json must hold a JSON object, not a list",
    ),

    **{
        f"a line of metrics that is {line}": (
            lambda c, line=line: (c.run / "metrics.jsonl").write_text(line + "\n"),
            r"metrics\.jsonl is damaged .*: repair or remove that line",
        )
        for line in ("{}", "[]", "3", '{"step": "a"}', '{"step": 0, "reward": null}', "[" * 100_000)
    },
    "a damaged record": (
        lambda c: c.edit(c.run / "metrics.jsonl", lambda text: b"\x00" + text),
        r"metrics\.jsonl is damaged .*: repair or remove",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return valid inputs, and a run of two steps with both its checkpoints."""
    home = tmp_path_factory.mktemp("sound")
    train(tiny_config(home, run={"save_every": 1}, rollout={"max_new_tokens": 4}), False, Display(Console(quiet=True)))
    return home


def sentence(case: Case, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["train", case.recipe(), *case.options])
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if line and "it/s]" not in line]  # bars of transformers
    assert exit_.value.code == 2
    assert len(said) == 1, said
    assert said[0].startswith("tlt: ")
    return said[0]


@pytest.mark.parametrize("name", FRESH)
def test_a_bad_input_gets_one_sentence(
    name: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = fresh(sound, tmp_path)
    spoil, expected = FRESH[name]
    spoil(case)
    said = sentence(case, capsys)
    assert re.search(expected, said), said


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_cannot_be_resumed_is_an_error_with_the_reason(
    name: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(shutil.copytree(sound, tmp_path / "resumed"))
    spoil, expected = RESUMED[name]
    spoil(case)
    said = sentence(case, capsys)
    assert re.search(expected, said), said


@pytest.mark.parametrize("owner", ["tlt.rl.trained_model.save_file", "tlt.store.checkpoint.flush", "pathlib.Path.open"])
def test_a_full_disk_is_named(
    owner: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is full when a checkpoint is saved, or only when a line is added to metrics.jsonl."""
    case, real = fresh(sound, tmp_path), Path.open
    case.recipe()

    def full(*args: Any, **options: Any) -> Any:
        if "open" in owner and not (args[0].name == "metrics.jsonl" and "a" in args[1:]):
            return real(*args, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, full)
    said = sentence(case, capsys)
    if "open" in owner:
        place, left = r"metrics\.jsonl cannot be written", "saved after step 1 in .*: continue with --resume$"
    else:
        place, left = r"step_00000001 cannot be saved", ".*nothing is saved yet$"
    assert re.search(rf"{place} .*No space left.*; {left}", said)


def fresh(sound: Path, home: Path) -> Case:
    shutil.copytree(sound / "model", home / "model")
    shutil.copy(sound / "prompts.jsonl", home)
    return Case(home)
