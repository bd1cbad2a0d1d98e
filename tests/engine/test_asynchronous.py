"""Requests that arrive one by one get the same tokens as in a batch. Every caller learns how its request ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from small import decoder_of
from tiny import EOS, qwen3

from tlt.config import EngineConfig
from tlt.draft.strategy import Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.asynchronous import ABORTED, AsyncEngine
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.sampling import make_requests
from tlt.types import Prompt, Request, SamplingParams

ENDLESS: dict[str, Any] = {"max_new_tokens": 400, "stop_token_ids": ()}
PROMPTS = [Prompt(number, "", tuple(range(65, 70 + number))) for number in range(4)]


@pytest.fixture
def engine() -> Engine:
    target = decoder_of(qwen3(vocab_size=EOS + 1, initializer_range=0.5))
    return Engine(target, EngineConfig(max_rows=3, kv_memory_mb=1), [SuffixDrafter()], Fixed(Strategy("suffix", 4)))


@pytest.fixture
def served(engine: Engine) -> Iterator[AsyncEngine]:
    made = AsyncEngine(engine)
    yield made
    made.close()


def requests(samples: int = 2, **sampling: Any) -> list[Request]:
    params = SamplingParams(**{"max_new_tokens": 24, "stop_token_ids": (EOS,)} | sampling)
    return make_requests(PROMPTS, samples, params, seed=7)


async def wait_for_rows(served: AsyncEngine, count: int) -> None:
    while not await served.between_rounds(lambda engine: len(engine.rows) == count):
        await asyncio.sleep(0)


def awaited(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""
    return wraps(test)(lambda **fixtures: asyncio.run(asyncio.wait_for(test(**fixtures), 60)))


def broken(*_: Any) -> Any:
    raise RuntimeError("the device is gone")


@awaited
async def test_requests_that_arrive_one_by_one_get_the_tokens_of_a_batch(engine: Engine, served: AsyncEngine) -> None:
    together = {response.request.seed: response for response in engine.plain_engine().generate(requests())}

    async def later(delay: float, request: Request) -> Any:
        await asyncio.sleep(delay)
        return await served.generate(request)

    for response in await asyncio.gather(*(later(0.003 * (i % 5), request) for i, request in enumerate(requests()))):
        expected = together[response.request.seed]
        assert response.token_ids == expected.token_ids
        assert response.finish_reason == expected.finish_reason
        torch.testing.assert_close(response.logprobs, expected.logprobs, rtol=0, atol=1e-9)


@awaited
async def test_an_interrupted_request_ends_with_its_first_tokens(engine: Engine, served: AsyncEngine) -> None:
    asked = requests(**ENDLESS, top_k=3)
    full = {response.request.seed: response for response in engine.plain_engine().generate(asked)}
    waiting = [asyncio.create_task(served.generate(request)) for request in asked]
    while not await served.between_rounds(lambda engine: any(len(row.tokens) > 5 for row in engine.rows)):
        await asyncio.sleep(0)
    seeds = await served.interrupt()
    responses = await asyncio.gather(*waiting)
    assert set(seeds) == {r.request.seed for r in responses if r.finish_reason == ABORTED}
    assert any(response.token_ids for response in responses)
    assert any(not response.token_ids for response in responses), "three rows at once: some have not begun"
    for response in responses:
        plain, count = full[response.request.seed], len(response.token_ids)
        assert response.token_ids == plain.token_ids[:count]
        assert response.logprobs == pytest.approx(plain.logprobs[:count], abs=1e-9)
        assert response.full_logprobs == pytest.approx(plain.full_logprobs[:count], abs=1e-9)
        assert bool(response.decoded.row_passes) == bool(count)


@awaited
async def test_requests_that_are_too_large_or_repeated_are_refused(served: AsyncEngine) -> None:
    with pytest.raises(ValueError, match="may reach"):
        await served.generate(requests(max_new_tokens=10_000)[0])
    one = requests(**ENDLESS)[0]
    first = asyncio.create_task(served.generate(one))
    await asyncio.sleep(0.001)
    with pytest.raises(ValueError, match="seed"):
        await served.generate(one)
    assert len((await first).token_ids) == 400


@pytest.mark.parametrize("restarts", [True, False])
@awaited
async def test_a_failed_round_is_raised_to_all_callers_and_the_next_request_runs(
    engine: Engine, served: AsyncEngine, restarts: bool
) -> None:
    """The engine is started again after the round. This may fail too."""
    expected = next(iter(engine.plain_engine().generate(requests()[:1]))).token_ids
    start, real = engine.start, engine.round

    def fails() -> Any:
        engine._in_round = True  # as a real one leaves it behind
        broken()

    engine.round, engine.start = fails, start if restarts else broken
    for asked in (requests(), requests()[:1]):
        outcomes = await asyncio.gather(*(served.generate(r) for r in asked), return_exceptions=True)
        assert {str(outcome) for outcome in outcomes} == {"the device is gone"}
    engine.start, engine.round = start, real
    assert (await served.generate(requests()[0])).token_ids == expected


@awaited
async def test_idle_time_is_used_until_a_request_arrives(engine: Engine) -> None:
    seen: list[bool] = []

    def when_idle(given: Any, is_over: Callable[[], bool]) -> None:
        assert given is engine
        assert not engine.busy
        until = time.monotonic() + 20
        while not is_over() and time.monotonic() < until:
            time.sleep(0.001)
        seen.append(is_over())

    served = AsyncEngine(engine, when_idle)
    for request in requests()[:3]:
        await asyncio.sleep(0.02)
        await served.generate(request)
    served.close()
    assert len(seen) >= 3
    assert all(seen), "it came back as soon as there was an order"


@awaited
async def test_an_error_in_idle_time_affects_no_request(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    served = AsyncEngine(engine, broken)
    await asyncio.sleep(0.05)
    assert (await served.generate(requests()[0])).token_ids
    served.close()
    assert "the device is gone" in caplog.text


@pytest.mark.parametrize(("event", "says"), [("restart", "restarted during this request"), ("close", "was closed")])
@awaited
async def test_no_caller_waits_after_a_restart_or_a_close(served: AsyncEngine, event: str, says: str) -> None:
    asked = [asyncio.create_task(served.generate(r)) for r in requests(**ENDLESS)]
    await wait_for_rows(served, 3)
    if event == "close":
        served.close()
    else:
        await served.between_rounds(lambda engine: engine.start(()))
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        assert says in str(outcome)
    if event == "close":
        with pytest.raises(RuntimeError, match="was closed"):
            await served.generate(requests()[0])
    else:
        assert (await served.generate(requests()[0])).token_ids


@awaited
async def test_a_cancelled_request_is_not_decoded_further(served: AsyncEngine) -> None:
    one, other, *_ = requests(**ENDLESS)
    given_up = asyncio.create_task(served.generate(one))
    goes_on = asyncio.create_task(served.generate(other))
    await wait_for_rows(served, 2)
    refused = asyncio.create_task(served.generate(other))  # of a seed under way
    await asyncio.sleep(0)
    refused.cancel()
    given_up.cancel()
    await asyncio.gather(refused, given_up, return_exceptions=True)
    seeds = await served.between_rounds(lambda engine: [row.request.seed for row in engine.rows])
    assert seeds == [other.seed]
    again, whole = await asyncio.gather(served.generate(one), goes_on)
    assert len(again.token_ids) == len(whole.token_ids) == 400
