"""The queue of the reward processes: the order of scoring, the number of processes, and calls that hang."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from judging import PROMPT, answer, is_gone, recipe, responses
from judging import config as config_of

from tlt.config import Config
from tlt.rewards import Reward, RewardError, Scored, make_reward
from tlt.rewards.answers import Answer
from tlt.rewards.isolated import IsolatedScore, Verdict
from tlt.rewards.score_pool import ScorePool
from tlt.rewards.scores import make_terms, score, score_all


def config(name: str, **reward: Any) -> Config:
    return config_of(f"tiny_rewards:{name}", **reward)


def of_the_user(folder: Path, source: str) -> Config:
    """Return a configuration whose reward is the function f of this source."""
    (folder / "own.py").write_text(source, encoding="utf-8")
    return config_of("own:f", folder=str(folder))


@contextmanager
def judges(given: Config, log: Path | None = None) -> Iterator[Scored]:
    made: Any = make_reward(given, [PROMPT], log)
    try:
        yield made
    finally:
        made.close()


def outcome_of(name: str, *texts: str, **reward: Any) -> list[tuple[float | None, str]]:
    with judges(config(name, **reward)) as made:
        return scored(made, *texts)


def scored(made: Reward, *texts: str) -> list[tuple[float | None, str]]:
    given = responses(*texts)
    made(given)
    return [(response.reward, response.outcome) for response in given]


def test_submitted_responses_are_scored_in_the_background() -> None:
    with judges(config("trouble")) as made:
        given = responses("one", "four4", "child")
        for response in given:
            made.submit(response)
        assert isinstance(made.scorer, ScorePool)
        begun = [verdict for _, verdict in made._begun.values()]
        for verdict in begun:
            assert verdict.result(60).reward is not None
        made(given)
        assert [response.reward for response in given[:2]] == [3.0, 5.0]
        again = responses("three")  # the next step's, of which nothing was said before
        made(again)
        assert again[0].reward == 5.0


def test_a_call_whose_process_was_killed_is_repeated_once() -> None:
    others = multiprocessing.active_children()  # of tests before this one
    with judges(config("waits")) as made:
        given = responses("1.5")
        made.submit(given[0])
        time.sleep(0.5)
        (process,) = set(multiprocessing.active_children()) - set(others)
        process.kill()
        made(given)
        assert (given[0].reward, given[0].outcome) == (1.0, "")


def test_a_pool_does_not_wait_for_a_call_when_it_is_closed() -> None:
    others = multiprocessing.active_children()
    with judges(config("waits", timeout_seconds=60.0)) as made:
        made.submit(responses("60")[0])
        assert isinstance(made.scorer, ScorePool)
        (server,) = made.scorer._servers
        while not server.works:
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert set(multiprocessing.active_children()) <= set(others)


def test_an_idle_process_is_closed_and_not_killed() -> None:
    class Idle(Stand):
        killed = False

        def kill(self) -> None:
            self.killed = True

    idle = Idle(0.0)
    with pool_of(lambda: idle) as pool:
        score_many(pool, 1)
    assert (idle.killed, idle.runs) == (False, False)


def test_a_process_works_as_soon_as_it_has_taken_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is closed just then kills the process."""
    found, take = list[bool](), ScorePool._take

    def taken(pool: ScorePool, server: Any) -> Any:
        entries = take(pool, server)
        found.append(server.works)
        return entries

    monkeypatch.setattr(ScorePool, "_take", taken)
    with pool_of(lambda: Stand(0.0)) as pool:
        score_many(pool, 1)
    assert sum(found) == 1, "others have found no entry, because the pool is closed"


class Stand:
    """Stand-in for a process. It answers after `seconds`."""

    at_once, runs = 1, True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def score_all(self, asked: Any) -> list[Verdict]:
        time.sleep(self.seconds)
        return [Verdict(1.0) for _ in asked]

    def close(self) -> None:
        self.runs = False

    kill = close


@contextmanager
def pool_of(start: Any) -> Iterator[ScorePool]:
    pool = ScorePool(start)
    try:
        yield pool
    finally:
        pool.close()


