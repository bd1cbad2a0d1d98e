"""One worker, driven by its calls."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fake_graph import fake_graphs
from tiny import random_batch, tiny_config

from tlt.cluster import worker
from tlt.cluster.run_worker import RunWorker, place_of_copy
from tlt.cluster.worker import AheadWork, DecodeWork, Slice, Worker
from tlt.draft.ahead import Ahead
from tlt.engine.runner import GraphedPasses
from tlt.types import Prompt, Request, Response, Row, SamplingParams

ALL = 600.0  # seconds
AT_ONCE = 0.0  # one round


def request(seed: int, new_tokens: int = 6, prompt: tuple[int, ...] = (7, 8, 9, 10)) -> Request:
    return Request(Prompt(seed // 10, "", prompt), seed % 10, 0, seed, SamplingParams(max_new_tokens=new_tokens))


FIRST, SECOND = request(10), request(11)


def looking(home: Path) -> RunWorker:
    return RunWorker.of_run(tiny_config(home, speculation={"drafter": "off"}), 0, home / "model")


def decoded(worker: Worker, rollout: int, *requests: Request) -> dict[int, list[int]]:
    found: Slice = worker.decode(DecodeWork(rollout, requests), seconds=600)
    return {response.request.seed: response.token_ids for response in found.responses}


def test_a_sibling_after_a_release_of_the_cache_has_the_tokens_of_a_single_request(home: Path) -> None:
    worker, other, late = looking(home), looking(home), request(11, 12)
    assert decoded(worker, 0, request(0, 30, (1, 2, 3)), request(10, 4))
    worker.engine.cache.release()
    assert decoded(worker, 0, late) == decoded(other, 0, late)


def test_an_update_finds_the_memory_of_the_comparison_free(home: Path) -> None:
    """A worker without a row in the rollout after the comparison has that memory still."""
    worker = looking(home)
    worker.decode(DecodeWork(0, [FIRST], plain=True), ALL)
    assert worker.plain.cache.store.slots
    worker.release()
    assert not worker.plain.cache.store.slots


def test_a_report_has_only_new_tokens_of_a_row(home: Path) -> None:
    """It leaves out tokens from another worker, and tokens of earlier reports."""
    worker, asked = looking(home), request(10, 12)
    answer = decoded(looking(home), 0, asked)[10]
    told = worker.decode(DecodeWork(0, resumed=[Row(asked, answer[:3], [0.0] * 3)]), AT_ONCE).news[10]
    assert told
    told += worker.decode(DecodeWork(0), AT_ONCE).news[10]
    assert told == answer[3 : 3 + len(told)]


def known(of: Request, tokens: list[int], version: int, ended: bool = True) -> Ahead:
    return Ahead(of.seed, of.prompt.token_ids, np.array(tokens, dtype=np.int32), version, ended)


def found(ahead: list[Ahead]) -> list[tuple[int, list[int], int, bool]]:
    return [(a.seed, a.tokens.tolist(), a.version, a.ended) for a in ahead]


def test_unfinished_look_ahead_continues_in_the_next_call(home: Path) -> None:
    worker, answer = looking(home), decoded(looking(home), 0, FIRST)[10]
    for length in (1, 2):
        done = worker.look_ahead(AheadWork(0, [FIRST], []), AT_ONCE)
        assert found(done) == [(10, answer[:length], 0, False)]
    done = looking(home).look_ahead(AheadWork(0, [FIRST], done), AT_ONCE)
    assert found(done) == [(10, answer[:3], 0, False)], "another worker continues it"
    assert found(worker.look_ahead(AheadWork(0, [FIRST], []), ALL)) == [(10, answer, 0, True)]


def test_tokens_of_an_older_target_are_not_its_own(home: Path) -> None:
    worker = looking(home)
    old = [known(FIRST, [1, 2, 3], version=-1), known(SECOND, [1], version=-1, ended=False)]
    worker.interrupt(5)
    assert worker.look_ahead(AheadWork(0, [FIRST, SECOND], old), ALL, 5) == []
    done = worker.look_ahead(AheadWork(0, [SECOND], []), ALL, 6)
    ((_, tokens, version, ended),) = found(done)
    assert tokens[0] == 1, "it is continued"
    assert (version, ended) == (0, True)


def test_an_interrupted_worker_returns_after_its_round(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, answer = looking(home), decoded(looking(home), 0, FIRST)[10]
    rounds, one_round = count(1), worker.engine.round

    def round_() -> Any:
        if next(rounds) == 3:
            worker.interrupt(7)
        return one_round()

    monkeypatch.setattr(worker.engine, "round", round_)
    assert found(worker.look_ahead(AheadWork(0, [FIRST], []), ALL, 7)) == [(10, answer[:3], 0, False)]
    assert found(worker.look_ahead(AheadWork(0, [FIRST], []), ALL, 7)) == [(10, answer[:3], 0, False)]
    assert found(worker.look_ahead(AheadWork(0, [FIRST], []), ALL, 8)) == [(10, answer, 0, True)]


@pytest.mark.parametrize("how", ["next rollout", "same rollout", "look-ahead"])
def test_a_newer_draft_of_another_worker_is_not_overwritten(home: Path, how: str) -> None:
    """This worker decodes a request ahead, and another worker ends the same request meanwhile."""
    worker, answer = looking(home), decoded(looking(home), 0, FIRST)[10]
    worker.look_ahead(AheadWork(0, [FIRST], []), AT_ONCE)
    ended = [known(FIRST, answer, 0)]
    if how == "look-ahead":
        worker.look_ahead(AheadWork(0, [SECOND], ended), AT_ONCE)
    else:
        worker.decode(DecodeWork(int(how == "next rollout"), [SECOND], drafts=ended), AT_ONCE)
    kept = worker.store.get(FIRST)
    assert kept
    assert found([kept]) == found(ended)


def test_a_new_rollout_has_only_drafts_that_the_driver_sends(home: Path) -> None:
    """So the history of earlier steps takes no memory in a worker."""
    worker = looking(home)
    worker.decode(DecodeWork(0, [FIRST], drafts=[known(request(3), [1, 2], 0)]), ALL)
    worker.look_ahead(AheadWork(0, [SECOND], []), AT_ONCE)
    worker.decode(DecodeWork(1, [request(20)], drafts=[known(request(21), [5], 0)]), ALL)
    assert [ahead.seed for ahead in worker.store.group(FIRST)] == [21]
    assert len(worker.store) == 1


def test_a_worker_with_the_state_of_another_trains_on_its_own_data(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, speculation={"drafter": "adaptive"}, cluster={"workers": 2})
    old, new = (RunWorker.of_run(config, 1, config.model.path) for _ in range(2))
    old.sync(1)
    new.take_state(old.state())
    assert new.spot.trainer is not None
    assert torch.equal(new.spot.trainer.trainer.heads[new.target.version], new.target.head)


def test_a_worker_with_the_state_of_another_forgets_its_own(home: Path) -> None:
    """It may have begun an update after it was given up."""
    worker = looking(home)
    worker._before = worker.state()
    worker.take_state(worker.state()._replace(version=5))
    assert worker.state().version == 5


def test_a_cache_whose_addresses_graphs_have_is_kept_if_an_update_has_room_without_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first update Adam has no moments yet, whose memory is not in what an update needs."""
    worker = looking(home)
    worker.engine.runner.graphs = GraphedPasses(worker.engine.cache.store, worker.target)
    batch = random_batch(257, responses=2)
    found = []
    monkeypatch.setattr("tlt.cluster.run_worker.free_bytes", lambda device: 1000)
    with fake_graphs():
        for step, needed in enumerate((100, 100, 900)):
            worker._needed = needed
            assert decoded(worker, step, FIRST)
            worker.release()
            found.append(worker.engine.cache.bytes > 10_000)
            worker.policy.update(batch, step)
            worker.sync(step + 1)
    assert found == [False, True, False]


