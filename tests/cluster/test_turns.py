"""Runs of episodes: the sha256 is the same with any drafter, with any number of workers, after lost workers, and after
a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pools import Loses, TestPool
from rich.console import Console
from test_coordinator import train as run
from tiny import QUESTIONS, read_completions, tiny_model, tiny_tree

from tlt.cluster.coordinator import Coordinator, Share
from tlt.cluster.supervisor import Supervisor
from tlt.cluster.worker import Slice
from tlt.config import Config, parse_config
from tlt.data.tokenizer import load_tokenizer
from tlt.environments.episodes import Episodes
from tlt.loop import StepResult
from tlt.metrics import read_metrics
from tlt.run.display import Display
from tlt.types import Prompt, Reply, Request, Response, RolloutStats, Row, SamplingParams

QUIET = Console(quiet=True)


def config_of(home: Path, environment: str = "Echo", **sections: dict[str, Any]) -> Config:
    folder = str(Path(__file__).parent.parent)
    sections = {
        "reward": {"environment": f"tiny_environments:{environment}", "folder": folder},
        "rollout": {"stop_strings": list("abcdefgh "), "max_new_tokens": 64},
        "cluster": {"slice_seconds": 1e-9},
    } | sections
    sections["train"] = {"steps": 2, "learning_rate": 1e-3, "micro_batch_tokens": 128, **sections.get("train", {})}
    sections["run"] = {"folder": str(home / "run"), "overwrite": True, "seed": 1, **sections.get("run", {})}
    tree = tiny_tree(home, **sections)
    tree["reward"].pop("name", None)
    rows = [{"question": question, "calls": str(home / "calls")} for question in QUESTIONS]
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return parse_config(tree)


def train(config: Config, loses: Loses = lambda i, m: "", **options: Any) -> Any:
    return run(config, loses=loses, **options)[0], responses_in(config)


def responses_in(config: Config) -> list[Any]:
    lines = read_completions(Path(config.run.folder))
    return [(line["step"], line["response"], line["replies"], line["reward"]) for line in lines]


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> tuple[str, Any]:
    found = train(two(home, speculation={"drafter": "off"}))
    assert max(len(line["replies"]) for line in read_completions(home / "run")) > 1, "episodes of several turns"
    return found


def two(home: Path, environment: str = "Echo", **sections: dict[str, Any]) -> Config:
    return config_of(home, environment, cluster={"workers": 2, "slice_seconds": 1e-9}, **sections)


def test_the_tokens_are_those_of_one_worker(tmp_path: Path, undisturbed: tuple[str, Any]) -> None:
    assert train(config_of(tmp_path))[1] == undisturbed[1]


class Stops(Display):
    """Display that ends the run when it would show a step, or a given response of it."""

    def __init__(self, step: int, response: int | None = None) -> None:
        super().__init__(QUIET)
        self.stops_at, self.left, self.shown = step, response, 0

    def phase(self, step: int, name: str, total: int) -> None:
        super().phase(step, name, total)
        self.at = step

    def response(self, response: Any) -> None:
        super().response(response)
        if self.at == self.stops_at and self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

    def step(self, result: StepResult) -> None:
        super().step(result)
        if self.at == self.stops_at:
            raise KeyboardInterrupt


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[Episodes]:
    """Return a list that gets the episodes of each rollout. Their `awaits` is True while a tool runs."""
    found: list[Episodes] = []
    begin = Episodes.begin
    monkeypatch.setattr(Episodes, "begin", lambda self, requests: (found.append(self), begin(self, requests))[1])
    return found


def test_a_worker_lost_in_a_tool_call(tmp_path: Path, undisturbed: tuple[str, Any], waiting: list[Episodes]) -> None:
    """The undisturbed run has no drafter, and this one has."""
    lost: list[int] = []

    def loses(worker: int, method: str) -> str:
        if lost or method != "decode" or not waiting[-1].awaits:
            return ""
        lost.append(worker)
        return "after"

    assert train(two(tmp_path, "Slow"), loses) == undisturbed
    assert lost


def test_a_run_killed_in_a_tool_resumes(tmp_path: Path, undisturbed: tuple[str, Any], waiting: list[Episodes]) -> None:
    class StopsDuringACall(Stops):
        def response(self, response: Any) -> None:
            self.left = 0 if waiting[-1].awaits else 1
            super().response(response)

    config = two(tmp_path, "Slow", run={"save_every": 1})
    with pytest.raises(KeyboardInterrupt):
        train(config, display=StopsDuringACall(1))
    assert train(config, resume=True) == undisturbed


def stopped_before_a_checkpoint(home: Path) -> tuple[Config, str, list[Any]]:
    """Stop a run after a checkpoint, before the next one. Return its recipe, the calls of its environment, and its
    responses."""
    config = config_of(home, "Unsure", run={"save_every": 2}, train={"steps": 4})
    with pytest.raises(KeyboardInterrupt):
        train(config, display=Stops(2))
    return config, (home / "calls").read_text(encoding="utf-8"), responses_in(config)


def test_a_resumed_run_uses_recorded_replies(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    config, before, said = stopped_before_a_checkpoint(tmp_path)
    assert before.count("\n") > len(said) / 2
    assert (tmp_path / "run" / "replies.jsonl").stat().st_size
    with pytest.raises(KeyboardInterrupt):
        train(config, resume=True, display=Stops(2))
    assert responses_in(config) == said
    assert calls.read_text(encoding="utf-8") == before
    train(config, resume=True)
    assert not (tmp_path / "run" / "replies.jsonl").stat().st_size, "the last checkpoint has all"


def test_another_environment_is_called_again(tmp_path: Path) -> None:
    """Its replies would be others than those that the run recorded before the change."""
    config, before, responses = stopped_before_a_checkpoint(tmp_path)
    other = config.model_copy(update={"reward": config.reward.model_copy(update={"turns": 2})})
    with pytest.raises(KeyboardInterrupt):
        train(other, resume=True, display=Stops(2), force=["reward.turns"])
    assert len((tmp_path / "calls").read_text(encoding="utf-8")) > len(before)
    assert responses_in(config) != responses


def test_a_checkpoint_after_an_error_keeps_the_replies_of_the_step_that_failed(tmp_path: Path) -> None:
    class Fails(Stops):
        def response(self, response: Any) -> None:
            try:
                super().response(response)
            except KeyboardInterrupt:
                raise RuntimeError("no disk") from None

    calls, config = tmp_path / "calls", config_of(tmp_path, "Unsure", train={"steps": 3})
    with pytest.raises(RuntimeError, match="no disk") as caught:
        train(config, display=Fails(1, response=5))
    assert "saved after step 1" in caught.value.__notes__[0]
    before = calls.read_text(encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        train(config, resume=True, display=Stops(1))
    assert calls.read_text(encoding="utf-8") == before


def test_tools_are_in_the_prompt_and_turns_and_malformed_calls_are_counted(tmp_path: Path) -> None:
    template = (
        "{% for t in tools %}{{ t.function.description }}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>"
        "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    tiny_model(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
    data = {"path": str(tmp_path / "prompts.jsonl"), "chat": True, "prefill": "<tool_call>{"}
    rollout = {"stop_strings": list("abcdefgh "), "max_new_tokens": 128}
    config = config_of(tmp_path, "Desk", data=data, rollout=rollout, train={"steps": 1})
    seen: list[Prompt] = []
    with patch("tlt.run.opening.about_prompts", lambda config, prompts, tokenizer: (seen.extend(prompts), "")[1]):
        train(config)
    prompt = load_tokenizer(str(tmp_path / "model")).decode(seen[0].token_ids)
    assert "Add two numbers." in prompt
    (line,), lines = read_metrics(Path(config.run.folder)), list(read_completions(Path(config.run.folder)))
    done = [one for one in lines if one["replies"]]
    assert all(one["replies"][0].startswith("Error: the call is not JSON") for one in done)
    assert any("<tool>Error: the call" in one["response"] for one in done)
    assert line["rewards"]["malformed_calls"]["mean"] >= len(done) / len(lines) > 0
    assert sum(line["episodes"]["ended"].values()) == 6
    assert line["episodes"]["turns"] >= 1
    assert line["episodes"]["reply_tokens"] > 0


def test_earlier_turns_of_a_lost_worker_are_no_drafts(tmp_path: Path) -> None:
    """The row already has these tokens."""
    coordinator = Coordinator(Supervisor(TestPool(1, lambda index: None)), two(tmp_path))
    request = Request(Prompt(0, "", (1, 2)), 0, 0, 0, SamplingParams(continues=True))
    coordinator.allocation.shares = [Share(rows={0: Row(request)})]
    stats = RolloutStats(seconds={"prefill": 0.0})
    coordinator.allocation.handle_slice(0, Slice([], stats, {0: 2}, {0: [5, 6]}))
    ended = Response(request, [5, 6, 7], [-1.0] * 3, [-1.0] * 3, "stop")
    coordinator.allocation.handle_slice(0, Slice([ended], stats, {}, {}))
    coordinator.allocation.shares[0].rows[0] = Row(request, [5, 6, 7, 8], replies=[Reply(3, 4, "")])
    coordinator.allocation.handle_slice(0, Slice([], stats, {0: 5}, {0: [9]}))
    coordinator._reclaim(0)
    known = coordinator.idle.ahead.store.get(request)
    assert known
    assert known.tokens.tolist() == [5, 6, 7, 8, 9]
