"""Files of a run: completions, metrics that a page explains, and trackers. No line is lost or doubled."""

from __future__ import annotations

import json
import re
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest.mock import Mock, patch

import pytest
import tiny
from tiny import Crash, read_completions, tiny_config

from tlt.config import Config, ConfigError
from tlt.config.registry import TRACKERS, maker
from tlt.metrics import MetricsWriter, read_metrics
from tlt.rewards import RewardError
from tlt.rl.measure import measure, tokens_of
from tlt.run import trackers as trackers_module
from tlt.run.record import CompletionsWriter, RunProgress
from tlt.run.trackers import TrackedRun, Trackers, names_of, scalars
from tlt.types import Group, Prompt, Request, Response, RolloutStats, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HOW: dict[str, Any] = {"decoded": 0, "proposed": ""}  # this depends on the clock
TERMS = [{"name": "tiny_rewards:share_of_low_bytes", "weight": 2.0}, {"name": "length", "length_to": 40}]


def config_of(home: Path, **sections: dict[str, Any]) -> Config:
    run_section = {"folder": str(home / "run"), "save_every": 1, "keep": 9} | sections.pop("run", {})
    reward = {"terms": TERMS, "name": "reasoning_gym"}
    return tiny_config(home, reward=reward, run=run_section, **sections)


