"""Noise and sampling in Triton: in its interpreter they equal those of `sampling.py`, and its compiler accepts them for
GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_interpreter import (
    INTERPRETED,
    compiles,
    in_the_interpreter,
    not_in_the_interpreter,
    products_as_on_a_gpu,
    run_in_the_interpreter,
)

from tlt.engine.runner import _sample
from tlt.sampling import SamplingTensors, gumbel_noise, has_kernel, lowest_temperature
from tlt.vllm import noise

pytest.importorskip("triton")
NEW = 3
SEEDS = torch.tensor([1, -5, 2**62 + 12345, -(2**63), 77])
TIMES = torch.tensor([0, 9999, 70_000, 2**31 - 1 - NEW, 5])
LAST_TIMES = torch.tensor([0, 1, 9999, 70_000, 2**31 - 1])
TEMPERATURES = torch.tensor([1.0, 0.7, 0.0, 1e-40, 3.0], dtype=torch.float64)
ROWS = torch.arange(len(SEEDS)).repeat_interleave(NEW)
POSITIONS = (TIMES[:, None] + torch.arange(NEW)).flatten()
BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use small blocks, so that a small vocabulary has several."""
    from tlt import sampling_kernel

    monkeypatch.setattr(sampling_kernel, "_BLOCK", BLOCK)
    with products_as_on_a_gpu():
        yield


def random_logits(vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Return logits [M, V] as rows of a wider tensor. Many in bfloat16 are equal."""
    generator = torch.Generator().manual_seed(vocab_size)
    return (3 * torch.randn(len(ROWS), vocab_size + 5, generator=generator)).to(dtype)[:, :vocab_size]


def sampled(logits: Tensor) -> Tensor:
    from tlt.sampling_kernel import sample

    return sample(logits, SEEDS, TIMES, TEMPERATURES)


@not_in_the_interpreter
def test_the_kernels_in_tritons_interpreter() -> None:
    run_in_the_interpreter(__file__)


@in_the_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [7, BLOCK, 4 * BLOCK + 3])
def test_tokens_and_log_probs_are_those_of_torch(vocab_size: int, dtype: torch.dtype) -> None:
    logits = random_logits(vocab_size, dtype)
    everything = torch.zeros(len(SEEDS), dtype=torch.long), torch.ones(len(SEEDS), dtype=torch.float64)
    noise = gumbel_noise(SEEDS[ROWS], POSITIONS, vocab_size) * (TEMPERATURES[ROWS] > 0)[:, None]
    wanted = _sample(logits, noise, SamplingTensors(TEMPERATURES, *everything, False).of(ROWS))
    found = sampled(logits)
    assert torch.equal(found[:, 0], wanted[:, 0])
    torch.testing.assert_close(found[:, 1:], wanted[:, 1:], rtol=1e-6, atol=2e-6)


@in_the_interpreter
def test_bits_do_not_depend_on_other_rows() -> None:
    from tlt.sampling_kernel import sample

    logits = random_logits(3 * BLOCK + 1, torch.bfloat16)
    wanted = sampled(logits)
    for m, row in enumerate(ROWS):
        alone = sample(logits[m : m + 1], SEEDS[row, None], POSITIONS[m, None], TEMPERATURES[row, None])
        assert torch.equal(alone[0], wanted[m])


@in_the_interpreter
def test_of_equal_tokens_the_first_is_drawn() -> None:
    logits = torch.zeros(len(ROWS), 3 * BLOCK)
    logits[:, [BLOCK + 7, BLOCK + 9, 2 * BLOCK]] = 5.0
    greedy = sampled(logits)[TEMPERATURES[ROWS] == 0, 0]
    assert greedy.tolist() == [BLOCK + 7] * NEW


@in_the_interpreter
@pytest.mark.filterwarnings("ignore:(invalid|divide)")
def test_values_that_are_not_finite_show_and_other_rows_keep_their_bits() -> None:
    logits = random_logits(2 * BLOCK + 1, torch.float32)
    wanted, spoiled = sampled(logits), logits.clone()
    spoiled[1, 0], spoiled[2], spoiled[4, -1] = torch.nan, -torch.inf, torch.inf
    spoiled[5, :BLOCK] = -torch.inf  # a block without a token
    found = sampled(spoiled)
    assert torch.isfinite(found[:, 2]).tolist() == [m not in (1, 2, 4) for m in range(len(ROWS))]
    assert (found[:, 0] < logits.shape[1]).all()
    assert found[5, 0] >= BLOCK
    others = [m for m in range(len(ROWS)) if m not in (1, 2, 4, 5)]
    assert torch.equal(found[others], wanted[others])


@not_in_the_interpreter
@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_the_kernels_compile_for_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed. This finds code that only the interpreter accepts."""
    from tlt import sampling_kernel

    monkeypatch.undo()
    types = {"logits": f"*{name}", "sums": "*fp32", "temperature": "*fp64", "found": "*fp64"}
    types |= dict.fromkeys(("seeds", "times"), "*i64")
    constants: dict[str, Any] = {"BLOCK": sampling_kernel._BLOCK, "BLOCKS": 128}
    for kernel in (sampling_kernel._sum, sampling_kernel._rank, sampling_kernel._pick):
        compiles(kernel, types, constants | {"LOWEST": lowest_temperature(torch.float32)})


@in_the_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 1024, 4099])
def test_the_scores_equal_those_of_torch(vocab_size: int, dtype: torch.dtype) -> None:
    from tlt import sampling_kernel

    logits = torch.randn(len(SEEDS), 2 * vocab_size, dtype=dtype)[:, :vocab_size]  # rows of a wider tensor
    log_p = torch.randn(len(SEEDS), vocab_size).log_softmax(-1)
    log_p[1, 2:5] = -torch.inf  # cut off
    ours, noisy = torch.tensor([1, 1, 1, 0, 1]).bool(), torch.tensor([1, 1, 1, 1, 0]).bool()
    given = log_p, SEEDS, LAST_TIMES, ours, noisy
    expected, before = logits.clone(), logits.clone()
    noise.write_scores(expected, *given)
    with products_as_on_a_gpu():
        sampling_kernel.write_scores(logits, *given)
    assert torch.equal(logits, expected)
    assert torch.equal(logits[3], before[3])
    assert torch.equal(logits[4], log_p[4].to(dtype))


