"""A real run of the tiny model: its folder and its checkpoints. Speculation and interruptions change nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from tiny import QUESTIONS, Crash, tiny_config, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from tlt.config import Config
from tlt.draft.ahead import History
from tlt.loop import StepResult
from tlt.metrics import MetricsWriter, read_metrics
from tlt.models.weights import read_safetensors, sha256
from tlt.report.page import read_run
from tlt.rl.policy import Policy
from tlt.run import train as run_module
from tlt.run.display import Display
from tlt.stopping import Stopped
from tlt.store import checkpoint
from tlt.types import Response

STEPS = 4
TIMES = ("seconds", "seconds_left", "energy", "useful_share", "tokens_per_second", "workers", "memory")
ACCELERATION = ("accept_length", "rollout")  # what the drafter's memory, lost on a resume, may change


def lessons(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times and counters of speculation."""
    kept = []
    for line in read_metrics(folder):
        update = {key: value for key, value in line["update"].items() if not key.startswith("mismatch")}
        rest = {key: value for key, value in line.items() if key not in (*TIMES, *ACCELERATION)}
        kept.append(rest | {"update": update})
    return kept


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model and the prompts, and `whole`: an uninterrupted run that saves every step and keeps
    all."""
    home = tmp_path_factory.mktemp("home")
    train(whole(home))
    return home


def whole(home: Path, folder: str = "whole", **sections: dict[str, Any]) -> Config:
    train_section = {"steps": STEPS, "updates_per_step": 2} | sections.pop("train", {})
    run_section = {"folder": str(home / folder), "save_every": 1, "keep": 9} | sections.pop("run", {})
    return tiny_config(home, train=train_section, run=run_section, **sections)


def copy_of_the_run(home: Path, folder: str, at: int, of: str = "whole") -> Path:
    """Return the folder of the uninterrupted run as it was when the checkpoint after `at` steps was written."""
    copy = home / folder
    shutil.copytree(home / of, copy)
    for place in (copy / "checkpoints").iterdir():
        if int(place.name.removeprefix("step_")) > at:
            shutil.rmtree(place)
    (copy / "summary.json").unlink()
    return copy


def test_a_run_leaves_its_configuration_and_its_rewards_in_tensorboard(home: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = home / "whole"
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == whole(home).model_dump()
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, STEPS + 1))
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    shown = [(e.step, e.value) for e in events.Scalars("reward")]
    assert shown == [(m["step"], pytest.approx(m["reward"], rel=1e-6)) for m in read_metrics(folder)]
    assert {"update/loss", "update/mismatch_p999", "seconds/rollout", "accept_length"} <= set(events.Tags()["scalars"])


def test_summary_has_the_promised_keys(home: Path) -> None:
    summary, lines = summary_of(home), read_metrics(home / "whole")
    assert summary["steps"] == STEPS
    assert summary["reward_steps"] == 2
    assert summary["reward_first"] == (lines[0]["reward"] + lines[1]["reward"]) / 2
    assert summary["reward_last"] == (lines[-2]["reward"] + lines[-1]["reward"]) / 2
    assert len(summary["policy_sha256"]) == 64
    assert (summary["exact"], summary["exactness"].partition(":")[0]) == (True, "exact")
    tokens, passes = sum(line["tokens"] for line in lines), sum(line["rollout"]["row_passes"] for line in lines)
    assert summary["accept_length"] == pytest.approx(tokens / passes)
    assert summary["tokens_per_second"] == pytest.approx(tokens / summary["seconds"]["rollout"])
    assert {"machine", "versions", "commit"} <= set(summary)
    shares = [line["useful_share"] for line in lines]
    assert 0 < min(shares) <= summary["useful_share"] <= max(shares) <= 1
    peaks = [line["memory"]["driver"]["resident"] for line in lines]
    assert peaks == sorted(peaks), "they are peaks since the process began"
    assert summary["peak_memory"] == {"driver": {"resident": peaks[-1]}}
    assert 50 < peaks[-1] <= getrusage(RUSAGE_SELF).ru_maxrss / 1024, "this very process ran it; MiB"


def test_seconds_are_disjoint_and_sum_to_the_total(home: Path) -> None:
    for seconds in [summary_of(home)["seconds"], *(line["seconds"] for line in read_metrics(home / "whole"))]:
        parts = {name: spent for name, spent in seconds.items() if name != "total"}
        assert set(parts) == {"rollout", "reward", "update", "sync", "save", "other"}
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(seconds["total"], rel=1e-9)


def test_every_step_learns_from_tokens_of_the_policy_itself(home: Path) -> None:
    """The mismatch of rollout and trainer is only rounding, with drafts that were accepted."""
    lines = read_metrics(home / "whole")
    for line in lines:
        assert 0 <= line["update"]["mismatch_mean"] <= line["update"]["mismatch_p999"] < 1e-4
        assert line["update"]["grad_norm"] > 0
    assert sum(line["rollout"]["accepted"] for line in lines) > 0


def test_transformers_loads_the_last_checkpoint(home: Path) -> None:
    folder = home / "whole" / "checkpoints" / f"step_{STEPS:08d}" / "policy"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert sha256(model.state_dict()) == summary_of(home)["policy_sha256"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("héllo")["input_ids"]) == "héllo"


def test_another_seed_changes_everything(home: Path) -> None:
    assert train(whole(home, "seed", run={"seed": 2}))["policy_sha256"] != summary_of(home)["policy_sha256"]


def test_a_resumed_run_ends_like_an_uninterrupted_one(home: Path) -> None:
    copy = copy_of_the_run(home, "resumed", 1)
    summary = train(whole(home, copy.name), resume=True)
    assert summary["policy_sha256"] == summary_of(home)["policy_sha256"]
    assert summary["steps"] == STEPS
    assert lessons(copy) == lessons(home / "whole")


def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(home: Path) -> None:
    copy = copy_of_the_run(home, "history", 2)
    train(whole(home, copy.name), resume=True)
    assert history_of(copy) == history_of(home / "whole")


def history_of(folder: Path) -> dict[int, list[int]]:
    """Return the last responses to each prompt in the last checkpoint, by seed."""
    history = History()
    history.load(folder / "checkpoints" / f"step_{STEPS:08d}")
    assert len(history) == 3 * len(QUESTIONS), "three responses to each prompt"
    return {ahead.seed: ahead.tokens.tolist() for ahead in history._kept.values()}


def test_a_finished_run_reports_it(home: Path) -> None:
    copy = copy_of_the_run(home, "finished", STEPS)
    display, notes = Display(Console(quiet=True)), list[str]()
    display.note = notes.append
    train(whole(home, copy.name), True, display)
    assert f"this run has ended after {STEPS} steps: raise train.steps to continue" in notes
    assert any("6 prompts of" in note and "reward tiny_rewards" in note for note in notes)
    assert any("model: 2 layers x 32, vocabulary 257, float64, on cpu" in note for note in notes)


def test_a_run_killed_while_it_wrote_a_line_can_be_resumed(home: Path) -> None:
    copy = copy_of_the_run(home, "half a line", 2)
    metrics = copy / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    metrics.write_text("".join(lines[:2]) + lines[2][: len(lines[2]) // 2], encoding="utf-8")
    train(whole(home, copy.name), resume=True)
    assert lessons(copy) == lessons(home / "whole")


def test_a_run_killed_between_checkpoint_and_metrics_loses_no_line(home: Path) -> None:
    write = MetricsWriter.write

    def dying(self: MetricsWriter, metrics: Any) -> None:
        if metrics.step == 2:
            raise Crash
        write(self, metrics)

    with patch.object(MetricsWriter, "write", dying), pytest.raises(Crash):
        train(whole(home, "killed"))
    assert train(whole(home, "killed"), resume=True)["steps"] == STEPS
    assert lessons(home / "killed") == lessons(home / "whole")


def test_a_run_killed_during_its_resume_loses_no_line(home: Path) -> None:
    """The process ends when metrics.jsonl, or a file that will replace it, is open and empty."""
    copy, write_text = copy_of_the_run(home, "killed twice", 2), Path.write_text

    def dying(self: Path, text: str, **options: Any) -> None:
        write_text(self, "" if "metrics" in self.name else text, **options)
        if "metrics" in self.name:
            raise Crash

    with patch.object(Path, "write_text", dying), pytest.raises(Crash):
        train(whole(home, copy.name), resume=True)
    train(whole(home, copy.name), resume=True)
    assert lessons(copy) == lessons(home / "whole")


class Asking(Display):
    """Display that sends signals to this process when a phase of a step begins. The phase then takes `seconds`."""

    def __init__(self, phase: str, step: int, *numbers: int, seconds: float = 0.0) -> None:
        super().__init__(Console(quiet=True))
        self.when, self.numbers, self.seconds = (step, phase), numbers, seconds

    def note(self, text: str) -> None:
        self.phase(-1, text.split()[0], 0)

    def phase(self, step: int, name: str, total: int) -> None:
        if (step, name) == self.when:
            for number in self.numbers:
                os.kill(os.getpid(), number)
            time.sleep(self.seconds)

    def step(self, result: StepResult) -> None:
        self.phase(result.metrics.step - 1, "step", 0)


@pytest.mark.parametrize("words", ["loading", "model:", "resuming"])
def test_a_signal_before_the_first_step_ends_the_run_at_once_and_changes_nothing(home: Path, words: str) -> None:
    folder = home / f"early {words}"
    shutil.copytree(home / "whole", folder, symlinks=True)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".tlt.lock"}
    config = whole(home, folder.name, run={"overwrite": True}, train={"steps": STEPS + 1})
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM before the first step: nothing was changed$") as stopped:
        train(config, words == "resuming", Asking(words, -1, signal.SIGTERM, seconds=60.0))
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert {path: path.read_bytes() for path in before} == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_summary_that_does_not_end_is_abandoned_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    config = whole(home, "no summary", run={"save_every": 0, "stop_within": 0.1})
    monkeypatch.setattr(run_module, "summarize", slow)
    with pytest.raises(Stopped, match=rf"abandoned; saved after step {STEPS} in"):
        train(config)


@pytest.mark.parametrize(
    ("phase", "step", "number"),
    [("rollout", 0, signal.SIGINT), ("update", 2, signal.SIGHUP), ("save", 1, signal.SIGTERM)],
)
def test_a_signal_saves_and_the_run_resumes_to_the_same_end(home: Path, phase: str, step: int, number: int) -> None:
    save_every = 1 if phase == "save" else 0  # while it saves for another reason
    config = whole(home, f"{phase} {number}", run={"save_every": save_every})
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=rf"saved after step {step + 1} of {STEPS}.*--resume") as stopped:
        train(config, False, Asking(phase, step, number))
    assert stopped.value.exit_code == 128 + number
    assert signal.getsignal(number) is before
    assert len(read_metrics(Path(config.run.folder))) == step + 1
    summary = train(config, resume=True)
    assert summary["policy_sha256"] == summary_of(home)["policy_sha256"]
    assert lessons(Path(config.run.folder)) == lessons(home / "whole")


@pytest.mark.parametrize(
    ("step", "left"), [(0, "before the first step: nothing is saved"), (2, "saved after step 2 of")]
)
def test_a_signal_during_an_evaluation_starts_no_step(home: Path, step: int, left: str) -> None:
    evaluated = held_out(home, "unseen", "other")
    config = whole(home, f"evaluation {step}", run={"save_every": 0}, eval=evaluated)
    with pytest.raises(Stopped, match=left):
        train(config, False, Asking("eval", step, signal.SIGTERM))
    assert len(read_metrics(Path(config.run.folder))) == step


def test_a_step_that_does_not_end_is_abandoned_and_the_state_before_it_saved(home: Path) -> None:
    config = whole(home, "slow", run={"save_every": 0, "stop_within": 0.1})
    with pytest.raises(Stopped, match=r"within 0.1 s .*abandoned; saved after step 2 in .*--resume") as stopped:
        train(config, False, Asking("rollout", 2, signal.SIGTERM, seconds=60.0))
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert train(config, resume=True)["policy_sha256"] == summary_of(home)["policy_sha256"]


def test_a_step_in_its_update_gets_more_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seconds = Policy.update, [0.45]

    def update(self: Policy, batch: Any, step: int, *group: Any) -> Any:
        metrics = real(self, batch, step, *group)
        if step == 2:
            self.version = None
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(seconds[0])
            self.version = step + 1
        return metrics

    monkeypatch.setattr(Policy, "update", update)
    with pytest.raises(Stopped, match=r"saved after step 3 of"):
        train(whole(home, "more time", run={"save_every": 0, "stop_within": 0.3}))
    seconds[0] = 60.0
    with pytest.raises(Stopped, match=r"abandoned; saved after step 2 in"):
        train(whole(home, "no more time", run={"save_every": 1, "stop_within": 0.3}))


@pytest.mark.parametrize("moment", ["best", "checkpoints", "step"])
def test_a_save_takes_as_long_as_it_needs(home: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The signal arrives in a save of the best policy or of a checkpoint, or after the check whether a save is due."""
    real, saves = checkpoint.save, list[tuple[str, int]]()

    def slow(root: Path, step: int, *rest: Any, **named: Any) -> Path:
        saves.append((root.name, step))
        if saves[-1] == (moment, 2) and saves.count(saves[-1]) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        return real(root, step, *rest, **named)

    monkeypatch.setattr(checkpoint, "save", slow)
    run = {"save_every": int(moment == "checkpoints"), "stop_within": 0.1}
    config = whole(home, f"slow {moment}", run=run, eval=held_out(home, "unseen", "other"))
    with pytest.raises(Stopped, match=rf"^stopped by SIGTERM and saved after step 2 of {STEPS} in"):
        train(config, False, Asking("step", 1, *[signal.SIGTERM] * (moment == "step")))
    assert saves.count(("checkpoints", 2)) == 1


