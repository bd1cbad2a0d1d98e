"""`tlt eval` gives the figures of the run's own evaluation, and `tlt train --check` neither trains nor writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import QUESTIONS, tiny_config, tiny_tree, train, write_recipe

from tlt.cli import main
from tlt.environments.episodes import Episodes
from tlt.store.checkpoint import Checkpoint, latest


def write_prompts(path: Path, *questions: str) -> None:
    path.write_text("".join(json.dumps({"question": q, "answer": q[0]}) + "\n" for q in questions), encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that has evaluated itself before and after two steps."""
    home = tmp_path_factory.mktemp("home")
    write_prompts(home / "held_out.jsonl", "unseen", "other", "more", QUESTIONS[0])
    held_out = {"every": 2, "samples": 3, "path": str(home / "held_out.jsonl"), "size": 2}
    train(tiny_config(home, eval=held_out, train={"steps": 2}, speculation={"drafter": "suffix"}))
    adapted = {"steps": 2, "lora": {"rank": 4}, "learning_rate": 0.1}
    train(tiny_config(home, eval=held_out, train=adapted, run={"folder": str(home / "adapted")}))
    train(tiny_config(home, run={"folder": str(home / "open")}, train={"steps": 1}, speculation={"drafter": "off"}))
    return home


def measured(home: Path, *words: str, run: str = "run") -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(home / run), "--json", str(home / "found.json"), *words])
    assert ended.value.code == 0
    return json.loads((home / "found.json").read_text(encoding="utf-8"))


def test_it_repeats_the_last_evaluation_of_the_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(home.rglob("run/**/*"))
    found = measured(home)
    summary = json.loads((home / "run" / "summary.json").read_text(encoding="utf-8"))
    assert {name: found[name] for name in summary["eval_last"]} == summary["eval_last"]
    assert found["prompts"] == 2
    assert f"run after 2 steps: 2 held-out prompts of {home / 'held_out.jsonl'}, 3 responses to each" in (
        capsys.readouterr().out
    )
    assert sorted(home.rglob("run/**/*")) == before


def test_one_worker_evaluates_a_sharded_policy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_several(folder: Path) -> Checkpoint:
        found = latest(folder)
        found.state["config"]["cluster"] |= {"workers": 2, "min_workers": 2}
        found.state["config"]["train"]["shard"] = True
        return found

    monkeypatch.setattr("tlt.commands.training.latest", of_several)
    assert measured(home)["prompts"] == 2


def test_adapters_are_merged_as_in_the_run(home: Path) -> None:
    first, last = (
        json.loads((home / "adapted" / "summary.json").read_text())[f"eval_{name}"] for name in ("first", "last")
    )
    found = measured(home, run="adapted")
    assert {name: found[name] for name in last} == last != first


def test_adapters_of_another_model_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(home / "model", home / "other")
    (other / "generation_config.json").write_text('{"eos_token_id": 5}', encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(home / "adapted"), "--model.path", str(other)])
    assert ended.value.code == 2
    assert f"the files in {other} are not those that the adapters in" in capsys.readouterr().err


def test_all_prompts_of_another_file_are_evaluated_but_those_that_trained(home: Path) -> None:
    write_prompts(home / "others.jsonl", "x", "y", "z", *QUESTIONS)
    for run in ("run", "open"):
        found = measured(home, "--data", str(home / "others.jsonl"), "--eval.samples", "2", run=run)
        assert (found["prompts"], found["data"]) == (3, str(home / "others.jsonl"))
        assert "mean@2" in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["NOWHERE"], "there is no checkpoint in NOWHERE/checkpoints: give the folder of a run that has one\n"),
        (["HOME/run", "--data", "none.jsonl"], "eval.path: there is no file none.jsonl"),
        (["HOME/open"], "open has no held-out prompts: give --data FILE"),
        (["HOME/run", "--eval.sample", "2"], "unknown key eval.sample: did you mean eval.samples?"),
    ],
)
def test_mistakes_are_one_sentence(home: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *(word.replace("HOME", str(home)) for word in words)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def checked(place: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train", str(place / "recipe.toml"), "--check", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_recipe(tmp_path / "recipe.toml", tiny_tree(tmp_path))
    return tmp_path


def test_a_good_recipe_is_shown_and_nothing_is_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.rglob("*"))
    assert checked(place, "--reward.name=exact") == 0
    said = capsys.readouterr().out
    assert "the first prompt, as the model sees it:\ntwo and two\n" in said
    assert "reward of the made-up response 't': 1\n" in said
    assert "all checks passed: this recipe can train for 2 steps" in said
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.prompt_column=nothing"], "set data.prompt_column to one of its columns"),
        (["--reward.name=reasoning_gym"], "reasoning_gym"),
        (
            ["--train.micro_batch_tokens=10000000", "--rollout.max_new_tokens=400", "--rollout.group_size=9000"],
            "memory",
        ),
        (["--resume"], "--check is for a new run: leave out --resume"),
    ],
)
def test_a_fault_is_found(place: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(place, *words) == 2
    assert said in capsys.readouterr().err
    assert not (place / "run").exists()


def test_a_reward_that_fails_is_found(
    place: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (place / "own_failing.py").write_text("def close(prompt, answer):\n    return float(prompt.data['anser'])\n")
    assert checked(place, "--reward.name=own_failing:close", f"--reward.folder={place}") == 2
    assert "has no reward (error, see above): correct the reward function" in capsys.readouterr().err
    assert "own_failing.py:2: KeyError: 'anser'" in caplog.text
    assert not (place / "run").exists()


def test_too_little_memory_is_found(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tlt.rl.dry_run.free_bytes", lambda device: 1000)
    assert checked(place) == 2
    assert "an update does not fit the memory of cpu" in capsys.readouterr().err


def test_a_cache_too_small_for_the_longest_response_is_found(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tlt.engine.memory.cache_tokens", lambda *sizes: 40)
    assert checked(place) == 2
    remedy = "raise engine.kv_memory_mb, or lower engine.max_rows or rollout.max_new_tokens"
    assert f"of the key-value cache, which has 40: {remedy}" in capsys.readouterr().err


def test_an_environment_is_called_for_a_turn(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    take: Any = Episodes.take
    monkeypatch.setattr(Episodes, "take", lambda *given: take(*given[:2], 0.01))  # the reply takes longer
    (place / "own_environment.py").write_text(
        "import time\n"
        "class Asks:\n"
        "    def reset(self, prompt):\n        return 'go'\n"
        "    def step(self, text):\n        time.sleep(0.1)\n        return text[:3] + '!', False, 0.5\n"
        "class Ends(Asks):\n"
        "    def step(self, text):\n        return None, True, 0.5\n"
        "class Fails(Asks):\n"
        "    def step(self, text):\n        return text[0]['anser'], True, 0.5\n"
    )
    before = sorted(place.rglob("*"))
    words = ["--reward.name=reasoning_gym", f"--reward.folder={place}", "--reward.environment=own_environment:"]
    assert checked(place, *words[:-1], words[-1] + "Asks") == 0
    assert "the environment's reply to the made-up turn 't':\nt!\n" in capsys.readouterr().out
    assert checked(place, *words[:-1], words[-1] + "Ends") == 0
    assert "reward of the made-up response 't': 0.5\n" in capsys.readouterr().out
    assert checked(place, *words[:-1], words[-1] + "Fails") == 2
    assert "has no reward (error, see above): correct the environment\n" in capsys.readouterr().err
    assert "own_environment.py:13: TypeError" in caplog.text
    assert sorted(place.rglob("*")) == before