def score_many(pool: ScorePool, count: int) -> None:
    verdicts = [pool.submit(PROMPT, answer("")) for _ in range(count)]
    assert all(pool.result(verdict).reward == 1.0 for verdict in verdicts)


def made_for(seconds: float, start_seconds: float, waiting: int) -> int:
    """Return the number of processes after calls of this duration are scored."""
    made: list[Any] = []

    def start() -> Any:
        time.sleep(start_seconds)
        made.append(Stand(seconds))
        return made[-1]

    with pool_of(start) as pool:
        score_many(pool, waiting)
    return len(made)


def test_a_process_starts_if_an_entry_waits_for_longer_than_a_start_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.rewards.score_pool.MOST", 4)
    assert made_for(seconds=0.0, start_seconds=2.0, waiting=40) == 1
    assert made_for(seconds=0.5, start_seconds=0.3, waiting=20) == 4


def test_rewards_that_hang_wait_at_the_same_time() -> None:
    """Twelve of them one after another would take 48 s. A busy machine needs many seconds to start the processes."""
    began = time.monotonic()
    found = outcome_of("trouble", *["hang"] * 12, "four", timeout_seconds=4.0)
    assert found == [(None, "timeout")] * 12 + [(4.0, "")]
    assert time.monotonic() - began < 40


@pytest.mark.parametrize(
    ("name", "texts", "options", "expected"),
    [
        ("trouble", ["one", "raise", "die", "three"], {}, [(3.0, ""), (None, "error"), (None, "crash"), (5.0, "")]),
        ("exits", ["1", "exit", "2"], {}, [(1.0, ""), (None, "error"), (2.0, "")]),
        ("asks_a_server", ["0.1", "99", "0.1"], {"timeout_seconds": 1.5}, [(3.0, ""), (None, "timeout"), (3.0, "")]),
        ("waits_in_a_thread", [*["60"] * 15, "0"], {"timeout_seconds": 1.0}, [(None, "timeout")] * 15 + [(1.0, "")]),
        ("of_lists", ["a", "hang"], {"batched": True, "timeout_seconds": 1.5}, [(1.0, ""), (None, "timeout")]),
    ],
    ids=["ends its process twice", "async, exits", "async, hangs", "a thread for each call", "a list, hangs"],
)
def test_a_call_that_fails_is_lost_alone(name: str, texts: list[str], options: dict[str, Any], expected: Any) -> None:
    assert outcome_of(name, *texts, **options) == expected


def test_the_work_of_a_lost_process_goes_to_the_others() -> None:
    class First(Stand):
        def score_all(self, asked: Any) -> list[Verdict]:
            super().score_all(asked)
            raise RewardError("reward x cannot start")

    made: list[Stand] = []
    started = threading.Event()

    def start() -> Any:
        made.append(First(0.5) if not made else Stand(0.2))
        if len(made) > 1:
            started.set()
        return made[-1]

    with pool_of(start) as pool:
        score_many(pool, 6)
    assert started.is_set()


def test_a_process_that_cannot_be_added_is_started_again_and_fails_no_call() -> None:
    """The second start fails. The first process continues, and the third start succeeds."""
    starts, added = count(1), threading.Event()

    def start() -> Any:
        if (number := next(starts)) == 2:
            raise RewardError("reward x cannot start")
        if number == 3:
            added.set()
        return Stand(0.5)

    with pool_of(start) as pool:
        score_many(pool, 4)
    assert added.is_set()


@pytest.mark.parametrize("can_start", [True, False])
def test_calls_of_a_lost_process_wait_for_one_that_is_starting(can_start: bool) -> None:
    starts, starting = count(1), threading.Event()

    class First(Stand):
        def score_all(self, asked: Any) -> list[Verdict]:
            starting.wait(60)
            raise RewardError("reward x cannot start")

    def start() -> Any:
        if next(starts) == 1:
            return First(0.0)
        starting.set()
        time.sleep(0.5)
        if not can_start:
            raise RewardError("no process is left")
        return Stand(0.0)

    with pool_of(start) as pool:
        if can_start:
            score_many(pool, 2)
            return
        verdict = pool.submit(PROMPT, answer(""))
        with pytest.raises(RewardError, match="no process is left"):
            any(pool.ready([verdict], 0.1) for _ in range(200))


