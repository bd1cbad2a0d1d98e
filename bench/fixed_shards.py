"""The cost of summing an update's gradients over a fixed number of shards, in their order.

    python bench/fixed_shards.py [--steps 5] [--repeats 6] [--json FILE]

Batches come from a run of recipes/longtail.toml. Updates on them are timed in turn:

- two workers: with fixed shards, and with an all-reduce of each worker's own sum, as before there were fixed shards;
- one of two workers left: with both shards, one after the other, and with the batch in one piece, which rounds
  differently.

The sum of one bucket of gradients is timed alone, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tlt.config import Config, load_config
from tlt.rl.choose import make_policy
from tlt.rl.parallel import _BUCKET, Alone, Processes, ProcessGroup, Rendezvous
from tlt.rl.policy import Policy
from tlt.types import TrainBatch

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
os.environ.setdefault("TQDM_DISABLE", "1")
Times = dict[str, list[float]]


def recipe(folder: str, steps: int) -> Config:
    config = load_config(ROOT / "recipes" / "longtail.toml")
    train = config.train.model_copy(update={"steps": steps})
    return config.model_copy(update={"train": train, "run": config.run.model_copy(update={"folder": folder})})


def batches_of(steps: int) -> list[TrainBatch]:
    """The batches of the recipe's first steps."""
    from rich.console import Console

    from tlt.display import Display
    from tlt.run import train

    found: list[TrainBatch] = []

    def update(self: Policy, batch: TrainBatch, *arguments: Any, real: Any = Policy.update) -> dict[str, float]:
        found.append(batch)
        return real(self, batch, *arguments)

    with tempfile.TemporaryDirectory() as folder, patch.object(Policy, "update", update):
        train(recipe(folder, steps), False, Display(Console(quiet=True)))
    return found


def by_all_reduce(parameters: Sequence[torch.nn.Parameter], group: ProcessGroup, earlier: Sequence[Any] = ()) -> None:
    """Sum gradients by an all-reduce, as before there were fixed shards."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    group.sum_(flat)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


class OneSum(Processes):
    """A group whose members contribute one tensor each to a sum, without fixed shards."""

    def sum_shards(self, own: Tensor) -> Tensor:
        total = own[0].clone()
        self.sum_(total)
        return total


@contextmanager
def the_former_way(group: Processes) -> Iterator[None]:
    group.__class__ = OneSum
    with patch("tlt.rl.policy.sum_gradients", by_all_reduce):
        yield
    group.__class__ = Processes


def timed(act: Callable[..., Any], *arguments: Any) -> float:
    dist.barrier()
    began = time.perf_counter()
    act(*arguments)
    dist.barrier()
    return time.perf_counter() - began


def member(rank: int, address: str, batches: list[TrainBatch], repeats: int, results: Any) -> None:
    """The process of one of two workers; the first one returns its times."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    policy, group = make_policy(recipe("", 1)), Processes(address, rank, 2, 2, CPU)
    numbers, times = torch.rand(1, _BUCKET), defaultdict[str, list[float]](list)
    for _ in range(repeats):
        for batch in batches:
            times["two workers, fixed shards"].append(timed(policy.update, batch, 0, group))
            with the_former_way(group):
                times["two workers, all-reduce"].append(timed(policy.update, batch, 0, group))
        times["a sum of 2^24, fixed shards"].append(timed(group.sum_shards, numbers))
        with the_former_way(group):
            times["a sum of 2^24, all-reduce"].append(timed(group.sum_shards, numbers))
    group.leave()
    if rank == 0:
        results.put(dict(times))


class OneOfTwo(Alone):
    """The group of the one worker that is left, which computes both shards."""

    shards = 2


def one_left(batches: list[TrainBatch], repeats: int) -> Times:
    policy, times = make_policy(recipe("", 1)), defaultdict[str, list[float]](list)
    for _ in range(repeats):
        for batch in batches:
            for name, group in (("fixed shards", OneOfTwo()), ("one piece", Alone())):
                began = time.perf_counter()
                policy.update(batch, 0, group)
                times[f"one worker left, {name}"].append(time.perf_counter() - began)
    return times


def together(batches: list[TrainBatch], repeats: int) -> Times:
    context = multiprocessing.get_context("spawn")
    rendezvous, results = Rendezvous("127.0.0.1"), context.Queue()
    members = [
        context.Process(target=member, args=(rank, rendezvous.address, batches, repeats, results)) for rank in (0, 1)
    ]
    for process in members:
        process.start()
    times = results.get(timeout=300)
    for process in members:
        process.join()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches = batches_of(arguments.steps)
    times = together(batches, arguments.repeats) | one_left(batches, arguments.repeats)
    medians = {name: median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        print(f"{name}: {1000 * seconds:.1f} ms (median of {len(times[name])})")
    if arguments.json:
        from tlt.metrics import provenance, write_json

        tokens = [sum(map(len, batch.response_ids)) for batch in batches]
        facts = {"tokens_of_batches": tokens, "median_seconds": medians, "seconds": times}
        write_json(arguments.json, facts | provenance())


if __name__ == "__main__":
    main()