def train(config: Config, resume: bool = False) -> Path:
    tiny.train(config, resume)
    return Path(config.run.folder)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that records something of each kind."""
    home = tmp_path_factory.mktemp("everything")
    rows = [{"question": q, "answer": q[0], "data_source": "odd" if i % 2 else "even"} for i, q in enumerate("abcdef")]
    (home / "held_out.jsonl").write_text('{"question": "x"}\n{"question": "y"}', encoding="utf-8")
    config_of(home)  # makes the model
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = config_of(
        home,
        speculation={"drafter": "adaptive", "training": {"extra": 1.0}},
        train={"kl_weight": 0.1, "steps": 3},
        rollout={"max_waves": 2, "temperature": 1.0},
        eval={"every": 2, "path": str(home / "held_out.jsonl"), "samples": 2},
        run={"compare_every": 2},
    )
    return train(config)


def documented() -> list[str]:
    """Return the first column of the page's tables of metrics."""
    text = PAGE.read_text(encoding="utf-8").split("## completions.jsonl")[0].split("## metrics.jsonl")[1]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def names_in(section: str) -> set[str]:
    """Return the first column of the tables in a section of the page."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    return {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}


def explains(name: str, metric: str) -> bool:
    return re.fullmatch(re.sub(r"<\w+>", "[^/]+", name), metric) is not None


def test_the_page_explains_every_metric_once(everything: Path) -> None:
    """It explains no other metrics, except those that this run does not have."""
    names = documented()
    assert len(names) == len(set(names))
    found = {name for line in read_metrics(everything) for name, _ in scalars(line)} | {"step"}
    assert len(found) > 60
    assert not [metric for metric in found if sum(explains(name, metric) for name in names) != 1]
    rare = {
        *("outcomes/<outcome>", "memory/<process>/cuda", "rollout/alarms/<drafter>"),
        *(f"energy/{name}" for name in ("gpu_joules", "cpu_joules")),
        *(f"episodes/{name}" for name in ("turns", "reply_tokens", "ended/<reason>")),
        # of a learned drafter, if the tuner tried it in the rollout
        *("rollout/acceptance_rate/<drafter>", "rollout/by_depth/<drafter>/<depth>"),
        *(f"rollout/spot/{name}" for name in ("accept_length", "candidate")),
    }
    assert {name for name in names if not any(explains(name, metric) for metric in found)} <= rare


def test_the_page_explains_every_key_of_a_completion(everything: Path) -> None:
    assert names_in("completions.jsonl") == set(read_completions(everything)[0])


def test_names_have_no_spaces_and_every_number_has_one() -> None:
    line = {"step": 3, "a b": 1, "c": {"d e + f": 2.5, "g": {"h": 3}}, "workers": [{"IDLE": 1.0}], "prompts": [[0, 1]]}
    assert dict(scalars(line)) == {"a_b": 1, "c/d_e_+_f": 2.5, "c/g/h": 3}


def group(rewards: list[float | None], task: str = "", scores: list[dict[str, float]] | None = None) -> Group:
    prompt = Prompt(0, "q", (1, 2), {"task": task})
    params = SamplingParams()
    responses = [
        Response(Request(prompt, i, 0, i, params), [7] * (i + 1), [], [], "stop", "", reward, "" if reward else "error")
        for i, reward in enumerate(rewards)
    ]
    for response, found in zip(responses, scores or [], strict=False):
        response.scores = found
    return Group(prompt, responses)


def test_rewards_terms_and_tasks_by_hand() -> None:
    first, second = [{"a": 1.0, "b": 0.0}, {"a": 2.0, "b": 1.0}], [{"a": 3.0}]
    free = group([5.0, 5.0], "Tell me of Rome.")
    free.prompt = replace(free.prompt, counts_by_task=False)
    groups = [group([1.0, 3.0], "sums", first), group([2.0, None], "words", second), free]
    line = measure(0, groups, RolloutStats(tokens=9), {}, {"waves": 1}, {"total": 2.0, "rollout": 1.0})
    assert (line.reward, line.reward_std) == (mean([1, 3, 2, 5, 5]), pytest.approx(stdev([1, 3, 2, 5, 5])))
    assert line.rewards["a"] == {"mean": 2.0, "std": 1.0}
    assert line.rewards["b"] == {"mean": 0.5, "std": pytest.approx(0.5**0.5)}
    assert line.tasks["sums"] == {"mean": 2.0, "std": pytest.approx(2**0.5), "responses": 2}
    assert line.tasks["words"] == {"mean": 2.0, "std": 0.0, "responses": 1}
    assert set(line.tasks) == {"sums", "words"}
    counts = {"waves": 1, "unrewarded": 1, "too_few": 1, "without_spread": 1}
    assert line.batch == counts | {"without_spread_share": 0.5}
    assert tokens_of(groups) == 3 * (2 + 2) + 3 * (1 + 2)


def test_terms_and_tasks_of_a_run_are_those_of_its_completions(everything: Path) -> None:
    lines = read_metrics(everything)
    assert set(lines[0]["rewards"]) == {"tiny_rewards:share_of_low_bytes", "length"}
    assert {task for line in lines for task in line["tasks"]} == {"odd", "even"}
    for completion in read_completions(everything):
        total = sum(term.get("weight", 1.0) * completion["scores"][term["name"]] for term in TERMS)  # type: ignore[operator]
        assert completion["reward"] == pytest.approx(total)


def test_tokens_seen_continues_after_a_resume(tmp_path: Path) -> None:
    whole = read_metrics(train(config_of(tmp_path, train={"steps": 4})))
    other = {"folder": str(tmp_path / "resumed")}
    train(config_of(tmp_path, train={"steps": 2}, run=other))
    resumed = read_metrics(train(config_of(tmp_path, train={"steps": 4}, run=other), resume=True))
    assert [line["tokens_seen"] for line in resumed] == [line["tokens_seen"] for line in whole]
    assert whole[0]["tokens_seen"] > whole[0]["tokens"] > 0
    assert whole[-1]["seconds_left"] == 0.0
    assert whole[1]["seconds_left"] > 0


def test_the_time_left_does_not_jump(tmp_path: Path) -> None:
    """The first step takes 100 s, the others 10 s. Every second step is evaluated before it, in 4 s, and every fourth
    is saved after it, in 2 s. So the truth is known after each step."""
    config = tiny_config(tmp_path, train={"steps": 12}, eval={"every": 2, "path": "x"}, run={"save_every": 4})
    progress, left = RunProgress(config), []
    for step in range(12):
        seconds = {"total": 10.0 if step else 100.0} | ({"eval": 4.0} if step % 2 == 0 else {})
        seconds["total"] += seconds.get("eval", 0.0)
        metrics = types.SimpleNamespace(step=step + 1, seconds=seconds, tokens_seen=0, seconds_left=0.0)
        progress.add(types.SimpleNamespace(metrics=metrics, groups=[]))  # type: ignore[arg-type]
        left.append(metrics.seconds_left)
        if (step + 1) % 4 == 0:  # a save is added to the seconds of a step after its line was made
            seconds |= {"save": 2.0, "total": seconds["total"] + 2.0}
    truth = [10.0 * (11 - step) + 4.0 * ((11 - step) // 2) + 2.0 * ((11 - step) // 4) for step in range(12)]
    assert left[4:] == truth[4:], "from the first save on, all is known"
    assert left[2:4] == [truth[step] - 2.0 * ((11 - step) // 4) for step in (2, 3)]


def test_every_response_is_written_once_with_its_advantage(everything: Path) -> None:
    found = read_completions(everything)
    keys = [(line["prompt_id"], line["epoch"], line["index"]) for line in found]
    assert len(keys) == len(set(keys))
    lines = read_metrics(everything)
    last_carried = lines[-1]["batch"]["carried"]
    assert len(found) == sum(len(line["prompts"]) for line in lines) * 3 - 3 * last_carried
    groups: dict[tuple[int, int, int], list[float]] = {}
    for line in found:
        assert line["length"] == 16 or line["finish_reason"] == "stop"
        assert line["decoded"]["row_passes"] + line["decoded"]["accepted"] >= line["length"]
        if line["advantage"] is not None:
            groups.setdefault((line["step"], line["prompt_id"], line["epoch"]), []).append(line["advantage"])
    assert groups
    assert all(sum(advantages) == pytest.approx(0, abs=1e-9) for advantages in groups.values())
    assert sum(line["length"] for line in found) <= sum(line["tokens"] for line in lines)


def test_a_killed_and_resumed_run_has_every_completion_once(tmp_path: Path) -> None:
    whole = read_completions(train(config_of(tmp_path, train={"steps": 4})))
    config = config_of(tmp_path, train={"steps": 4}, run={"folder": str(tmp_path / "killed"), "save_every": 2})
    write = MetricsWriter.write

    def dies(self: MetricsWriter, metrics: Any) -> None:
        write(self, metrics)
        if metrics.step == 3:
            raise Crash

    with patch.object(MetricsWriter, "write", dies), pytest.raises(Crash):
        train(config)
    path = Path(config.run.folder) / "completions.jsonl"
    assert {line["step"] for line in read_completions(path.parent)} == {1, 2, 3}
    with path.open("ab") as file:
        file.write(b'{"step": 3, "half a li')
    found = read_completions(train(config, resume=True))
    assert [line | HOW for line in found] == [line | HOW for line in whole]


def test_completions_are_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    limit = 4000
    writer = CompletionsWriter(tmp_path, 0, limit)
    for step in range(40):
        writer.write(step, [group([1.0, 0.0])])
        assert sum(path.stat().st_size for path in tmp_path.glob("completions*")) <= limit
    steps = [line["step"] for line in read_completions(tmp_path)]
    assert (steps == sorted(steps), steps[-1], len(steps) > 4) == (True, 39, True)
    CompletionsWriter(tmp_path, steps[0] + 1, limit)
    assert {line["step"] for line in read_completions(tmp_path)} == {steps[0]}
    CompletionsWriter(tmp_path, 0, limit)
    assert not list(tmp_path.glob("completions*"))


def test_any_text_can_be_saved(tmp_path: Path) -> None:
    writer = CompletionsWriter(tmp_path, 0, 10**6)
    text = 'line\u2028break "quotes" \ud800 nul\x00 日本\n'
    odd = group([1.0, 0.0])
    odd.responses[0].text = text
    odd.prompt.data["answer"] = Path("not JSON")
    writer.write(0, [odd])
    assert [line["response"] for line in read_completions(tmp_path)] == [text, ""]
    assert "日本" in (tmp_path / "completions.jsonl").read_text(encoding="utf-8")


class Service(types.ModuleType):
    """Stand-in for the package wandb, which records its calls."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.told: list[tuple[int, dict[str, float]]] = []
        self.began: list[dict[str, Any]] = []
        self.closed, self.id = 0, "the-first"

    def Settings(self, console: str) -> None:
        assert console == "off"

    def init(self, **arguments: Any) -> Any:
        self.began.append(arguments)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, Any]) -> None:
        self.told.append((int(values["step"]), {k: v for k, v in values.items() if k != "step"}))

    def finish(self) -> None:
        self.closed += 1


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setattr(trackers_module, "find_spec", lambda name: name == "wandb" or find_spec(name))
    return service