@in_the_interpreter
@pytest.mark.parametrize("vocab_size", [7, 4099])
def test_the_noise_alone_equals_that_of_torch(vocab_size: int) -> None:
    from tlt import sampling_kernel

    found = sampling_kernel.gumbel_noise(SEEDS, LAST_TIMES, vocab_size)
    assert torch.equal(found, gumbel_noise(SEEDS, LAST_TIMES, vocab_size))


@not_in_the_interpreter
def test_the_kernel_of_the_noise_compiles_for_gpus() -> None:
    """No GPU is needed. This finds code that only the interpreter accepts."""
    from tlt import sampling_kernel

    names = {"logits": "*bf16", "log_p": "*fp32", "seeds": "*i64", "times": "*i32", "ours": "*i1", "noisy": "*i1"}
    compiles(sampling_kernel._write_scores, names, {"LANES": 256})


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs Triton that fails")
def test_if_triton_fails_pytorch_computes_the_noise(caplog: pytest.LogCaptureFixture) -> None:
    """For example without a C compiler, which inference images lack."""
    has_kernel.cache_clear()
    assert not has_kernel(torch.device("cuda"))
    assert "Triton does not run on cuda" in caplog.text
    has_kernel.cache_clear()


@not_in_the_interpreter
def test_the_kernel_of_the_noise_starts_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from tlt import sampling_kernel

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
    monkeypatch.setattr(sampling_kernel, "_write_scores", defaultdict(lambda: launch))
    noise = sampling_kernel.gumbel_noise(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), 5)
    assert len(started) == 1
    assert started[0] is noise
