"""Changes of the recipe of a resumed run: some affect no weight, some only the rounding, and others must be forced.
They are logged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny import tiny_config, train

from tlt.config import Config, ConfigError, RewardConfig
from tlt.data.prompts import DataError
from tlt.engine.exactness import Exactness
from tlt.metrics import read_metrics
from tlt.rewards import sources_sha256
from tlt.run.display import Display
from tlt.run.resume import (
    _FREE,
    _ROUNDS,
    Contents,
    _fields,
    _is_of,
    allowed_changes,
    as_at_its_start,
    changes_environment,
    has_effect,
)
from tlt.store import checkpoint

FILES = Contents("hash", "of the reward")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two of three steps, as an error left it."""
    home = tmp_path_factory.mktemp("sound")
    train(short(home, steps=2))
    return home


@pytest.fixture
def home(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "home"))


def short(home: Path, steps: int = 3, **sections: dict[str, Any]) -> Config:
    train_section = {"steps": steps} | sections.pop("train", {})
    return tiny_config(home, **{"rollout": {"max_new_tokens": 4}, "train": train_section} | sections)


def compared(sections: dict[str, Any], force: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the changes that are found if a run without these sections is resumed with them."""
    model = {"path": "m", "dtype": "float32"}
    base = {"data": {"path": "p.jsonl"}, "reward": {"name": "exact"}}
    before = Config.model_validate({"model": model, **base})
    now = Config.model_validate({"model": model | sections.pop("model", {}), **base, **sections})
    state = {"step": 2, "config": json.loads(before.model_dump_json()), "model": "hash", "reward": "of the reward"}
    return allowed_changes(state, now, FILES, force)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"path": "elsewhere"}},
        {"data": {"path": "copy.jsonl"}},
        {"data": {"path": "p.jsonl", "max_prompt_tokens": 9999, "long_prompts": "drop"}},
        {"reward": {"name": "exact", "timeout_seconds": 99}},
        {"speculation": {"training": {"extra": 0.5, "learning_rate": 0.1}}},
        {"cluster": {"patience": 9.0}},
        {"eval": {"samples": 7}},
        {"run": {"folder": "moved", "keep": 7, "save_every": 3}},
        {"train": {"steps": 1000}},
    ],
    ids=str,
)
def test_fields_that_affect_no_weight_may_change(sections: dict[str, Any]) -> None:
    assert compared(sections) == []


@pytest.mark.parametrize("section", ["run", "cluster", "eval", "engine", "speculation"])
def test_of_these_sections_only_the_seed_affects_the_result(section: str) -> None:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "p"}, "reward": {"name": "exact"}}
    fields = [key for key, _ in _fields(Config.model_validate(tree).model_dump()) if key.startswith(f"{section}.")]
    assert fields
    assert [key for key in fields if not _is_of(key, (*_FREE, *_ROUNDS))] == ["run.seed"] * (section == "run")


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        *[("train", "micro_batch_tokens", 7), ("train", "gradient_checkpointing", True)],
        *[("cluster", "workers", 3), ("model", "device", "cpu"), ("engine", "max_rows", 3)],
        ("engine", "backend", "vllm"),
        *[("speculation", "drafter", "off"), ("speculation", "window", 8)],
    ],
)
def test_fields_that_affect_the_rounding_may_change_and_are_logged(section: str, name: str, value: Any) -> None:
    (change,) = compared({section: {name: value}})
    assert (change["key"], change["step"], change["effect"]) == (f"{section}.{name}", 2, "rounding")
    assert has_effect(change, Exactness(True, ("attention",)))
    assert has_effect(change, Exactness())
    assert has_effect(change, Exactness(True)) != (section in ("engine", "speculation") and name != "backend")
    assert has_effect(change | {"effect": "forced"}, Exactness(True))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"train": {"learning_rate": 0.5}}, "train.learning_rate"),
        ({"train": {"schedule": "cosine"}}, "train.schedule"),
        ({"rollout": {"group_size": 3}}, "rollout.group_size"),
        ({"reward": {"name": "exact", "answer_marker": "="}}, "reward.answer_marker"),
        ({"data": {"path": "p.jsonl", "shuffle": False}}, "data.shuffle"),
        ({"run": {"seed": 3}}, "run.seed"),
        ({"train": {"lora": {"targets": ["q_proj"]}}}, "train.lora.targets"),
        ({"train": {"steps": 50}}, "train.steps"),
    ],
)
def test_fields_that_affect_the_result_are_refused_unless_forced(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} = .*--force {key}"):
        compared(dict(sections))
    (change,) = compared(dict(sections), force=(key,))
    assert (change["key"], change["effect"]) == (key, "forced")


def test_fields_that_change_the_replies_of_an_environment() -> None:
    assert changes_environment([{"key": "train.steps"}, {"key": "reward.turns"}])
    assert not changes_environment([{"key": "data.path"}, {"key": "rollout.temperature"}])


def test_another_rank_or_fewer_steps_than_are_done_cannot_be_forced() -> None:
    with pytest.raises(ConfigError, match=r"train\.lora\.rank = 4, but the run .* has 0, and its weights do not fit"):
        compared({"train": {"lora": {"rank": 4}}}, force=("train.lora.rank",))
    with pytest.raises(ConfigError, match=r"train\.steps = 1 is below 2, the number of steps done"):
        compared({"train": {"steps": 1}}, force=("train.steps",))


def test_a_resumed_run_keeps_its_number_format_on_any_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has float64. A recipe with `auto` gets it from the checkpoint, and a new run from the machine."""
    monkeypatch.setattr("tlt.run.resume.torch_dtype", lambda model: torch.bfloat16)
    auto = short(home, model={"dtype": "auto"})
    assert as_at_its_start(auto, None).model.dtype == "bfloat16"
    summary = train(auto, resume=True)
    assert (summary["steps"], summary["changes"]) == (3, [])
    recorded = json.loads((home / "run" / "config.json").read_text(encoding="utf-8"))
    assert recorded["model"]["dtype"] == "float64"


def test_a_model_is_identified_by_the_content_of_its_files(home: Path) -> None:
    shutil.move(home / "model", home / "moved")
    moved = {"path": str(home / "moved")}
    assert train(short(home, model=moved), resume=True)["steps"] == 3
    config = home / "moved" / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    said = r"the files in model\.path differ from those of the run.*--force model\.path"
    with pytest.raises(ConfigError, match=said):
        train(short(home, steps=4, model=moved), resume=True)
    display, notes = Display(Console(quiet=True)), list[str]()
    display.note = notes.append
    train(short(home, steps=4, model=moved), True, display, force=["model.path"])
    assert "the files of model.path have changed (--force): the result of the run changes" in notes


def test_forced_changes_are_logged_and_recorded(home: Path) -> None:
    display, notes = Display(Console(quiet=True)), list[str]()
    display.note = notes.append
    forced = short(home, train={"learning_rate": 0.5, "micro_batch_tokens": 32})
    train(forced, True, display, force=["train.learning_rate"])
    said = "\n".join(notes)
    assert "train.learning_rate was 0.001 and is 0.5 (--force)" in said
    assert "micro_batch_tokens was 64 and is 32: from this step on, results differ by ro" in said
    summary = train(short(home, steps=4, train={"learning_rate": 0.5, "micro_batch_tokens": 32}), resume=True)
    recorded = {(change["key"], change["step"], change["effect"]) for change in summary["changes"]}
    assert recorded == {("train.learning_rate", 2, "forced"), ("train.micro_batch_tokens", 2, "rounding")}
    assert checkpoint.latest(home / "run" / "checkpoints").state["changes"] == summary["changes"]


def test_other_prompts_can_be_forced_and_none_is_repeated(home: Path) -> None:
    rows = [json.dumps({"question": word}) for word in ("new", "newer", "newest")]
    (home / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    with pytest.raises(DataError, match=r"not those of the run to be resumed.*--force data\.path"):
        train(short(home), resume=True)
    train(short(home), resume=True, force=["data.path"])
    before, now = [{tuple(pair) for pair in line["prompts"]} for line in read_metrics(home / "run")][1:]
    assert {epoch for _, epoch in before} == {0}
    assert {epoch for _, epoch in now} == {1}


def own_reward(home: Path, steps: int = 3, worth: str = "len(answer)", hint: str = "a") -> Config:
    """Return a run with a reward in a file next to the recipe, which may read a column of its own."""
    (home / "own_reward.py").write_text(f"def score(prompt, answer):\n    return {worth}\n", encoding="utf-8")
    config = short(home, steps, reward={"name": "own_reward:score", "folder": str(home)})
    rows = [{"question": word, "answer": "", "hint": hint} for word in ("two", "three")]
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return config


def test_a_reward_and_its_columns_are_identified_by_their_content(tmp_path: Path) -> None:
    train(own_reward(tmp_path, 1))
    assert train(own_reward(tmp_path, 2), resume=True)["changes"] == []
    said = r"the file of the function in reward\.name has changed .*--force reward\.name"
    with pytest.raises(ConfigError, match=said):
        train(own_reward(tmp_path, worth="-len(answer)"), resume=True)
    with pytest.raises(DataError, match=r"columns of .*prompts\.jsonl, which the reward may read.*--force data\.path"):
        train(own_reward(tmp_path, hint="b"), resume=True)
    changed = own_reward(tmp_path, 3, worth="-len(answer)", hint="b")
    summary = train(changed, resume=True, force=["reward.name", "data.path"])
    recorded = {(change["key"], change["effect"]) for change in summary["changes"]}
    assert recorded == {("reward.name", "forced"), ("data.path", "forced")}


def test_the_file_of_one_of_several_rewards_counts_as_well(tmp_path: Path) -> None:
    def digest(**terms: Any) -> str:
        return sources_sha256(RewardConfig.model_validate({"folder": str(tmp_path)} | terms))

    (tmp_path / "kept").mkdir()
    for source in (tmp_path / "mine_alone.py", tmp_path / "kept" / "deeper.py"):
        source.write_text("raise RuntimeError('it is not run')", encoding="utf-8")
    terms = [{"name": "mine_alone:f"}, {"name": "kept.deeper:f"}, {"name": "exact"}]
    before = digest(terms=terms), digest(name="mine_alone:f")
    (tmp_path / "kept" / "deeper.py").write_text("x = 1", encoding="utf-8")
    after = digest(terms=terms), digest(name="mine_alone:f")
    assert (before[0] != after[0], before[1] != after[1]) == (True, False)
    assert digest(name="no_such_module_anywhere.deeper:f") == digest(name="exact")