def test_a_tracker_gets_every_metric_and_continues_after_a_resume(
    tmp_path: Path, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"trackers": ["wandb"]}
    lines = read_metrics(folder := train(config_of(tmp_path, run=run)))
    assert capsys.readouterr().out == ""
    assert service.told == [(line["step"], dict(scalars(line))) for line in lines]
    assert not (folder / "tensorboard").exists(), "it was not named"
    assert service.began[0]["id"] is None
    train(config_of(tmp_path, train={"steps": 3}, run=run), resume=True)
    assert service.began[1]["id"] == "the-first"
    assert service.closed == 2
    train(config_of(tmp_path, run=run | {"overwrite": True}))
    assert service.began[2]["id"] is None, "that is another run"


def test_a_tracker_of_the_user_gets_every_metric(tmp_path: Path) -> None:
    (tmp_path / "my_tracker.py").write_text(
        "class Mine:\n"
        "    def __init__(self, run):\n"
        "        self.file = open(run.folder / 'mine.txt', 'a')\n"
        "    def log(self, step, values):\n"
        "        print(step, values['reward'], file=self.file)\n"
        "    def close(self):\n"
        "        self.file.close()\n",
        encoding="utf-8",
    )
    config = config_of(tmp_path, run={"trackers": ["my_tracker:Mine"]})
    reward = config.reward.model_copy(update={"folder": str(tmp_path)})
    terms = [term.model_copy(update={"name": "length", "length_to": 40}) for term in reward.terms[:1]]
    folder = train(config.model_copy(update={"reward": reward.model_copy(update={"terms": terms})}))
    expected = [f"{line['step']} {line['reward']}" for line in read_metrics(folder)]
    assert (folder / "mine.txt").read_text(encoding="utf-8").splitlines() == expected