def test_the_state_before_an_update_is_kept_on_a_device_that_has_room(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first update Adam has no moments yet. They need more memory than is known."""
    worker, cuda, free = looking(home), torch.device("cuda"), [10**9]
    monkeypatch.setattr("tlt.cluster.run_worker.free_bytes", lambda device: free[0])
    fake = SimpleNamespace(model=worker.policy.model, optimizer=worker.policy.optimizer, device=cuda)
    places = [place_of_copy(cast(Any, fake), 1000)]
    worker.policy.update(random_batch(257, responses=2), 0)
    copy = 3 * sum(parameter.nbytes for parameter in worker.policy.model.parameters())
    for free[0] in (1.2 * (copy + 1000) + 1, 1.2 * (copy + 1000) - 1):
        places.append(place_of_copy(cast(Any, fake), 1000))
    assert [place.type for place in places] == ["cpu", "cuda", "cpu"]


def test_a_new_worker_gets_the_state_before_an_update(home: Path) -> None:
    worker = looking(home)
    before = worker.state()
    worker._before = worker.state()
    worker.policy.update(random_batch(257, responses=2), 0)
    given = worker.state()
    assert all(torch.equal(given.policy[name], one) for name, one in before.policy.items())
    assert not given.optimizer
    given.policy["model.norm.weight"].zero_()
    worker.rollback()
    assert all(torch.equal(one, before.policy[name]) for name, one in worker.state().policy.items())


def test_a_slice_has_the_time_that_its_thread_waited_for_a_core(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, one = tmp_path / "schedstat", looking(home)
    monkeypatch.setattr(worker, "_FILE", file)
    file.write_text("5 1000000000 9\n")
    end = one.engine.round

    def round_() -> list[Response]:
        file.write_text("6 3500000000 9\n")
        time.sleep(0.01)
        return end()

    monkeypatch.setattr(one.engine, "round", round_)
    found = one.decode(DecodeWork(1, [FIRST]), AT_ONCE)
    assert found.waited == 2.5
    assert 0.01 <= found.seconds < 10.0


def test_a_system_that_does_not_count_waits_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_FILE", tmp_path / "none")
    assert worker._waited() == 0.0