def test_a_signal_in_the_last_step_lets_the_run_end(home: Path) -> None:
    summary = train(whole(home, "last step"), False, Asking("update", STEPS - 1, signal.SIGTERM))
    assert summary["policy_sha256"] == summary_of(home)["policy_sha256"]


@pytest.mark.parametrize("phase", ["update", "save"])
def test_a_second_signal_ends_the_run_at_once(home: Path, phase: str) -> None:
    config = whole(home, f"impatient {phase}")
    with pytest.raises(KeyboardInterrupt) as stopped:
        train(config, False, Asking(phase, 2, signal.SIGINT, signal.SIGINT))
    assert stopped.value.__notes__ == [f"saved after step 2 in {config.run.folder}: continue with --resume"]
    assert train(config, resume=True)["policy_sha256"] == summary_of(home)["policy_sha256"]


def summary_of(home: Path) -> dict[str, Any]:
    return json.loads((home / "whole" / "summary.json").read_text(encoding="utf-8"))


def test_evaluation_changes_nothing_and_is_recorded(home: Path) -> None:
    evaluated = held_out(home, "unseen", "a", "other", every=3, solved=0.3)
    summary = train(whole(home, "evaluated", eval=evaluated))
    assert summary["policy_sha256"] == summary_of(home)["policy_sha256"]
    lines = read_metrics(home / "evaluated")
    assert [bool(line["eval"]) for line in lines] == [True, False, False, True]
    assert set(lines[0]["eval"]) >= {"mean@2", "pass@1", "pass@2", "length_mean"}
    assert summary["eval_first"] == lines[0]["eval"]
    assert summary["eval_last"] not in (summary["eval_first"], {})
    last = (home / "evaluated" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert json.loads(last) == {"step": STEPS + 1, "eval": summary["eval_last"]}
    mean = read_run(home / "evaluated").column("eval/mean@2")
    assert mean == {line["step"]: line["eval"]["mean@2"] for line in (lines[0], lines[3])} | {
        STEPS + 1: summary["eval_last"]["mean@2"]
    }
    assert 2 * lines[3]["seconds"]["total"] == pytest.approx(sum(lines[3]["seconds"].values()), rel=1e-9)
    again = copy_of_the_run(home, "evaluated again", 2)
    assert train(whole(home, again.name, eval=evaluated), resume=True)["eval_last"] == summary["eval_last"]


def test_a_reward_that_fails_sometimes_is_counted_and_the_run_continues(home: Path) -> None:
    summary = train(whole(home, "failing", reward={"name": "tiny_rewards:raises_now_and_then"}))
    assert summary["steps"] == STEPS
    assert 0 < summary["without_reward"]["error"] < STEPS * 6


def test_groups_left_over_survive_a_resume(home: Path) -> None:
    """The run draws several waves and leaves groups over."""
    rollout = {"prompts_per_step": 3, "group_size": 4, "max_waves": 4, "max_new_tokens": 6}
    settings = {"loss": "dapo", "advantage": "rloo", "kl_weight": 0.01, "schedule": "linear"}
    sections = {"rollout": rollout, "train": settings, "reward": {"name": "tiny_rewards:every_third"}}
    expected = train(whole(home, "waves", **sections))["policy_sha256"]
    batches = [line["batch"] for line in read_metrics(home / "waves")]
    assert max(batch["waves"] for batch in batches) > 1
    assert sum(batch["without_spread"] for batch in batches) > 0
    at = max(range(1, STEPS), key=lambda step: batches[step - 1]["carried"])
    assert batches[at - 1]["carried"] > 0
    copy = copy_of_the_run(home, "waves resumed", at, of="waves")
    assert train(whole(home, copy.name, **sections), resume=True)["policy_sha256"] == expected
    assert lessons(copy) == lessons(home / "waves")


def test_a_comparison_with_plain_decoding_changes_nothing_and_finds_the_same_tokens(home: Path) -> None:
    summary, before = train(whole(home, "compared", run={"compare_every": 2})), summary_of(home)
    assert (summary["policy_sha256"], before["compared"]) == (before["policy_sha256"], {})
    lines = read_metrics(home / "compared")
    assert [bool(line["compared"]) for line in lines] == [False, True, False, True]
    assert ["compare" in line["seconds"] for line in lines] == [False, True, False, True]
    tokens = lines[1]["tokens"] + lines[3]["tokens"]
    assert {"tokens": tokens, "responses": 12, "differ": 0, "steps": 2}.items() <= summary["compared"].items()
    for line, alone in zip(lines, read_metrics(home / "whole"), strict=True):
        counts = ("row_passes", "drafted", "accepted", "ahead_drafted", "strategies")
        assert {key: line["rollout"][key] for key in counts} == {key: alone["rollout"][key] for key in counts}


def held_out(home: Path, *questions: str, **fields: Any) -> dict[str, Any]:
    path = home / "held_out.jsonl"
    path.write_text("\n".join(json.dumps({"question": q}) for q in questions), encoding="utf-8")
    return {"every": 2, "path": str(path), "samples": 2} | fields


def test_evaluations_have_their_own_sampling_parameters(home: Path) -> None:
    """At temperature 0 both responses to a prompt are equal, and within their own limit. Training has the usual
    parameters."""
    asked: list[list[Response]] = []

    def listening(rollout: Any) -> Any:
        generate = rollout.generate

        def heard(*given: Any) -> Any:
            responses, stats = generate(*given)
            asked.append(sorted(responses, key=lambda r: (r.request.prompt.prompt_id, r.request.index)))
            return responses, stats

        rollout.generate = heard
        return rollout

    own = held_out(home, "unseen", "other", temperature=0.0)
    summary = train(whole(home, "own sampling", eval=own), wrap=listening)
    assert summary["policy_sha256"] == summary_of(home)["policy_sha256"]
    evaluations = [responses for responses in asked if len(responses) == 4]
    assert len(evaluations) == 3
    for responses in evaluations:
        for params in (response.request.sampling for response in responses):
            assert params.temperature == 0.0
        texts = [response.token_ids for response in responses]
        assert texts[0] == texts[1] != texts[2] == texts[3]


def test_the_best_policy_of_a_run_is_that_of_the_best_evaluation(home: Path) -> None:
    train(whole(home, "best", eval=held_out(home, "unseen", "other", every=1, samples=3), train={"steps": 6}))
    found = checkpoint.latest(home / "best" / "best")
    values = [line["eval"]["mean@3"] for line in read_metrics(home / "best")]
    evaluated = {step: value for step, value in enumerate(values) if step}  # that before the first is no policy of ours
    best = max(evaluated, key=lambda step: (evaluated[step], -step))
    assert (found.state["step"], found.state["worth"]) == (best, evaluated[best])
    saved = checkpoint.latest(home / "best" / "checkpoints").folder.parent / f"step_{best:08d}"
    assert sha256(read_safetensors(found.folder / "policy")) == sha256(read_safetensors(saved / "policy"))
