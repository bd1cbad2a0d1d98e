"""Invalid inputs, each with the one sentence that `tlt train` prints before it exits with 2. There is no traceback.

A case breaks one thing of a valid recipe, model, data file, reward, disk or checkpoint: it adds options to the command,
or changes files."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_tree, train, write_recipe
from transformers import MistralConfig, MistralForCausalLM

from tlt.cli import main

Change = None | dict[str, Any] | str | Callable[[Path], Any]
"""None removes a file, a dictionary replaces keys of its JSON object, a text is its content, a function gets a path"""


def change_file(path: Path, change: Change) -> None:
    if change is None:
        path.unlink()
    elif isinstance(change, dict):
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    elif isinstance(change, str):
        path.write_text(change, encoding="utf-8")
    else:
        change(path)


def rewrite(change: Callable[[bytes], bytes]) -> Change:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def append(more: bytes) -> Change:
    return rewrite(lambda content: content + more)


def replace(pattern: bytes, new: bytes) -> Change:
    return rewrite(lambda content: re.sub(pattern, new, content))


def change_weights(fault: str) -> Change:
    def change(path: Path) -> None:
        weights = load_file(path)
        norm = weights.pop("model.norm.weight")
        if fault == "shape":
            weights["model.norm.weight"] = norm[:-1].contiguous()
        elif fault == "NaN":  # of a token that is in no prompt
            weights["model.norm.weight"] = norm
            weights["model.embed_tokens.weight"][3, 0] = math.nan
        save_file(weights, path, metadata={"format": "pt"})

    return change


def save_mistral(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 257}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=8, eos_token_id=256)).save_pretrained(folder)


REWARDS = """
async def late(prompt, answer):
    return "soon"

def of_a_column(prompt, answer, solution):
    return 0.0

def raises(prompt, answer):
    raise KeyError("answer")