def test_a_process_that_starts_while_the_pool_is_closed_ends() -> None:
    late = Stand(0.0)
    with pool_of(lambda: Stand(0.0)) as pool:
        pass
    pool._serve(late)  # type: ignore[arg-type]
    deadline = time.monotonic() + 20
    while late.runs and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not late.runs


def test_entries_with_one_key_go_to_one_process() -> None:
    """The turns of an episode have one key."""
    taken: set[tuple[Stand, int]] = set()

    class Records(Stand):
        def score_all(self, asked: Any) -> list[Verdict]:
            taken.add((self, asked[0][1]))
            return super().score_all(asked)

    with pool_of(lambda: Records(0.05)) as pool:
        pool._serve(Records(0.05))  # type: ignore[arg-type]
        for _ in range(3):
            verdicts = [pool.submit(PROMPT, key, key) for key in range(6)]
            assert all(pool.result(verdict).reward == 1.0 for verdict in verdicts)
        pool.forget_keys()
        assert not pool._homes
    assert len(taken) == 6, "each key in one process"
    assert len({stand for stand, _ in taken}) > 1


def test_keys_whose_process_ended_may_go_to_any_process() -> None:
    goes_on = threading.Event()

    class Ends(Stand):
        def score_all(self, asked: Any) -> list[Verdict]:
            if not self.runs:
                goes_on.wait(60)
            self.runs = asked[0][1] != "ends"
            return super().score_all(asked)

    def start() -> Ends:
        time.sleep(0.2)  # so that the pool does not grow by itself
        return Ends(0.0)

    with pool_of(start) as pool:
        for key in range(3):
            pool.result(pool.submit(PROMPT, "begins", key))
        pool._serve(Stand(0.0))  # type: ignore[arg-type]
        pool.result(pool.submit(PROMPT, "ends", 0))
        verdicts = [pool.submit(PROMPT, "goes on", key) for key in (1, 2)]
        try:
            assert pool.ready(verdicts, 20), "the process that still runs has answered"
        finally:
            goes_on.set()
        assert [pool.result(verdict).reward for verdict in verdicts] == [1.0, 1.0]


def test_keys_of_a_lost_process_go_to_one_that_waits() -> None:
    class Lost(Stand):
        def score_all(self, asked: Any) -> list[Verdict]:
            if asked[0][1] == "ends":
                raise RewardError("reward x cannot start")
            return super().score_all(asked)

    with pool_of(lambda: Lost(0.0)) as pool:
        pool.result(pool.submit(PROMPT, "begins", 0))
        pool._serve(Stand(0.0))  # type: ignore[arg-type]
        time.sleep(0.1)  # so that it waits for an entry
        verdict = pool.submit(PROMPT, "ends", 0)
        assert pool.ready([verdict], 20)


def test_a_pool_may_be_closed_while_a_process_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = lambda: Stand(0.0)  # noqa: E731
    pool, start, begins = ScorePool(made), threading.Thread.start, threading.Event()

    def start_late(thread: threading.Thread) -> None:
        if thread is not closing:
            begins.set()
            time.sleep(0.2)
        start(thread)

    def close() -> None:
        begins.wait(60)
        pool.close()
        closed.set()

    closing, closed = threading.Thread(target=close), threading.Event()
    start(closing)
    monkeypatch.setattr(threading.Thread, "start", start_late)
    pool._serve(made())
    closing.join(60)
    assert closed.is_set(), "the pool was closed"


def test_calls_lost_together_are_repeated_one_by_one() -> None:
    """It comes first, because without this rule later tests would never end."""
    sizes: list[int] = []

    class Lost(Stand):
        at_once = 3

        def score_all(self, asked: Any) -> list[Verdict]:
            sizes.append(len(asked))
            if len(sizes) > 5:
                raise RewardError("asked together again")
            return [Verdict(1.0)] if len(asked) == 1 else []

    with pool_of(lambda: Lost(0.0)) as pool:
        with pool._changed:  # so that its process sees all four
            verdicts = [pool.submit(PROMPT, answer("")) for _ in range(4)]
        assert [pool.result(verdict).reward for verdict in verdicts] == [1.0] * 4
    assert sizes == [3, 1, 1, 1, 1]


