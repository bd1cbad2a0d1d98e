"""The engine with the kernels for GPUs, in Triton's interpreter: the way to decode a response changes no bit of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from random_drafter import RandomDrafter
from small import Replay, decoder_of, finish
from tiny import qwen3
from triton_interpreter import in_the_interpreter, not_in_the_interpreter, products_as_on_a_gpu, run_in_the_interpreter

from tlt.config import EngineConfig
from tlt.draft.drafter import Drafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.engine import Engine
from tlt.engine.runner import GraphedPasses
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.types import Prompt, Request, Response, SamplingParams

pytest.importorskip("triton")
VOCAB = 60
PARAMS = (
    SamplingParams(max_new_tokens=4),
    SamplingParams(max_new_tokens=5, temperature=0.0),
    SamplingParams(max_new_tokens=3, temperature=0.7),
)


@pytest.fixture(autouse=True)
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the engine choose the kernels, with small parts, so that short rows have several."""
    from tlt.attention import kernels

    monkeypatch.setattr(kernels, "PART", 16)
    monkeypatch.setattr(kernels, "_BLOCK_BYTES", 1)
    choose_kernels(monkeypatch, True)
    with products_as_on_a_gpu():
        yield


def choose_kernels(monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    monkeypatch.setattr("tlt.attention.slots.has_kernels", lambda shape: chosen)
    monkeypatch.setattr("tlt.engine.runner.has_kernel", lambda device: chosen)


def target_of(dtype: torch.dtype) -> Decoder:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return decoder_of(qwen3(vocab_size=VOCAB, initializer_range=0.3, **heads), dtype)


def requests(params: Sequence[SamplingParams] = PARAMS) -> list[Request]:
    prompts = [Prompt(n, "", tuple((5 * n + j * j) % VOCAB for j in range(3 + 9 * n))) for n in range(len(params))]
    return [Request(prompt, 0, 0, 1000 + n, params[n]) for n, prompt in enumerate(prompts)]


def decoded(
    target: Decoder,
    asked: Sequence[Request],
    drafter: Drafter | None = None,
    max_rows: int = 8,
    graphed: bool = False,
    moved: bool = False,
) -> list[Response]:
    """Return the responses in the order of the requests. If `moved`, another engine continues them after a round, and
    prefills the first tokens."""
    drafters, strategy = ([drafter], Strategy(drafter.name, 3)) if drafter else ([], PLAIN)

    def started() -> Engine:
        engine = Engine(target, EngineConfig(max_rows=max_rows), drafters, Fixed(strategy))
        engine.start(())
        if graphed:
            store: Any = engine.cache.store
            engine.rollout.runner.graphs = GraphedPasses(store, target)
        return engine

    engine = started()
    engine.submit(asked)
    if moved:
        engine.round()
        rows = engine.release_requests([request.seed for request in asked])
        engine = started()
        engine.submit((), rows)
    responses = finish(engine)
    assert engine.stats.drafted or not drafter
    return sorted(responses, key=lambda one: one.request.seed)


def bits(responses: Sequence[Response]) -> list[Any]:
    """Return the tokens and both log-probs of each response."""
    return [(list(one.token_ids), list(one.logprobs), list(one.full_logprobs)) for one in responses]


@not_in_the_interpreter
def test_the_kernels_in_tritons_interpreter() -> None:
    run_in_the_interpreter(__file__)


@in_the_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_way_to_decode_a_response_changes_no_bit(dtype: torch.dtype) -> None:
    target, asked = target_of(dtype), requests()
    responses = decoded(target, asked)
    together = bits(responses)
    assert bits(decoded(target, asked, max_rows=1)) == together
    assert bits(decoded(target, asked, Replay(responses), graphed=True)) == together
    assert bits(decoded(target, asked, RandomDrafter(VOCAB), moved=True)) == together


@in_the_interpreter
def test_tokens_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = target_of(torch.float32), requests()
    found = bits(decoded(target, asked))
    choose_kernels(monkeypatch, False)
    for mine, wanted in zip(found, bits(decoded(target, asked)), strict=True):
        assert mine[0] == wanted[0]
        assert mine[1] == pytest.approx(wanted[1], abs=1e-4)
        assert mine[2] == pytest.approx(wanted[2], abs=1e-4)


@in_the_interpreter
def test_a_row_with_top_k_changes_no_bit_of_others() -> None:
    target = target_of(torch.bfloat16)
    asked = requests((*PARAMS, SamplingParams(max_new_tokens=3, top_k=2)))
    found = bits(decoded(target, asked, RandomDrafter(VOCAB)))
    assert found[:-1] == bits(decoded(target, asked[:-1]))
    assert found[-1:] == bits(decoded(target, asked[-1:]))