"""
MODULES = {"own_rewards": REWARDS, "breaks": "f = 1 / 0\n", "exits": "import os; f = os._exit(0)\n"}
DEEP = "(" * 3000 + ")" * 3000
OPTIONS = {
    "--train.steps='5'": r'train\.steps: .*integer.*"5"',
    "--rollout.temperature=-0.0": r"rollout\.temperature = 0 .*above 0",
    "--model.device=cuda:9 --model.dtype=float32": r"model\.device = 'cuda:9'.*'cpu'",
    **{f"--model.device={x}": rf'model\.device: .*\(got "{x}"\)' for x in ("mps", "cuda:-1")},
    "--data.size=1000000000000000": r"data\.size: .*less than or equal to",
    "--reward.name=exakt": r"unknown reward\.name 'exakt': did you mean 'exact', or your own",
    "--reward.name=format": r"'format' needs a pattern: write \[\[reward\.terms",
    **{
        f"--reward.terms=[{{name='format',pattern='{pattern}'}}]": said
        for pattern, said in (
            ("(a", r"'\(a' is not a regular expression"),
            ("a{99999999999}", r"'a\{99999999999\}' is not a regular expression"),
            ("DEEP", r"is not a regular expression: .*recursion"),
        )
    },
    "--reward.name=exact --reward.answer_marker=<eos>": r"answer_marker contains the special token <eos>",
    "--reward.terms=[{name='exact',pattern='a'}]": r"'exact' does not use pattern: remove one of the two",
    "--reward.terms=[{name='exact',batched=true}]": r"'exact' does not use batched",
    "--reward.terms=[{name='a:f',length_to=9}]": r"'a:f' does not use length_to",
    "--train.lora.rank=2 --train.lora.targets=v_porj": r"has v_porj, but the model has no linear layer of this name",
    "--reward.name=length": r"'length' needs length_to above length_from",
    "--eval.every=1": r"eval\.every needs eval\.path",
    "--rollout.max_new_tokens=511": r"max_position_embeddings = 512: lower rollout\.max_new_tokens to at most 499$",
    "--model.path=org/tiny": r"there is no folder org/tiny.*HF_HUB_OFFLINE is set.* hf download org/tiny on",
    "--model.path=HOME/none": r"^tlt: model\.path: there is no folder .*/none: give the folder of a Hugging Face ch",
    "--data.path=org/sums": r"there is no folder org/sums.*HF_HUB_OFFLINE is set.* hf download org/sums --repo-type d",
    "--reward.name=tiny_rewards:constant": r"is not a function",
    "--reward.name=own_rewards:of_a_column": r"needs the argument 'solution': available names are prompt, .*question",
    "--reward.name=breaks:f": r"breaks:f.*ZeroDivisionError",
    "--reward.name=exits:f": r"reward exits:f cannot start: its process ended",
    **{
        f"--reward.name=own_rewards:{name}": rf"none of the 6 responses of step 2 has a reward \(6 {outcome}\), nor has"
        for name, outcome in (("late", "not a number"), ("raises", "error"))
    },
    "--run.folder=HOME/prompts.jsonl/run": r"run cannot be created or written to \(Not a directory\): set another",
    "--force train.steps": r"--force needs --resume",
}
NO_TOML, NO_TOKENIZER = r"recipe\.toml is not valid TOML", r"has no tokenizer that can be loaded"
NO_EOS: dict[str, Change] = {"model/tokenizer_config.json": {"eos_token": None}}
half = rewrite(lambda content: content[: len(content) // 2])
as_utf16 = rewrite(lambda content: content.decode().encode("utf-16"))
marked = rewrite(lambda content: b"\xef\xbb\xbf" + content)
FILES: list[tuple[dict[str, Change], str]] = [
    *(({"recipe.toml": text}, NO_TOML) for text in ("[model\n", "x = " + "[" * 100_000, "x = " + "1" * 5000)),
    ({"recipe.toml": as_utf16}, rf"{NO_TOML} \(it is UTF-16 or UTF-32: save the file as UTF-8\)$"),
    ({"recipe.toml": append(b"# \xe9")}, rf"{NO_TOML} \(byte \d+ is not UTF-8: save the file"),
    ({"recipe.toml": append(b"\nseed = 2\n")}, rf"{NO_TOML} \(Cannot overwrite a .*line \d+"),
    (
        {"recipe.toml": replace(b"/model", rb"\\new model")},
        r"the path '.*\\new model' has a control character: put a path that contains '\\' in single quotes$",
    ),
    ({"recipe.toml": append(b'\n[[reward.terms]]\nname = "exact"\n')}, r"either reward\.name or \[\[reward\.terms\]\]"),
    (
        {"recipe.toml": replace(b'name = "tiny.*"', b'terms = [{name="math", wieght=1}]')},
        r"reward\.terms\.0\.wieght: did you mean reward\.terms\.0\.weight\?",
    ),
    (
        {"recipe.toml": replace(b'name = "tiny.*"', b'terms = [{name="tiny_rewards:f"}]')},
        r"reward\.terms = 'tiny_rewards:f' cannot be imported .*: correct the file or the name",
    ),
    ({"model/config.json": None}, r"config\.json"),
    ({"model/config.json": half}, r"config\.json"),
    ({"model/config.json": {"model_type": "vit"}}, r"vit.*causal language model"),
    ({"model/config.json": {"hidden_size": "ten"}}, r"config\.json does not describe a valid model .*hidden_size"),
    ({"model/config.json": {"num_key_value_heads": 0}}, r"config\.json"),
    ({"model/config.json": {"num_hidden_layers": 3}}, r"config\.json does not describe a valid model .*layer"),
    ({"model/config.json": as_utf16}, r"config\.json begins with a byte-order mark: save it as UTF-8 without one"),
    *(
        ({f"model/{name}.json": marked}, rf"{name}\.json begins with a byte-order mark: save it as UTF-8 without one$")
        for name in ("tokenizer", "generation_config")
    ),
    *(
        ({f"model/{name}.json": "[]"}, rf"{name}\.json.* must hold a JSON object, not a list")
        for name in ("config", "generation_config")
    ),
    ({"model/model.safetensors": None}, r"safetensors"),
    ({"model/model.safetensors": half}, r"model\.safetensors"),
    ({"model/model.safetensors": change_weights("lost")}, r"model\.norm\.weight"),
    ({"model/model.safetensors": change_weights("shape")}, r"model\.norm\.weight"),
    ({"model/model.safetensors": change_weights("NaN")}, r"embed_tokens\.weight of the policy is not finite in"),
    *(({"model/tokenizer.json": change}, NO_TOKENIZER) for change in (None, half, "{}")),
    ({"model/tokenizer.json": replace(b'"a": 64', b'"a": 9999')}, r"token 9999.*vocabulary of 257"),
    (
        {"model/config.json": {"eos_token_id": None}, "model/generation_config.json": None, **NO_EOS},
        r"names an end token.*set eos_token_id there, or set rollout\.stop_strings",
    ),
    (
        {"model/config.json": {"eos_token_id": 300}, "model/generation_config.json": {"eos_token_id": [300]}, **NO_EOS},
        r"names an end token below the vocab_size of 257",
    ),
    ({"model/generation_config.json": {"eos_token_id": "256"}}, r"'256' for an eos_token_id: give a token's number"),
    ({"model": save_mistral}, r"may reach 17 tokens, but config\.json has sliding_window = 8, and the rollout decoder"),
    ({"prompts.jsonl": rewrite(lambda text: b'{"question": "\xff"}')}, r"prompts\.jsonl, line 1"),
    ({"prompts.jsonl": '{"question": "a\\ud800"}'}, r"prompt 0 contains a lone surrogate, .*: 'a\\ud800'"),
    ({"prompts.jsonl": '{"question": ' + "[" * 100_000}, r"jsonl, line 1 is not JSON: it is nested too deeply"),
    ({"prompts.jsonl": '{"question": ""}'}, r"prompt 0 is empty"),
    (
        {"prompts.jsonl": '{"question": "new", "solution": "1"}', "options": "--reward.name=exact"},
        r"prompt 0 .* has no right answer: .* data\.answer_column to one of its other columns \(question, solution\)",
    ),
    (
        {
            "held_out.jsonl": '{"question": "new", "solution": "1"}',
            "options": "--reward.name=exact --eval.every=1 --eval.path=HOME/held_out.jsonl",
        },
        r"prompt 0 \('new'\) has no right answer: .* set data\.answer_column",
    ),
    (
        {
            "held_out.jsonl": json.dumps({"question": "n" * 40}),
            "options": "--eval.every=1 --eval.path=HOME/held_out.jsonl --rollout.max_new_tokens=480",
        },
        r"a held-out prompt with its response may reach 520 tokens.*: lower rollout\.max_new_tokens to at most 472",
    ),
    (
        {"run/checkpoints": lambda path: (path / "step_00000001").mkdir(parents=True), "run/.tlt.lock": ""},
        r"already contains a run: continue it with --resume",
    ),
]
FRESH = [*(({"options": words}, said) for words, said in OPTIONS.items()), *FILES]


def in_both(name: str, change: Change) -> dict[str, Change]:
    return {f"run/checkpoints/step_{step:08d}/{name}": change for step in (1, 2)}


LINES = ("{}", "[]", '{"step": "a"}', '{"step": 0, "reward": null}', "[" * 100_000)
RESUMED: list[tuple[dict[str, Change], str]] = [
    (in_both("optimizer.safetensors", half), r"damaged: step_00000002 \(optimizer\.safetensors.*step_00000001"),
    (in_both("manifest.json", "{}"), r"damaged: step_00000002 \(manifest\.json does not list"),
    (in_both("manifest.json", "[]"), r"damaged: step_00000002 \(manifest\.json must hold a JSON object, not a list"),
    ({"options": "--force train.lr"}, r"--force train\.lr: there is no"),
    *(({"run/metrics.jsonl": line + "\n"}, r"jsonl is damaged .*: repair or remove that line") for line in LINES),
    ({"run/metrics.jsonl": rewrite(lambda text: b"\x00" + text)}, r"metrics\.jsonl is damaged .*: repair or remove"),
]


@pytest.fixture(scope="module")
def sound(home: Path) -> Path:
    """Return valid inputs, and a run of two steps with both its checkpoints."""
    train(tiny_config(home, run={"save_every": 1}, rollout={"max_new_tokens": 4}))
    return home


def with_recipe(home: Path) -> Path:
    write_recipe(home / "recipe.toml", tiny_tree(home, run={"save_every": 1}, rollout={"max_new_tokens": 4}))
    for name, source in MODULES.items():
        (home / f"{name}.py").write_text(source, encoding="utf-8")
    return home


def fresh(sound: Path, home: Path) -> Path:
    shutil.copytree(sound / "model", home / "model")
    shutil.copy(sound / "prompts.jsonl", home)
    return with_recipe(home)


def sentence(home: Path, words: str, capsys: pytest.CaptureFixture[str]) -> str:
    options = words.replace("HOME", str(home)).replace("DEEP", DEEP).split()
    with patch("tlt.progress._QUIET", 600.0), pytest.raises(SystemExit) as exit_:  # no progress on a busy machine
        main(["train", str(home / "recipe.toml"), *options])
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if line and "it/s]" not in line]  # bars of transformers
    assert exit_.value.code == 2
    assert len(said) == 1, said
    assert said[0].startswith("tlt: ")
    return said[0]


def check(home: Path, changes: dict[str, Any], expected: str, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, change in changes.items():
        if name != "options":
            change_file(home / name, change)
    said = sentence(home, f"{options} {changes.get('options', '')}", capsys)
    assert re.search(expected, said), said


def id_of(case: tuple[dict[str, Any], str]) -> str:
    return f"{case[0].get('options') or next(iter(case[0]))}: {case[1]}"


@pytest.mark.parametrize("case", FRESH, ids=id_of)
def test_a_bad_input_gets_one_sentence(
    case: Any, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(fresh(sound, tmp_path), *case, "", capsys)


@pytest.mark.parametrize("case", RESUMED, ids=id_of)
def test_a_run_that_cannot_be_resumed_is_an_error_with_the_reason(
    case: Any, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(with_recipe(shutil.copytree(sound, tmp_path / "resumed")), *case, "--resume", capsys)


def test_a_disk_without_room_for_a_checkpoint_is_named_before_the_first_step(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and moments are saved in float32, and one byte is missing."""
    home = fresh(sound, tmp_path)
    free = 3 * 4 * sum(tensor.numel() for tensor in load_file(home / "model" / "model.safetensors").values()) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, free))
    said = sentence(home, "--model.dtype bfloat16", capsys)
    assert re.search(r"a checkpoint needs at least .* GiB, and the disk of .*/run has 0\.00 GiB free: free disk", said)


def test_the_checkpoints_of_adapters_are_small(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fresh(sound, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, 0))
    with pytest.raises(SystemExit) as exit_:
        main(["train", str(home / "recipe.toml"), "--train.lora.rank", "2"])
    assert exit_.value.code == 0


def test_a_disk_that_is_full_when_a_step_is_recorded_is_named(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_recovery.py tests a disk that fails while a checkpoint is saved."""
    home, real = fresh(sound, tmp_path), Path.open

    def full(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if path.name == "metrics.jsonl" and "a" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", full)
    said = sentence(home, "", capsys)
    assert re.search(r"metrics\.jsonl cannot be written .*No space left.*; saved after step 1 in .*--resume$", said)
