"""Shards, sums and the update with several members: the policy of a single one, except for the rounding of a sum."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pools import Table, Thread
from tiny import random_batch
from torch import Tensor

from tlt.config import RolloutConfig, TrainConfig
from tlt.rl.parallel import (
    Alone,
    GroupBroken,
    Membership,
    Processes,
    ProcessGroup,
    Rendezvous,
    all_shards,
    numbers_of,
    sum_gradients,
    take_gradients,
    watch_members,
)
from tlt.rl.policy import Policy
from tlt.types import TrainBatch

CPU = torch.device("cpu")
VOCAB = 31


class Steady:
    dies_at = -1


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 6), st.data())
def test_shards_are_complete_and_need_about_equal_work(tokens: list[int], shards: int, data: st.DataObject) -> None:
    size, everyone = data.draw(st.integers(1, shards)), range(len(tokens))

    def dealt(rank: int, size: int) -> list[list[int]]:
        found = all_shards([[i] for i in everyone], lambda part: tokens[part[0]], shards)
        return [found[number] for number in numbers_of(rank, size, shards)]

    owned = [dealt(rank, size) for rank in range(size)]
    assert {len(own) for own in owned} <= {shards // size, -(-shards // size)}
    parts = [part for own in owned for part in own]
    assert parts == dealt(0, 1)
    assert sorted(i for part in parts for i in part) == list(everyone)
    assert all(part == sorted(part) for part in parts)
    for part in parts:
        own = [tokens[i] for i in part]
        assert sum(own) - min(own, default=0) <= sum(tokens) / shards, "it had least when it was given its last one"


@pytest.mark.parametrize(
    ("sizes", "shards", "expected"),
    [
        ([4, 4], 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # 26 each
        ([4, 4, 4], 2, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]),  # 52 and 26, where halves would be 54 each
        ([8], 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # 42 and nothing, or 26 each
        ([1, 1], 3, [[0], [1], []]),
    ],
)
def test_responses_to_a_prompt_stay_together(sizes: list[int], shards: int, expected: list[list[int]]) -> None:
    """A prompt has 10 tokens, and a response 4."""
    numbers = iter(range(sum(sizes)))
    groups = [[next(numbers) for _ in range(size)] for size in sizes]
    assert all_shards(groups, lambda part: 10 + 4 * len(part), shards) == expected


def together(size: int, act: Any, shards: int = 0) -> list[Any]:
    """Call act(group) for every member, in threads. Return the results."""
    table, results = Table(), [None] * size
    groups: list[Any] = [Thread(table, rank, size, Steady(), shards) for rank in range(size)]  # type: ignore[arg-type]

    def run(rank: int) -> None:
        results[rank] = act(groups[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_are_summed_in_the_order_of_shards(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """1e16 + 1 is 1e16 in float64, so any other order has another sum."""
    monkeypatch.setattr("tlt.rl.parallel._BUCKET", 3)
    numbers = [1e16, 1.0, -1e16, 1.0]

    def act(group: ProcessGroup) -> list[Any]:
        shapes = ((2, 2), (3,), (), (1,))  # one is cut into two buckets, and two share a bucket
        parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
        shards: list[list[Tensor]] = []
        for number in numbers_of(group.rank, group.size, 4):
            if shards:
                shards[-1] = take_gradients(parameters)
                assert all(parameter.grad is None for parameter in parameters)
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, numbers[number])
            shards.append([parameter.grad for parameter in parameters if parameter.grad is not None])
        sum_gradients(shards[-1], group, shards[:-1])
        return [gradient.tolist() for gradient in shards[-1]]

    assert together(size, act, shards=4) == [[[[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0, 1.0], 1.0, [1.0]]] * size


def test_shards_in_host_memory_are_summed_on_the_device() -> None:
    class TwoShards(Alone):
        shards = 2

        def sum_shards(self, own: Tensor) -> Tensor:
            assert own.shape == (2, 3)
            return own.sum(0)

    gradient = torch.zeros(3, device="meta")
    sum_gradients([gradient], TwoShards(), [[torch.ones(3)]])


def updated(
    folder: Path, size: int, batch: TrainBatch, shards: int = 0, dtype: torch.dtype = torch.float64, **train: Any
) -> list[tuple[dict[str, float], dict[str, Tensor]]]:
    config = TrainConfig(learning_rate=1e-2, **{"micro_batch_tokens": 24} | train)
    rollout = RolloutConfig(max_new_tokens=12)
    policies = [Policy(folder, dtype, CPU, config, rollout) for _ in range(size)]  # not safe in threads

    def act(group: ProcessGroup) -> tuple[dict[str, float], dict[str, Tensor]]:
        policy = policies[group.rank]
        policy.update(batch, 0, group)
        metrics = policy.update(batch, 1, group)
        return metrics, {**policy.state_dict(), **policy.optimizer_state()}

    return [act(Alone())] if size == 1 and not shards else together(size, act, shards)


@pytest.mark.parametrize(("loss", "size", "responses"), [("grpo", 2, 6), ("gspo", 3, 6), ("dapo", 3, 2)])
def test_several_members_end_with_the_weights_of_one(folder: Path, loss: str, size: int, responses: int) -> None:
    """If there are 3 members, 2 responses and 2 optimizer steps, some members have no response in an optimizer step."""
    batch = random_batch(VOCAB, responses=responses)
    settings = {"loss": loss, "updates_per_step": 2, "kl_weight": 0.1}
    ((metrics, expected),) = updated(folder, 1, batch, **settings)
    members = updated(folder, size, batch, **settings)
    for found, tensors in members:
        assert found.keys() == metrics.keys()
        for name, value in metrics.items():  # the mismatch is computed in float32
            assert found[name] == pytest.approx(value, rel=1e-6 if "mismatch" in name else 1e-10, abs=1e-13), name
        for name, tensor in expected.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-10, atol=1e-12)
    for _, tensors in members[1:]:
        assert all(torch.equal(tensors[name], members[0][1][name]) for name in expected)


def test_tokens_without_gradient_count_once_in_a_group(folder: Path) -> None:
    batch = random_batch(VOCAB, responses=6)
    batch.advantages[-1] = 0.0
    ((alone, _),) = updated(folder, 1, batch)
    for metrics, _ in updated(folder, 2, batch):
        assert metrics["entropy"] == pytest.approx(alone["entropy"], rel=1e-10)


@pytest.mark.parametrize(
    ("way", "shared"),
    [({"kl_weight": 0.1}, False), ({"kl_weight": 0.1, "kl_in": "reward"}, True), ({"epochs": 2}, True)],
)
def test_the_bits_do_not_depend_on_the_number_of_members(folder: Path, way: dict[str, Any], shared: bool) -> None:
    """In float32, because values that are computed together round together. One of four shards is empty in some
    steps."""
    batch = replace(random_batch(VOCAB, responses=7), rewards=[[0.0, 1.0, 2.0], [1.0, 0.0, 1.0, 0.5]])
    if shared:
        first, second = tuple(range(12)), tuple(range(20, 0, -1))
        batch.prompt_ids = [first] * 3 + [second] * 4
    settings = {"updates_per_step": 2, "micro_batch_tokens": 64, **way}
    found = [updated(folder, n, batch, shards=4, dtype=torch.float32, **settings) for n in (4, 3, 2, 1)]
    losses = {metrics["loss"] for members in found for metrics, _ in members}
    assert len(losses) == 1
    _, expected = found[0][0]
    for members in found:
        assert all(torch.equal(tensors[name], expected[name]) for _, tensors in members for name in expected)
    ((_, other),) = updated(folder, 1, batch, dtype=torch.float32, **settings)
    assert not all(torch.equal(other[name], expected[name]) for name in expected), "the order is of no account here"


def silence_of_connections() -> set[int]:
    """Return the timeouts of this process's connections in milliseconds, listening ones included."""
    found: set[int] = set()
    for one in psutil.Process().net_connections("tcp"):
        with socket.socket(fileno=os.dup(one.fd)) as end:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            found.add(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found


def test_processes_meet_sum_and_gather() -> None:
    rendezvous = Rendezvous("127.0.0.1")
    group = Processes(rendezvous.address, 0, 1, 2, CPU)
    assert silence_of_connections() == {30_000}, "who is cut off is waited for for hours"
    total = torch.tensor([1.0, 2.0])
    group.sum_(total)
    assert total.tolist() == [1.0, 2.0]
    assert group.gather(torch.tensor([3.0, 4.0])).tolist() == [3.0, 4.0]
    assert group.sum_shards(torch.tensor([[3.0, 4.0, 5.0], [1.0, 0.0, -1.0]])).tolist() == [4.0, 4.0, 4.0]
    group.leave()
    group.leave()


def test_a_member_that_waits_in_vain_for_others_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.rl.parallel._RENDEZVOUS", timedelta(seconds=1))
    rendezvous = Rendezvous("127.0.0.1")
    with pytest.raises(GroupBroken, match="2 workers could not form a process group at 127"):
        Processes(rendezvous.address, 0, 2, 2, CPU)


def _watched(rank: int, address: str, lost: Any, way: str) -> None:
    group = Processes(address, rank, 3, 3, CPU)
    group._tell_others = watch_members(rank, 3, lambda: lost[rank].set())
    if rank == 2 and way == "dies":
        os._exit(1)
    if rank == 2 and way == "leaves":
        group.leave()
    lost[3].wait(30)
    os._exit(0)


@pytest.mark.parametrize("way", ["dies", "leaves", "stays"])
def test_the_end_of_a_member_is_noticed_while_nothing_is_sent(way: str) -> None:
    rendezvous, forks = Rendezvous("127.0.0.1"), multiprocessing.get_context("forkserver")
    lost = [forks.Event() for _ in range(4)]
    members = [forks.Process(target=_watched, args=(rank, rendezvous.address, lost, way)) for rank in range(3)]
    for member in members:
        member.start()
    try:
        if way == "stays":
            assert not any(one.wait(2) for one in lost[:3])
        else:
            assert all(one.wait(20) for one in lost[:2])
    finally:
        lost[3].set()
        for member in members:
            member.join(10)
            member.kill()


def test_a_collective_that_waits_for_a_lost_member_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for NCCL: a collective returns only when its communicator is aborted, with an error."""
    aborted, watched, settings = threading.Event(), list[Any](), dict[str, Any]()

    def all_reduce(tensor: Tensor) -> None:
        assert aborted.wait(10)
        raise dist.DistBackendError("NCCL communicator was aborted on rank 0")

    backend = SimpleNamespace(abort=aborted.set)
    monkeypatch.setattr(dist, "init_process_group", lambda *names, **found: settings.update(found, backend=names[0]))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda timeout: settings.update(later=timeout))
    monkeypatch.setattr(
        dist.distributed_c10d, "_get_default_group", lambda: SimpleNamespace(_get_backend=lambda device: backend)
    )
    monkeypatch.setattr(
        "tlt.rl.parallel.watch_members", lambda *found: watched.extend(found) or (lambda: watched.append("left"))
    )
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(name, raising=False)
    rendezvous = Rendezvous("127.0.0.1")
    group = Processes(rendezvous.address, 0, 2, 2, torch.device("cuda"))
    assert (settings["backend"], settings["device_id"]) == ("nccl", torch.device("cuda:0"))
    assert (settings["timeout"], settings["later"]) == (timedelta(seconds=120), timedelta(hours=1))
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert watched[:2] == [0, 2]
    threading.Timer(0.1, watched[2]).start()
    with pytest.raises(GroupBroken, match="aborted on rank 0"):
        group.sum_(torch.ones(1))
    assert watched[3:] == ["left"], "the others need not wait for this member"


def test_gradients_that_are_taken_are_copies() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    (2 * first).sum().backward()
    gradient = first.grad
    taken = take_gradients([first, second])
    assert gradient is not None
    gradient.zero_()
    assert [one.tolist() for one in taken] == [[2.0, 2.0], [0.0, 0.0]]
    assert first.grad is None
    assert not taken[0].requires_grad


def test_a_worker_leaves_its_group_before_it_joins_another() -> None:
    log: list[Any] = []

    class Group(Alone):
        def leave(self) -> None:
            log.append("leave")

    def join(rendezvous: Any, rank: int, size: int, workers: int, device: torch.device) -> Group:
        log.append((rendezvous, rank, size, workers))
        return Group()

    membership = Membership("127.0.0.1", 4, torch.device("cpu"), join)
    membership.leave()
    first = membership.enter("a", 1, 3)
    assert membership.enter("a", 1, 3) is first
    assert membership.enter("b", 0, 2) is not first
    membership.leave()
    membership.leave()
    assert log == [("a", 1, 3, 4), "leave", ("b", 0, 2, 4), "leave"]