def test_a_verdict_is_returned_before_later_ones() -> None:
    late: Future[Verdict] = Future()
    timer = threading.Timer(20, late.set_result, [Verdict(0.0)])
    timer.start()
    with pool_of(lambda: Stand(0.0)) as pool:
        verdict = pool.submit(PROMPT, answer(""))
        assert pool.ready([verdict, late], 60) == {verdict}
    timer.cancel()


def test_async_functions_are_awaited_together() -> None:
    with judges(config("asks_a_server")) as made:
        assert scored(made, "0") == [(1.0, "")]
        began = time.monotonic()
        assert scored(made, *["0.5"] * 16) == [(3.0, "")] * 16
        assert time.monotonic() - began < 6  # 8 s one after the other


@pytest.mark.parametrize(("name", "batched"), [("waits_in_line", False), ("wait_in_line", True)])
def test_all_calls_of_an_async_function_share_an_event_loop(
    name: str, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A semaphore of the user's module belongs to the loop of the first call that waited for it."""
    monkeypatch.setattr("tiny_rewards.one_at_a_time", asyncio.Semaphore(1))
    terms = make_terms(config(name, batched=batched))
    for _ in range(2):
        assert score_all(terms, [(PROMPT, answer(""))] * 2) == [Verdict(1.0, scores={terms[0].name: 1.0})] * 2


def test_threads_of_async_calls_that_hang_keep_no_place() -> None:
    with judges(config("waits_in_a_thread", timeout_seconds=1.0)) as made:
        assert scored(made, "0", *["60"] * 40) == [(1.0, "")] + [(None, "timeout")] * 40
        assert scored(made, "0") == [(1.0, "")]


def test_a_process_full_of_threads_that_hang_is_replaced(tmp_path: Path) -> None:
    process = IsolatedScore(config("waits_in_a_thread", timeout_seconds=0.3), tmp_path / "reward.log")
    calls = count(1)
    while process.runs and next(calls) < 9:
        found = process.score_all([(PROMPT, Answer("", "60", 1))] * 16)
        assert [verdict.outcome for verdict in found] == ["timeout"] * 16
    assert next(calls) == 6, "with 5 x 16 threads, more than 64"
    (verdict,) = process.score_all([(PROMPT, Answer("", "0", 1))])
    assert (verdict.reward, process.runs) == (1.0, True)
    process.close()


def test_a_function_of_lists_is_called_once() -> None:
    terms = make_terms(config("of_lists", batched=True))
    asked = [(PROMPT, answer(text)) for text in ("a", "", "c")]
    assert [(v.reward, v.outcome) for v in score_all(terms, asked)] == [(3.0, ""), (None, "does not apply"), (3.0, "")]
    verdicts = score_all(terms, [(PROMPT, answer(text)) for text in ("few", "b")])
    assert [(v.outcome, "returned 0 numbers for 2 responses" in v.detail) for v in verdicts] == [("error", True)] * 2


@pytest.mark.parametrize("word", ["dict", "set", "str", "bytes"])
def test_a_result_that_is_not_a_list_gives_no_reward(word: str) -> None:
    verdicts = score_all(make_terms(config("of_lists", batched=True)), [(PROMPT, answer(word))] * 2)
    assert [(v.reward, v.outcome) for v in verdicts] == [(None, "error")] * 2
    assert all(f"it returned a {word}, not a list of numbers" in v.detail for v in verdicts)


def test_a_function_may_have_all_parameters() -> None:
    answer = Answer("it is 7", "7", 2, (1, 2), "length")
    assert score(make_terms(config("all_there_is")), PROMPT, answer).reward == 1.0


def terms_of(*terms: dict[str, Any]) -> Any:
    return make_terms(recipe({"terms": list(terms)}))


@pytest.mark.parametrize(
    ("text", "if_fails", "expected"),
    [
        ("nothing", "response", (0.5, "")),  # the term does not apply
        ("raise", "response", (None, "error")),
        ("nan", "response", (None, "not a number")),
        ("raise", "term", (0.5, "")),
        ("nan", "term", (0.5, "")),
        ("four", "term", (8.5, "")),
    ],
)
def test_a_failing_term_follows_if_fails(text: str, if_fails: str, expected: tuple[Any, str]) -> None:
    format_ = {"name": "format", "pattern": ".", "weight": 0.5}
    terms = terms_of({"name": "tiny_rewards:trouble", "weight": 2.0, "if_fails": if_fails}, format_)
    assert score(terms, PROMPT, answer(text))[:2] == expected


def test_without_any_term_there_is_no_reward() -> None:
    terms = terms_of({"name": "tiny_rewards:trouble", "if_fails": "term"})
    assert score(terms, PROMPT, answer("raise"))[:2] == (None, "error")
    assert score(terms, PROMPT, answer("nothing"))[:2] == (None, "does not apply")


def test_printed_text_is_in_the_log_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with judges(config("prints"), tmp_path / "reward.log") as made:
        made(responses("a", "b"))
        said = (tmp_path / "reward.log").read_text(encoding="utf-8")
    assert said.splitlines() == [line for x in "ab" for line in (f"seen: {x}", f"and from a program: {x}")]
    assert "seen" not in capfd.readouterr().out


def test_an_error_names_the_users_line_and_its_traceback_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user's file has the function and its caller, and the standard library raises. There is one traceback."""
    source = (
        "import json\n\ndef read(text):\n    return json.loads(text)\n\ndef f(prompt, answer): return read(answer)\n"
    )
    log = tmp_path / "reward.log"
    with judges(of_the_user(tmp_path, source), log) as made, caplog.at_level(logging.WARNING):
        made(responses("{", "7", "{"))
    assert f"(error: {tmp_path / 'own.py'}:4: JSONDecodeError: Expecting" in caplog.text
    said = log.read_text(encoding="utf-8")
    assert said.count("Traceback") == 1
    assert f'File "{tmp_path / "own.py"}", line 6, in f' in said


def noisy(folder: Path, then: str = "") -> Config:
    return of_the_user(folder, f"import sys\nprint('imported')\n{then}\ndef f(prompt, answer): return 1.0\n")


def test_the_log_file_is_bounded(tmp_path: Path) -> None:
    source = "def f(prompt, answer):\n    print(answer, 'x' * 9 * 2**20)\n    return 1.0\n"
    log = tmp_path / "reward.log"
    scorer = IsolatedScore(of_the_user(tmp_path, source), log)
    for text in "abc":
        assert scorer.score_all([(PROMPT, answer(text))])[0].reward == 1.0
    scorer.close()
    said = log.read_text(encoding="utf-8")
    assert (said[:2], len(said) < 10 * 2**20) == ("c ", True)


def test_text_printed_at_the_start_is_in_the_log_file_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is written when the run has begun. Before that, a file with this name may belong to another run."""
    log = tmp_path / "reward.log"
    with judges(noisy(tmp_path), log) as made:
        assert not log.exists()
        made(responses("a"))
        assert log.read_text(encoding="utf-8") == "imported\n"
    assert "imported" not in capfd.readouterr().out


@pytest.mark.parametrize("fault", ["raise KeyError('x')", "sys.exit('no')"])
def test_a_process_that_cannot_start_shows_its_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    with pytest.raises(RewardError):
        make_reward(noisy(tmp_path, fault), [PROMPT], tmp_path / "reward.log")
    assert "imported" in capfd.readouterr().err


def test_the_memory_of_a_process_and_its_programs_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert outcome_of("starts_programs", "150", memory_mb=500) == [(None, "crash")]
    assert "crash: the reward process and its children use more than reward.memory_mb = 500" in caplog.text


def test_memory_shared_by_forks_counts_once() -> None:
    assert outcome_of("forks", "150", memory_mb=500) == [(0.0, "")]


def test_orphaned_children_end_with_the_process() -> None:
    with judges(config("leaves_a_child")) as made:
        given = responses("x")
        made(given)
        child = int(given[0].reward or 0)
        assert child
        os.kill(child, 0)
    assert is_gone(child), "a grandchild outlives the reward's process"
