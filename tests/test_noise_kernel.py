"""The noise in Triton: in its interpreter it equals `sampling.py`, and its compiler accepts it for GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton_interpreter import (
    INTERPRETED,
    bfloat16_as_on_a_gpu,
    compiles,
    in_the_interpreter,
    not_in_the_interpreter,
    run_in_the_interpreter,
)

from tlt.sampling import gumbel_noise, has_kernel
from tlt.vllm import noise

pytest.importorskip("triton")
SEEDS = (1, -5, 2**62 + 12345, -(2**63), 77)
TIMES = (0, 1, 9999, 70_000, 2**31 - 1)


@not_in_the_interpreter
def test_the_kernel_in_tritons_interpreter() -> None:
    run_in_the_interpreter(__file__)


@in_the_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 1024, 4099])
def test_the_scores_equal_those_of_torch(vocab_size: int, dtype: torch.dtype) -> None:
    from tlt import noise_kernel

    logits = torch.randn(len(SEEDS), 2 * vocab_size, dtype=dtype)[:, :vocab_size]  # rows of a wider tensor
    log_p = torch.randn(len(SEEDS), vocab_size).log_softmax(-1)
    log_p[1, 2:5] = -torch.inf  # cut off
    ours, noisy = torch.tensor([1, 1, 1, 0, 1]).bool(), torch.tensor([1, 1, 1, 1, 0]).bool()
    given = log_p, torch.tensor(SEEDS), torch.tensor(TIMES), ours, noisy
    expected, before = logits.clone(), logits.clone()
    noise.write_scores(expected, *given)
    with bfloat16_as_on_a_gpu():
        noise_kernel.write_scores(logits, *given)
    assert torch.equal(logits, expected)
    assert torch.equal(logits[3], before[3])
    assert torch.equal(logits[4], log_p[4].to(dtype))


@in_the_interpreter
@pytest.mark.parametrize("vocab_size", [7, 4099])
def test_the_noise_alone_equals_that_of_torch(vocab_size: int) -> None:
    from tlt import noise_kernel

    seeds, times = torch.tensor(SEEDS), torch.tensor(TIMES)
    assert torch.equal(noise_kernel.gumbel_noise(seeds, times, vocab_size), gumbel_noise(seeds, times, vocab_size))


@not_in_the_interpreter
def test_the_kernel_compiles_for_a_gpu() -> None:
    """No GPU is needed. This finds code that only the interpreter accepts."""
    from tlt import noise_kernel

    names = {"logits": "*bf16", "log_p": "*fp32", "seeds": "*i64", "times": "*i32", "ours": "*i1", "noisy": "*i1"}
    compiles(noise_kernel._write_scores, names, {"LANES": 256})


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs Triton that fails")
def test_if_triton_fails_pytorch_computes_the_noise(caplog: pytest.LogCaptureFixture) -> None:
    """For example without a C compiler, which inference images lack."""
    has_kernel.cache_clear()
    assert not has_kernel(torch.device("cuda"))
    assert "Triton does not run on cuda" in caplog.text
    has_kernel.cache_clear()


@not_in_the_interpreter
def test_the_kernel_starts_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from tlt import noise_kernel

    current: list[Any] = [None]
    started: list[Any] = []

    @contextmanager
    def device_of(tensor: Any) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    def launch(*arguments: Any, **constants: Any) -> None:
        started.append(current[-1])

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(noise_kernel, "_write_scores", defaultdict(lambda: launch))
    noise = noise_kernel.gumbel_noise(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), 5)
    assert len(started) == 1
    assert started[0] is noise
