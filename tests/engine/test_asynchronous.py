"""Requests that arrive one by one get the same tokens as in a batch. Every caller learns how its request ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import EOS, tiny_model

from tlt.config import EngineConfig, ModelConfig
from tlt.draft.strategy import Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.asynchronous import ABORTED, AsyncEngine
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.models.choose import make_target
from tlt.models.weights import read_safetensors
from tlt.sampling import make_requests
from tlt.types import Prompt, Request, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=24, stop_token_ids=(EOS,))
PROMPTS = [Prompt(number, "", tuple(range(65, 70 + number))) for number in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("asynchronous") / "model")


@pytest.fixture
def engine(folder: Path) -> Engine:
    target = make_target(ModelConfig(path=str(folder), dtype="float64", device="cpu"))
    target.load(read_safetensors(folder), 0)
    chain = Strategy("suffix", depth=4, branching=1, verify_tokens=5)
    return Engine(target, EngineConfig(max_rows=3, kv_memory_mb=1), [SuffixDrafter(1000)], Fixed(chain))


@pytest.fixture
def served(engine: Engine) -> Iterator[AsyncEngine]:
    made = AsyncEngine(engine)
    yield made
    made.close()


def requests(samples: int = 2, **sampling: Any) -> list[Request]:
    return make_requests(PROMPTS, samples, SamplingParams(**vars(SAMPLING) | sampling), seed=7)


def test_requests_that_arrive_one_by_one_get_the_tokens_of_a_batch(engine: Engine) -> None:
    together = {response.request.seed: response for response in engine.plain_engine().generate(requests())}
    served = AsyncEngine(engine)

    async def one_by_one() -> list[Any]:
        async def later(delay: float, request: Request) -> Any:
            await asyncio.sleep(delay)
            return await served.generate(request)

        return await asyncio.gather(*(later(0.003 * (i % 5), request) for i, request in enumerate(requests())))

    for response in asyncio.run(one_by_one()):
        expected = together[response.request.seed]
        assert response.token_ids == expected.token_ids
        assert response.finish_reason == expected.finish_reason
        torch.testing.assert_close(response.logprobs, expected.logprobs, rtol=0, atol=1e-9)
    served.close()


def test_an_interrupted_request_ends_with_its_first_tokens(engine: Engine) -> None:
    asked = requests(max_new_tokens=400, stop_token_ids=(), top_k=3)
    full = {response.request.seed: response for response in engine.plain_engine().generate(asked)}
    whole = {seed: response.token_ids for seed, response in full.items()}
    served = AsyncEngine(engine)

    async def interrupted() -> tuple[list[int], list[Any]]:
        waiting = [asyncio.create_task(served.generate(request)) for request in asked]
        while not await served.between_rounds(lambda engine: any(len(row.tokens) > 5 for row in engine.rows)):
            await asyncio.sleep(0)
        seeds = await served.interrupt()
        return seeds, await asyncio.gather(*waiting)

    seeds, responses = asyncio.run(interrupted())
    assert set(seeds) == {r.request.seed for r in responses if r.finish_reason == ABORTED}
    assert any(response.token_ids for response in responses)
    assert any(not response.token_ids for response in responses), "three rows at once: some have not begun"
    for response in responses:
        assert response.token_ids == whole[response.request.seed][: len(response.token_ids)]
        plain, count = full[response.request.seed], len(response.token_ids)
        assert response.logprobs == pytest.approx(plain.logprobs[:count], abs=1e-9)
        assert response.full_logprobs == pytest.approx(plain.full_logprobs[:count], abs=1e-9)
        assert len(response.logprobs) == len(response.full_logprobs) == count
        assert bool(response.decoded.row_passes) == bool(count)
    served.close()


def test_requests_that_are_too_large_or_repeated_are_refused(served: AsyncEngine) -> None:
    async def ask() -> None:
        with pytest.raises(ValueError, match="may reach"):
            await served.generate(requests(max_new_tokens=10_000)[0])
        (one, *_) = requests(max_new_tokens=200, stop_token_ids=())
        first = asyncio.create_task(served.generate(one))
        await asyncio.sleep(0.001)
        with pytest.raises(ValueError, match="seed"):
            await served.generate(one)
        assert len((await first).token_ids) == 200

    asyncio.run(ask())


def test_a_failed_round_is_raised_to_all_callers_and_the_next_request_runs(engine: Engine) -> None:
    expected = next(iter(engine.plain_engine().generate(requests()[:1]))).token_ids
    served, real = AsyncEngine(engine), engine.round

    def broken() -> Any:
        engine._in_round = True  # as a real one leaves it behind
        raise RuntimeError("the device is gone")

    async def ask() -> None:
        engine.round = broken
        outcomes = await asyncio.gather(*(served.generate(r) for r in requests()), return_exceptions=True)
        assert {str(outcome) for outcome in outcomes} == {"the device is gone"}
        engine.round = real
        assert (await served.generate(requests()[0])).token_ids == expected

    asyncio.run(ask())
    served.close()


def test_an_engine_that_cannot_restart_raises_to_each_caller(engine: Engine) -> None:
    served, start, real = AsyncEngine(engine), engine.start, engine.round

    def broken(*_: Any) -> Any:
        engine._in_round = True
        raise RuntimeError("the device is gone")

    async def ask() -> Any:
        engine.round = engine.start = broken
        for request in requests()[:2]:
            with pytest.raises(RuntimeError, match="the device is gone"):
                await asyncio.wait_for(served.generate(request), 30)
        engine.start, engine.round = start, real
        return await asyncio.wait_for(served.generate(requests()[0]), 30)

    assert asyncio.run(ask()).token_ids
    served.close()


def test_idle_time_is_used_until_a_request_arrives(engine: Engine) -> None:
    seen: list[bool] = []

    def when_idle(given: Any, is_over: Callable[[], bool]) -> None:
        assert given is engine
        assert not engine.busy
        until = time.monotonic() + 20
        while not is_over() and time.monotonic() < until:
            time.sleep(0.001)
        seen.append(is_over())

    served = AsyncEngine(engine, when_idle)

    async def ask() -> None:
        for request in requests()[:3]:
            await asyncio.sleep(0.02)
            await served.generate(request)

    asyncio.run(ask())
    served.close()
    assert len(seen) >= 3
    assert all(seen), "it came back as soon as there was an order"


def test_an_error_in_idle_time_affects_no_request(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def when_idle(given: Any, is_over: Callable[[], bool]) -> None:
        raise AttributeError("no drafter")

    served = AsyncEngine(engine, when_idle)

    async def ask() -> Any:
        await asyncio.sleep(0.05)
        return await asyncio.wait_for(served.generate(requests()[0]), 30)

    assert asyncio.run(ask()).token_ids
    served.close()
    assert "no drafter" in caplog.text


def test_callers_learn_that_the_engine_was_restarted(served: AsyncEngine) -> None:

    async def ask() -> None:
        asked = [asyncio.create_task(served.generate(r)) for r in requests(max_new_tokens=300, stop_token_ids=())]
        while not await served.between_rounds(lambda engine: len(engine.rows) == 3):
            await asyncio.sleep(0)
        await served.between_rounds(lambda engine: engine.start(()))
        for outcome in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30):
            assert "restarted during this request" in str(outcome)
        assert (await asyncio.wait_for(served.generate(requests()[0]), 30)).token_ids

    asyncio.run(ask())


def test_a_closed_engine_leaves_no_caller_waiting(engine: Engine) -> None:
    served = AsyncEngine(engine)

    async def ask() -> None:
        asked = [asyncio.create_task(served.generate(r)) for r in requests(max_new_tokens=400, stop_token_ids=())]
        while not await served.between_rounds(lambda engine: len(engine.rows) == 3):
            await asyncio.sleep(0)
        served.close()
        for outcome in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30):
            assert "was closed" in str(outcome)
        with pytest.raises(RuntimeError, match="was closed"):
            await asyncio.wait_for(served.generate(requests()[0]), 30)

    asyncio.run(ask())
    served.close()


def test_a_cancelled_request_is_not_decoded_further(served: AsyncEngine) -> None:

    async def ask() -> None:
        one, other, *_ = requests(max_new_tokens=400, stop_token_ids=())
        given_up = asyncio.create_task(served.generate(one))
        goes_on = asyncio.create_task(served.generate(other))
        while not await served.between_rounds(lambda engine: len(engine.rows) == 2):
            await asyncio.sleep(0)
        refused = asyncio.create_task(served.generate(other))  # of a seed under way
        await asyncio.sleep(0)
        refused.cancel()
        given_up.cancel()
        await asyncio.gather(refused, given_up, return_exceptions=True)
        seeds = await served.between_rounds(lambda engine: [row.request.seed for row in engine.rows])
        assert seeds == [other.seed]
        again, whole = await asyncio.wait_for(asyncio.gather(served.generate(one), goes_on), 60)
        assert len(again.token_ids) == len(whole.token_ids) == 400

    asyncio.run(ask())