def tracked(folder: Path, *names: str) -> Trackers:
    """Return trackers that were given three steps."""
    trackers = Trackers({name: maker(TRACKERS[name]) for name in names}, TrackedRun(folder, 1, {}))
    for step in range(3):
        trackers.log(step, {"reward": 1.0})
    return trackers


@pytest.mark.parametrize("error", [ConnectionError("no network"), SystemExit(3)])
def test_a_failing_tracker_is_turned_off_and_costs_the_others_no_step(
    tmp_path: Path,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    told = list[int]()
    monkeypatch.setattr(service, "log", Mock(side_effect=error))
    monkeypatch.setattr(trackers_module.TensorBoard, "log", lambda self, step, values: told.append(step))
    tracked(tmp_path, "wandb", "tensorboard").close()
    assert caplog.text.count(f"failed ({type(error).__name__}: {error})") == 1
    assert told == [0, 1, 2]


def test_a_slow_tracker_delays_no_step(tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    may_log, threads = threading.Event(), list[int]()

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            assert name != "log" or may_log.wait(60)
            threads.append(threading.get_ident())
            return real(*arguments, **options)

        return call

    for name in ("init", "log"):
        monkeypatch.setattr(service, name, noted(name, getattr(service, name)))
    trackers = tracked(tmp_path, "wandb")
    assert not service.told
    may_log.set()
    trackers.close()
    assert [step for step, _ in service.told] == [0, 1, 2]
    assert service.closed == 1
    assert len(threads) == 4, "it starts once"
    assert len(set(threads)) == 1, "some trackers have one run per thread"
    assert threading.get_ident() not in threads


def test_a_tracker_that_hangs_ends_no_run(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(trackers_module, "_PATIENCE", 0.05)
    monkeypatch.setattr(service, "log", lambda *_, **__: may_end.wait(60))
    trackers = tracked(tmp_path, "wandb")
    trackers.close()
    assert "a tracker did not answer within 0.05 s" in caplog.text
    assert trackers._thread.is_alive()
    assert trackers._thread.daemon, "the process does not wait for it"
    may_end.set()
    trackers._thread.join(60)


def test_a_tracker_that_is_not_installed_is_refused_at_the_start(tmp_path: Path) -> None:
    if find_spec("wandb"):
        pytest.skip("wandb is installed")
    with pytest.raises(ConfigError, match=r"run\.trackers names wandb.*pip install 'tlt-rl\[wandb\]'"):
        train(config_of(tmp_path, run={"trackers": ["wandb"]}))
    with pytest.raises(RewardError, match=r"run\.trackers = 'no_such:Class' cannot be imported"):
        train(config_of(tmp_path, run={"trackers": ["no_such:Class"]}))
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_need_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_of(None) == ["tensorboard"]
    monkeypatch.setattr(trackers_module, "find_spec", lambda name: None)
    assert names_of(None) == []
