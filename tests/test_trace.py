"""Spans, states, and the trace file, also after a run was killed."""

from __future__ import annotations

import json
from itertools import combinations, count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_config, train

from tlt.metrics import read_metrics
from tlt.trace import IDLE, ROLLOUT, SPOT, UPDATE, Span, TraceError, TraceFile, Tracer, seconds_by_state


def events(path: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if e["ph"] == "X"]


def overlapping(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return pairs of spans of one thread that overlap without one containing the other."""
    pairs = combinations(sorted(found, key=lambda event: (event["ts"], -event["dur"])), 2)
    return [
        (a["name"], b["name"])
        for a, b in pairs
        if (a["pid"], a["tid"]) == (b["pid"], b["tid"]) and b["ts"] < a["ts"] + a["dur"] < b["ts"] + b["dur"]
    ]


def test_consecutive_spans_of_one_name_are_joined_and_their_counts_summed() -> None:
    tracer = Tracer()
    tracer.add("plain", 1.0, 2.0, tokens=3)
    tracer.add("plain", 2.004, 3.0, tokens=4, rounds=1)
    tracer.add("plain", 3.006, 4.0)
    tracer.add("prefill", 4.0, 4.5)
    tracer.add("plain", 4.5, 5.0)
    assert tracer.drain() == [
        Span("plain", 1.0, 3.0, {"tokens": 7, "rounds": 1}),
        Span("plain", 3.006, 4.0, {}),
        Span("prefill", 4.0, 4.5, {}),
        Span("plain", 4.5, 5.0, {}),
    ]
    assert tracer.drain() == []


def test_a_clock_set_back_and_a_block_that_raises_leave_whole_spans() -> None:
    tracer = Tracer()
    tracer.add("plain", 5.0, 4.0)
    assert tracer.drain() == [Span("plain", 5.0, 5.0, {})]
    with pytest.raises(KeyError), tracer.span("update"):
        raise KeyError
    assert [(s.name, s.facts) for s in tracer.drain()] == [("update", {})]


def test_states_cover_the_whole_time_across_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    times = count(1.0)  # a second between two looks at the clock
    monkeypatch.setattr("tlt.trace.time", SimpleNamespace(time=lambda: next(times)))
    tracer, spans = Tracer(), []
    for state in (IDLE, ROLLOUT, ROLLOUT, SPOT, UPDATE, IDLE):
        tracer.enter(state)
        spans += tracer.drain() if state == SPOT else []
    spans += tracer.drain()
    assert sum(seconds_by_state(spans).values()) == next(times) - 2.0, "from the first look to the last"
    assert all(before.end == after.start for before, after in pairwise(spans))
    assert [s.name for s in spans] == [IDLE, ROLLOUT, SPOT, SPOT, UPDATE, IDLE]
    assert seconds_by_state(spans)[ROLLOUT] == 1.0


SPANS = [Span("plain", 1.0, 2.0, {"tokens": 5}), Span(ROLLOUT, 1.0, 2.5, {})]


def test_the_file_has_the_format_of_chrome_and_perfetto(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    TraceFile(path).write({"driver": [], "worker 0": SPANS})
    found = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {(e["name"], e["pid"], e["args"]["name"]) for e in found if e["ph"] == "M"}
    assert {("process_name", 0, "driver"), ("process_name", 1, "worker 0"), ("thread_name", 1, "state")} <= names
    where = {"ph": "X", "pid": 1, "ts": 1_000_000}
    plain = where | {"name": "plain", "tid": 2, "dur": 1_000_000, "args": {"tokens": 5}}
    assert events(path) == [plain, where | {"name": "ROLLOUT", "tid": 1, "dur": 1_500_000}]


def test_a_damaged_file_is_continued_after_its_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    TraceFile(path).write({"worker 0": SPANS * 3})
    whole = path.read_bytes()
    for cut in range(len(whole), -1, -3):
        path.write_bytes(whole[:cut])
        TraceFile(path).write({"worker 0": [Span("save", 9.0, 9.5, {})]})
        found = [e["name"] for e in events(path)]
        assert found[-1] == "save"
        assert found[:-1] == ["plain", "ROLLOUT"] * 3 if cut == len(whole) else len(found) <= 7


def test_a_missing_folder_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace.json cannot be written \(No such file"):
        TraceFile(tmp_path / "gone" / "trace.json").write({"worker 0": SPANS})


PHASES = ("rollout", "reward", "update", "sync", "save", "eval")


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    """Return the folder of a run of two steps, resumed for a third."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tlt.run.train.write_report_or_warn", lambda folder: None)  # a page takes time between steps
        for steps in (2, 3):
            config = tiny_config(home, train={"steps": steps}, run={"folder": str(home / "run"), "save_every": 1})
            train(config, steps == 3)
    return home / "run"


def test_a_run_leaves_a_trace_of_all_its_work(folder: Path) -> None:
    found = events(folder / "trace.json")
    assert not overlapping(found)
    assert {e["name"] for e in found if e["pid"] == 0} == {*PHASES, "step ends"}
    rounds = {"plain", "speculative"}
    # the engine may find plain decoding slower in the rounds that measure it at start-up, and never use it
    assert {e["name"] for e in found if e["pid"] == 1} | rounds == {"prefill", "sync", *rounds, IDLE, ROLLOUT, UPDATE}
    lines = read_metrics(folder)
    assert sum(e["name"] == "update" for e in found) == len(lines) == 3
    tokens = sum(e["args"]["tokens"] for e in found if e["name"] in rounds)
    assert tokens == sum(line["tokens"] for line in lines)


def test_the_engine_works_only_in_the_state_rollout(folder: Path) -> None:
    found = [e for e in events(folder / "trace.json") if e["pid"] == 1]
    stays = [(e["ts"], e["ts"] + e["dur"]) for e in found if e["name"] == ROLLOUT]
    for event in (e for e in found if e["tid"] == 2 and e["name"] != "sync"):
        assert any(a <= event["ts"] and event["ts"] + event["dur"] <= b for a, b in stays)
