"""The command line: help is fast, and every error is one sentence."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tiny
import torch
from tiny import QUESTIONS, tiny_tree

from tlt import __version__
from tlt.cli import _parser, main
from tlt.commands.generate import Asked, _prompts
from tlt.config import DataConfig, TaskConfig
from tlt.data.prompts import encoder
from tlt.data.tokenizer import load_tokenizer
from tlt.run.display import Display

PID = os.getpid()
HEAVY = ("torch", "transformers", "numpy", "reasoning_gym", "tensorboard", "rich")


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    tiny_tree(home)
    return home


def write_recipe(home: Path, tmp_path: Path, **sections: dict[str, Any]) -> str:
    tree = tiny_tree(home, **({"rollout": {"group_size": 2, "max_new_tokens": 12}} | sections))
    tree["run"] = tree["run"] | {"folder": str(tmp_path / "run")}
    return str(tiny.write_recipe(tmp_path / "recipe.toml", tree))


@pytest.fixture
def recipe(home: Path, tmp_path: Path) -> str:
    return write_recipe(home, tmp_path)


def exit_code(*arguments: str) -> int:
    with patch("tlt.progress._QUIET", 600.0), pytest.raises(SystemExit) as exit_:  # no progress on a busy machine
        main(arguments)
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that a bad input gets."""
    assert exit_code(*arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("tlt: ")
    return lines[0]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


MAIN = "import sys; from tlt.cli import main; sys.argv = {argv}\ntry: main()\nexcept SystemExit as e: code = e.code\n"
REPORT = "print('HEAVY', [m for m in {heavy} if m in sys.modules], code)"


@pytest.mark.parametrize(("options", "code"), [("train --help", 0), ("train RECIPE --train.step 3", 2), ("config", 0)])
def test_help_and_errors_of_the_recipe_need_no_heavy_imports(recipe: str, options: str, code: int) -> None:
    argv = ["tlt", *options.replace("RECIPE", recipe).split()]
    done = python(MAIN.format(argv=argv) + REPORT.format(heavy=HEAVY))
    assert f"HEAVY [] {code}" in done.stdout, done.stderr


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        for inner in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from parsers(inner)


def test_help_explains_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    options, shown = 0, {}
    for parser in parsers(_parser()):
        text = shown[parser.prog] = " ".join(parser.format_help().split())
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), (parser.prog, action.dest)
            if action.option_strings and action.default not in (None, False, [], "", argparse.SUPPRESS):
                options += 1
                assert f"(default: {action.default})" in text
    assert options > 6
    assert "--samples SAMPLES number of responses to each prompt (default: 1)" in shown["tlt generate"]
    assert "--rollout.temperature 0 is greedy" in shown["tlt generate"]
    assert "tlt config prints every field" in shown["tlt train"]
    assert not [text for text in shown.values() if re.search(r"\(default: (None|False|\[\])?\)", text)]
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"tlt {__version__}\n"


GENERATE = "generate MODEL --model.dtype=float64"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train nowhere.toml", "there is no recipe at nowhere.toml"),
        ("verify RECIPE --steps=0", "--steps"),
        *((f"draft train RECIPE --out nowhere --seconds={seconds}", "--seconds") for seconds in ("nan", "inf")),
        ("generate nowhere --prompt a", "nowhere"),
        (GENERATE, "no prompt given: use --prompt TEXT or --data FILE"),
        (f"{GENERATE} --prompt a --bogus", "--bogus"),
        (f"{GENERATE} --prompt a --data.system=brief", "data.system and data.chat_arguments need data.chat"),
        (f"{GENERATE} --prompt a --samples 0", "--samples"),
        (f"{GENERATE} --prompt a --train.steps=3", "unknown key train"),
        (f"{GENERATE} --prompt a --max-new-tokens 3", "unknown option --max-new-tokens: did you mean --rollout.max"),
        (f"{GENERATE} --prompt a --rollout.top_p=3", "the command line: rollout.top_p: "),
        (f"{GENERATE} --prompt a\udcff", "is not UTF-8 text: 'a\\udcff'"),
        (f"{GENERATE} --prompt=", "is empty"),
        (f"{GENERATE} --prompt a --rollout.max_new_tokens 9999", "lower rollout.max_new_tokens"),
        (f"{GENERATE} --prompt a --speculation.drafter eagle", "drafter = 'eagle' needs speculation.path"),
        ("train RECIPE --workers 0", "cluster.workers"),
        ("config trian", "there is no section trian: did you mean train?"),
        ("config zzz", "there is no section zzz: give one of model, data,"),
        ("config missing.toml", "there is no recipe at missing.toml"),
        ("config train --train.steps 3", "--train.steps is for a recipe"),
    ],
)
def test_a_bad_option_gets_one_sentence(
    capsys: pytest.CaptureFixture[str], recipe: str, home: Path, command: str, says: str
) -> None:
    places = {"RECIPE": recipe, "MODEL": str(home / "model")}
    assert says in refusal(capsys, *(places.get(word, word) for word in command.split(" ")))


