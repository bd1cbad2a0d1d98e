"""What the drafter's loss takes, with its gradient, at the vocabulary of a real model, against the same sum column by
column with each chunk computed again for the gradient (`torch.utils.checkpoint`).

    OMP_NUM_THREADS=1 python bench/drafter_loss.py [--vocabulary 50000] [--hidden 512] [--repeats 5] [--json FILE]

Seconds are CPU time, both ways in turn. Value and gradient are compared as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt.draft.losses import LOGITS, cross_entropy, loss_of_guesses
from tlt.metrics import provenance, write_json

ENTRIES, COLUMNS, EVERY = 256, 6, 4  # a micro-batch: all entries have a first guess, every fourth has later ones


def by_column(outs: Tensor, teacher: Tensor, at: Tensor, counts: list[int], head: Tensor) -> Tensor:
    def chunk(out: Tensor, known: Tensor) -> Tensor:
        return cross_entropy(torch.softmax(F.linear(known, head), -1), torch.log_softmax(F.linear(out, head), -1))

    means, rows = [], max(1, LOGITS // len(head))
    for out, known in zip(outs.split(counts), teacher[at].split(counts), strict=True):
        parts = zip(out.split(rows), known.split(rows), strict=True)
        means.append(torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts]).mean())
    return torch.stack(means).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    head, teacher = 0.05 * torch.randn(arguments.vocabulary, arguments.hidden), torch.randn(ENTRIES, arguments.hidden)
    places = [torch.arange(ENTRIES), *(torch.arange(first, ENTRIES, EVERY) for first in range(COLUMNS - 1))]
    at, counts = torch.cat(places), [len(place) for place in places]
    weights = torch.cat([torch.full([count], 1 / count) for count in counts])
    given, took, found = torch.randn(len(at), arguments.hidden), {"by column": [], "at once": []}, {}
    for _ in range(arguments.repeats):
        for way, seconds in took.items():
            outs = given.clone().requires_grad_()
            began = time.process_time()
            if way == "at once":
                loss, _ = loss_of_guesses("cross_entropy", outs, weights, teacher, at, head, head)
            else:
                loss = by_column(outs, teacher, at, counts, head)
            loss.backward()
            seconds.append(time.process_time() - began)
            found[way] = loss.detach(), outs.grad
    torch.testing.assert_close(found["at once"], found["by column"])
    medians = {way: statistics.median(seconds) for way, seconds in took.items()}
    times = medians["by column"] / medians["at once"]
    print(", ".join(f"{way} {seconds:.2f} s" for way, seconds in medians.items()) + f": {times:.2f} times as fast")
    if arguments.json:
        sizes = {"vocabulary": arguments.vocabulary, "hidden": arguments.hidden}
        write_json(arguments.json, {**sizes, "seconds": took, "times": times, **provenance()})


if __name__ == "__main__":
    main()