def test_an_evaluation_without_a_drafter_is_refused_before_torch_is_imported(
    capsys: pytest.CaptureFixture[str], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("tlt.cli.loading")
    said = refusal(capsys, "draft", "train", recipe, "--seconds", "0")
    assert "--seconds 0 evaluates a drafter: give --speculation.path FOLDER" in said


@pytest.mark.parametrize(
    ("numbers", "code", "said"),
    [
        ([signal.SIGTERM], 143, r"stopped by SIGTERM and saved after step 1 of 2 in .*run: .*--resume"),
        ([signal.SIGINT] * 2, 130, r"interrupted; nothing is saved yet"),
    ],
)
def test_a_signal_is_acknowledged_sets_the_exit_code_and_the_last_line_says_what_is_saved(
    capfd: pytest.CaptureFixture[str], recipe: str, monkeypatch: pytest.MonkeyPatch, numbers: Any, code: int, said: str
) -> None:
    """tests/run/test_run.py tests that a resumed run ends in the same policy."""

    def stop(self: Display, step: int, name: str, total: int) -> None:
        for number in numbers if name == "update" else ():
            os.kill(PID, number)

    monkeypatch.setattr(Display, "phase", stop)
    assert exit_code("train", recipe, "--train.steps", "2") == code
    acknowledged, line = (line for line in capfd.readouterr().err.splitlines() if line.startswith("tlt: "))
    assert re.search(r"tlt: SIG\w+: this step has 20 s to end .* A second signal stops it at once", acknowledged)
    assert re.search(f"tlt: {said}", line)


def test_data_and_reward_of_the_command_line_replace_those_of_the_recipe(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    sections = ('[data]\ntasks = [{name = "chain_sum"}]', '[[reward.terms]]\nname = "reasoning_gym"')
    recipe.write_text("\n".join([f"[model]\npath = '{home / 'model'}'", *sections]), encoding="utf-8")
    said = refusal(capsys, "train", str(recipe), "--data", "nowhere.jsonl", "--reward", "exact")
    assert "there is no file nowhere.jsonl" in said
    environment = Path(__file__).parents[1] / "recipes" / "guessing.toml"
    said = refusal(capsys, "train", str(environment), "--data", "nowhere.jsonl", "--reward", "exact")
    assert "there is no file nowhere.jsonl" in said
    said = refusal(capsys, "train", str(recipe), "--reward", "exact", "--reward.environment", "a:B")
    assert "reward.environment gives the reward" in said


def test_resume_starts_a_run_if_there_is_no_checkpoint(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    for steps, said in (("1", "there is no checkpoint in"), ("2", "resuming from step 1")):
        assert exit_code("train", recipe, "--resume", "--train.steps", steps) == 0
        assert said in capsys.readouterr().out


def generated(capsys: pytest.CaptureFixture[str], home: Path, *options: str) -> str:
    model = str(home / "model")
    sampling = ["--rollout.max_new_tokens", "8", "--model.dtype", "float64", "--model.device", "cpu"]
    assert exit_code("generate", model, "--prompt", QUESTIONS[0], *sampling, *options) == 0
    return capsys.readouterr().out


def responses_of(printed: str) -> dict[str, str]:
    """Return title -> response, without the line of the speed."""
    parts: dict[str, list[str]] = {}
    for line in printed.splitlines():
        if line.startswith("prompt ") or set(line) == {"─"}:
            parts[line.strip("─ ")] = []
        else:
            parts[next(reversed(parts))].append(line)
    return {title: "\n".join(lines) for title, lines in parts.items() if title}


def test_generate_depends_on_its_seed_and_not_on_the_drafter(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    found = responses_of(generated(capsys, home, "--prompt", "another", "--samples", "2"))
    assert set(found) == {f"prompt {p}, response {i}" for p in (0, 1) for i in (0, 1)}
    assert len(set(found.values())) == 4
    one = responses_of(generated(capsys, home, "--samples", "2"))
    assert responses_of(generated(capsys, home, "--samples", "2", "--speculation.drafter", "off")) == one
    assert responses_of(generated(capsys, home, "--samples", "2", "--run.seed", "1")) != one
    first, second = responses_of(generated(capsys, home, "--samples", "2", "--rollout.temperature", "0")).values()
    assert first == second


def test_generate_accepts_the_folder_of_a_run_or_a_checkpoint(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path
) -> None:
    assert exit_code("train", recipe, "--train.learning_rate", "0.1", "--run.save_every", "1") == 0
    capsys.readouterr()
    options = ["--prompt", "a", "--rollout.max_new_tokens=8", "--model.dtype=float64", "--model.device=cpu"]
    run = tmp_path / "run"
    said = []
    for folder in (run, run / "latest", run / "latest" / "policy", run / "checkpoints" / "step_00000001"):
        assert exit_code("generate", str(folder), *options) == 0
        said.append(responses_of(capsys.readouterr().out))
    assert said[0] == said[1] == said[2] != said[3]
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "state.json").unlink()
    assert "no complete checkpoint" in refusal(capsys, "generate", str(run), *options)


def test_generate_reads_the_prompt_column(capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path) -> None:
    """A model outside a run has no recipe, so its error names the option and the columns."""
    data, run = tmp_path / "rows.jsonl", tmp_path / "run" / "step_00000001"
    data.write_text(json.dumps({"ask": QUESTIONS[0], "id": 7}), encoding="utf-8")
    shutil.copytree(home / "model", run / "policy")
    (run / "state.json").write_text(json.dumps({"config": {"data": {"prompt_column": "ask"}}}), encoding="utf-8")
    options = ("--data", str(data), "--rollout.max_new_tokens=4", "--model.dtype=float64", "--model.device=cpu")
    assert exit_code("generate", str(run), *options) == 0
    assert "prompt 0, response 0" in capsys.readouterr().out
    said = refusal(capsys, "generate", str(home / "model"), *options)
    assert "under 'question': set data.prompt_column to one of its columns, ask, id" in said


@pytest.mark.parametrize(("agree", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_of_verify_is_its_verdict(
    recipe: str, monkeypatch: pytest.MonkeyPatch, agree: bool, code: int
) -> None:
    """tests/verify tests the verdict itself."""
    monkeypatch.setattr("tlt.verify.verify.verify", lambda *arguments: agree)
    assert exit_code("verify", recipe) == code


@pytest.mark.parametrize(
    ("command", "option"), [("verify recipe", "--json"), ("draft train recipe", "--out"), ("export model", "out")]
)
def test_results_that_cannot_be_written_are_refused_at_once(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is no folder, and nobody can make files in /proc."""
    (tmp_path / "file").touch()
    wrong = tmp_path if option == "--json" else tmp_path / "file"
    refused = [(tmp_path / "file" / "a", "cannot be written"), ("/proc/a", "cannot be written"), (wrong, "is a f")]
    for place, said in refused:
        assert exit_code(*command.split(), *[option] * option.startswith("-"), str(place)) == 2
        assert f"argument {option}: {place} {said}" in capsys.readouterr().err


def test_generate_reads_a_file_and_writes_one(capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path) -> None:
    rows = [{"q": text, "answer": "\ud800"} for text in QUESTIONS[:2]]  # UTF-8 cannot encode a lone surrogate
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    files = ("--data", str(tmp_path / "in.jsonl"), "--data.prompt_column", "q", "--out", str(tmp_path / "out.jsonl"))
    assert exit_code("generate", str(home / "model"), *files, "--samples", "2", "--rollout.max_new_tokens", "6") == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: (line["row"], line["index"]))
    expected = [(row, index, {"q": QUESTIONS[row], "answer": "\ud800"}) for row in range(2) for index in range(2)]
    assert [(line["row"], line["index"], {name: line[name] for name in rows[0]}) for line in lines] == expected
    assert all(isinstance(line["response"], str) and line["finish_reason"] in ("stop", "length") for line in lines)


def test_a_runs_model_sees_prompts_as_in_its_training(home: Path) -> None:
    """Template, prefill and chat template are those of the run, unless an option replaces them."""
    tokenizer, asked = load_tokenizer(home / "model"), Asked(["2 + 2"], None, {})
    trained_on = {"template": "Q: {question}\n", "prefill": "<think>", "chat": False, "system": "", "size": 9}
    config = DataConfig(tasks=[TaskConfig(name="chain_sum")], template="Q: {question}\n", prefill="<think>")
    wanted = tuple(encoder(tokenizer, config)("Q: 2 + 2\n"))
    prompt = _prompts(asked, tokenizer, trained_on)[0]
    assert prompt.token_ids == wanted
    assert prompt.prefill == "<think>", "its response begins with it"
    assert _prompts(asked, tokenizer, {})[0].token_ids != wanted


def test_a_runs_chat_template_gets_the_arguments_of_the_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options replace them. Without chat, fields of the chat template are not used."""
    tokenizer = load_tokenizer(home / "model")
    template = "{{ level }} {{ strftime_now('%Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    trained_on = {"chat": True, "system": "be brief", "chat_arguments": {"level": "low"}, "now": "2001-02-03"}

    def shown(**fields: Any) -> str:
        (prompt,) = _prompts(Asked(["2 + 2"], None, fields), tokenizer, trained_on)
        return tokenizer.decode(prompt.token_ids)

    assert shown() == "low 2001<system>be brief<user>2 + 2"
    assert shown(system="be long") == "low 2001<system>be long<user>2 + 2"
    assert shown(chat=False) == "2 + 2"
    trained_on["chat"] = False
    assert shown() == "2 + 2", "although the tokenizer has a template"


@pytest.mark.parametrize("allocate", [lambda: bytearray(1 << 62), lambda: torch.empty(1 << 60, dtype=torch.uint8)])
def test_a_lack_of_memory_is_an_error_of_one_sentence(
    capsys: pytest.CaptureFixture[str], recipe: str, monkeypatch: pytest.MonkeyPatch, allocate: Callable[[], object]
) -> None:
    def train(*arguments: Any, **options: Any) -> None:
        try:
            allocate()
        except Exception as error:
            error.add_note("saved after step 3: continue with --resume")
            raise

    monkeypatch.setattr("tlt.run.train.train", train)
    assert exit_code("train", recipe) == 75
    (said,) = capsys.readouterr().err.splitlines()
    expected = r"tlt: out of memory.*: lower engine\.kv_memory_mb, .*; saved after step 3: continue with --resume"
    assert re.match(expected, said)


def test_texts_of_models_and_users_are_printed_unchanged(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a[b] [/i] :warning:"
    folder.mkdir(parents=True)  # the slash makes two of it
    recipe = write_recipe(home, folder)
    assert exit_code("train", recipe, "--train.steps", "1", "--run.folder", str(folder / "run")) == 0
    printed = capsys.readouterr().out
    assert f"all files are in {folder / 'run'}:" in printed
    assert all(words in " ".join(printed.split()) for words in ("step 1/1", "1 step: mean reward"))
    said = "[/i] :warning: " + "word " * 40 + "end"
    monkeypatch.setattr("tlt.build.Detokenizer", lambda tokenizer: lambda ids: said)
    assert said in generated(capsys, home)


def test_existing_files_are_not_overwritten(capsys: pytest.CaptureFixture[str], recipe: str, home: Path) -> None:
    model, data = home / "model", home / "prompts.jsonl"
    before = {path: path.read_bytes() for path in (*model.iterdir(), data)}
    for command in ("generate MODEL --data DATA --out DATA", f"draft train {recipe} --out MODEL", "export MODEL MODEL"):
        words = command.replace("MODEL", str(model)).replace("DATA", str(data)).split()
        assert re.search(r"(prompts\.jsonl|model) is not empty: give another path", refusal(capsys, *words))
    assert {path: path.read_bytes() for path in before} == before


def test_generate_overwrites_no_column_of_a_row(capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "a"}\n{"question": "b", "response": "mine", "index": 7}\n', encoding="utf-8")
    command = ("generate", str(home / "model"), "--data", str(data), "--out", str(tmp_path / "out.jsonl"))
    assert "columns with names that --out uses for responses: rename index, response" in refusal(capsys, *command)


def test_waiting_threads_sleep_early_unless_the_user_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    exit_code("config")
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    exit_code("config")
    assert os.environ["GOMP_SPINCOUNT"] == "50000"
