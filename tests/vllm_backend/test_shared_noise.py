"""Our noise on another engine's logits: its greedy decoding draws our tokens. vLLM is not needed, because `fake_vllm`
has the documented interfaces of its two model runners."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch
from fake_vllm import RunnerV1, RunnerV2
from small import Target

from tlt.config import EngineConfig
from tlt.engine.engine import Engine
from tlt.types import Prompt, Request, Response, SamplingParams
from tlt.vllm import worker_extension
from tlt.vllm.noise import KEY, Draw, NoiseTable
from tlt.vllm.worker_extension import NoisySampling

SAMPLINGS = {
    "temperature 1": SamplingParams(max_new_tokens=12),
    "tempered": SamplingParams(temperature=0.6, max_new_tokens=12),
    "cut": SamplingParams(temperature=0.8, top_k=3, top_p=0.8, max_new_tokens=12),
    "nucleus": SamplingParams(top_p=0.6, max_new_tokens=12),
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=12),
}
SLOTS = 5


@pytest.fixture(scope="module")
def target() -> Any:
    return Target().decoder


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> type:
    fake_vllm.put_modules(monkeypatch)
    monkeypatch.delitem(sys.modules, "tlt.vllm.processor", raising=False)
    from tlt.vllm.processor import SharedNoise

    return SharedNoise


@pytest.fixture
def tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_extension, "require_vllm", lambda: None)


def requests(samplings: Sequence[SamplingParams]) -> list[Request]:
    prompts = (Prompt(0, "", (1, 2, 3)), Prompt(1, "", (4, 0, 2, 2, 1)))
    seeds = random.Random(7)
    return [Request(prompts[i % 2], i, 0, seeds.getrandbits(64), s) for i, s in enumerate([*samplings] * 4)]


def ours(target: Any, asked: Sequence[Request]) -> dict[int, Response]:
    return {r.request.seed: r for r in Engine(target, EngineConfig(max_rows=3)).generate(asked)}


def params_of(request: Request, key: int, had: int = 0) -> Any:
    sampling = request.sampling
    draw = Draw(key, request.seed, len(request.prompt.token_ids), sampling.temperature, sampling.top_k, sampling.top_p)
    return SimpleNamespace(temperature=0.0, max_tokens=sampling.max_new_tokens - had, extra_args=draw.as_extra())


def decode(runner: Any, table: NoiseTable, asked: Sequence[Request], said: dict[int, Response]) -> None:
    """Decode as many requests at once as there are slots. Draft tokens are right, wrong, or missing. Requests stop in
    the middle of their response and continue. Compare tokens and log-probs with our engine's."""
    rng, line, keys = random.Random(1), list(asked), iter(range(1000))
    had: dict[str, tuple[Request, list[int], list[list[float]]]] = {}

    def begin(request: Request, tokens: list[int], logprobs: list[list[float]]) -> None:
        key = next(keys)
        runner.add(str(key), request, params_of(request, key, len(tokens)), tokens)
        had[str(key)] = request, tokens, logprobs

    while line or had:
        while line and runner.free:
            begin(line.pop(0), [], [])
        guesses = {}
        for name, (request, before, _) in had.items():
            now = len(before) + len(runner.live[name].tokens)
            right = said[request.seed].token_ids[now:][: rng.randrange(4)]
            guesses[name] = [rng.randrange(5) if rng.random() < 0.3 else token for token in right]
        runner.step(guesses)
        for name, (request, before, logprobs) in list(had.items()):
            now = [*before, *runner.live[name].tokens][: request.sampling.max_new_tokens]
            ended = len(now) == request.sampling.max_new_tokens
            if ended or rng.random() < 0.1:
                logprobs = logprobs + table.take({int(name): (len(before), len(now))})[int(name)]
                runner.remove(name)
                del had[name]
                if not ended:
                    begin(request, now, logprobs)
                    continue
                response = said[request.seed]
                assert now == response.token_ids
                pairs = list(zip(response.logprobs, response.full_logprobs, strict=True))
                torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(pairs), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "samplings", [[sampling] for sampling in SAMPLINGS.values()] + [list(SAMPLINGS.values())], ids=[*SAMPLINGS, "mixed"]
)
def test_tokens_of_both_runners_are_ours(samplings: Any, target: Any, processor: type, tested_version: None) -> None:
    """V2 takes a logits processor, and V1 a wrapper of its sampling."""
    asked = requests(samplings)
    expected = ours(target, asked)
    v1, v2 = RunnerV1(target, SLOTS), RunnerV2(target, SLOTS, processor)
    decode(v1, NoisySampling(v1).table, asked, expected)
    decode(v2, v2.processor.table, asked, expected)


def test_other_requests_are_not_changed(target: Any, processor: type) -> None:
    """The slots were used by ours before."""
    asked = requests([SAMPLINGS["cut"]])[:2]
    runner = RunnerV2(target, 2, processor)
    for name in "01":
        runner.add(name, asked[0], params_of(asked[0], int(name)))
    runner.step({})
    for name in "01":
        runner.remove(name)
    runner.add("theirs", asked[0], SimpleNamespace(temperature=0.0, max_tokens=12, extra_args=None))
    runner.add("ours", asked[1], params_of(asked[1], 0))
    for _ in range(12):
        runner.step({})
    greedy = replace(asked[0], sampling=SAMPLINGS["greedy"])
    assert runner.live["theirs"].tokens == ours(target, [greedy])[greedy.seed].token_ids
    assert runner.live["ours"].tokens == ours(target, asked[1:])[asked[1].seed].token_ids


def table_of(*draws: Draw, slots: int = 1) -> NoiseTable:
    """Return a table with these draws in its first slots."""
    table = NoiseTable(max(slots, len(draws)), torch.device("cpu"))
    for slot, draw in enumerate(draws):
        table.add(slot, draw, 6)
    return table


def test_a_request_that_never_ran_has_drawn_nothing() -> None:
    """vLLM still had it queued when it was cancelled."""
    drawn = table_of().take({7: (4, 4)})
    assert drawn[7] == []


def test_a_preempted_request_keeps_its_recorded_draws() -> None:
    """It returns in another slot. The previous request of that slot leaves nothing in it, and the next request of its
    own slot changes nothing."""
    table, logits, draw = table_of(slots=2), torch.randn(3, 8), Draw(1, 99, 2, 1.0, 0, 1.0)
    table.add(1, Draw(2, 5, 2, 1.0, 0, 1.0), 6)
    table.apply(logits.clone(), torch.tensor([1, 1, 1]), torch.tensor([1, 2, 3]))
    table.add(0, draw, 6)
    table.apply(logits[:2].clone(), torch.tensor([0, 0]), torch.tensor([1, 2]))
    table.leave(0)
    table.add(0, Draw(3, 7, 2, 1.0, 0, 1.0), 6)
    table.apply(torch.randn(2, 8), torch.tensor([0, 0]), torch.tensor([1, 2]))
    table.add(1, draw, 6)
    table.apply(logits[2:].clone(), torch.tensor([1]), torch.tensor([3]))
    found = table.take({1: (0, 3)})[1]
    expected = table_of(draw)
    expected.apply(logits.clone(), torch.tensor([0, 0, 0]), torch.tensor([1, 2, 3]))
    assert found == expected.take({1: (0, 3)})[1]


def test_a_preempted_request_of_runner_v1_keeps_its_slot(target: Any, tested_version: None) -> None:
    """It left the batch, but the runner still knows it."""
    asked = requests([SAMPLINGS["tempered"]])[:2]
    said, runner = ours(target, asked), RunnerV1(target, 1)
    table = NoisySampling(runner).table
    runner.add("0", asked[0], params_of(asked[0], 0))
    runner.step({})
    preempted = runner.live.pop("0")
    runner.free.append(preempted.slot)
    runner.add("1", asked[1], params_of(asked[1], 1))
    for _ in range(12):
        runner.step({})
    assert runner.remove("1") == said[asked[1].seed].token_ids
    runner.live["0"] = preempted
    for _ in range(11):
        runner.step({})
    assert preempted.tokens == said[asked[0].seed].token_ids
    logprobs = [logprob for logprob, _ in table.take({0: (0, 12)})[0]]
    torch.testing.assert_close(logprobs, said[asked[0].seed].logprobs, atol=1e-6, rtol=1e-6)


def test_draws_within_a_prompt_do_not_change_the_record() -> None:
    """A long prompt is computed in parts, and once more after a preemption."""
    table, slot = table_of(), torch.tensor([0])
    table.add(0, Draw(1, 5, 900, 1.0, 0, 1.0), 900 + 256)
    for position in range(899, 899 + 256):
        table.apply(torch.randn(1, 9), slot, torch.tensor([position]))
    before = table._logprobs[0, :256].clone()
    for position in range(898):
        table.apply(torch.randn(1, 9), slot, torch.tensor([position]))
    assert torch.equal(table._logprobs[0, :256], before)


@pytest.mark.parametrize("version", [1, 2])
def test_a_continued_response_has_room(version: int, target: Any, processor: type, tested_version: None) -> None:
    """Its prompt includes that part. It is longer than any before."""
    asked = requests([replace(SAMPLINGS["temperature 1"], max_new_tokens=302)])[0]
    runner: Any = RunnerV1(target, 1) if version == 1 else RunnerV2(target, 1, processor)
    table = NoisySampling(runner).table if version == 1 else runner.processor.table
    runner.add("0", asked, params_of(asked, 0, had=300), [1] * 300)
    for _ in range(2):
        runner.step({})
    logprobs = [logprob for logprob, _ in table.take({0: (300, 302)})[0]]
    assert [logprob < 0 for logprob in logprobs] == [True, True]


@pytest.mark.parametrize("key", [None, 7])
def test_two_requests_of_one_key_are_both_drawn(key: int | None) -> None:
    """A caller that needs no log-probs need not give each request its own key."""
    seeds = (5, 6)
    table = table_of(*(Draw(key, seed, 1, 1.0, 3, 1.0) for seed in seeds))
    logits = torch.randn(1, 64).expand(2, -1)
    scores = table.apply(logits.clone(), torch.tensor([0, 1]), torch.tensor([0, 0]))
    for slot, seed in enumerate(seeds):
        alone = table_of(Draw(1, seed, 1, 1.0, 3, 1.0))
        assert torch.equal(scores[slot], alone.apply(logits[:1].clone(), torch.tensor([0]), torch.tensor([0]))[0])


def test_nothing_is_recorded_unless_requested() -> None:
    table = table_of()
    for seed in range(9):
        table.add(0, Draw(None, seed, 1, 1.0, 0, 1.0), 4)
    assert not table._left


def test_scores_are_not_rounded_to_the_dtype_of_the_logits(target: Any, tested_version: None) -> None:
    given: list[torch.Tensor] = []
    runner = SimpleNamespace(_sample=lambda logits, drafts: given.append(logits))
    noisy = NoisySampling.__new__(NoisySampling)
    noisy.runner, noisy._sample = runner, runner._sample
    noisy.table = table_of(Draw(1, 3, 1, 1.0, 0, 1.0))
    noisy._rows = lambda drafts: (torch.tensor([0]), torch.tensor([0]))
    logits = torch.zeros(1, 4096, dtype=torch.bfloat16)
    noisy(logits, None)
    alone = table_of(Draw(1, 3, 1, 1.0, 0, 1.0))
    assert torch.equal(given[0], alone.apply(logits.float(), torch.tensor([0]), torch.tensor([0])))
    assert given[0].dtype == torch.float32


def test_the_noise_arguments_are_read_as_written() -> None:
    draw = Draw(1, 2**64 - 1, 3, 0.5, 4, 0.5)
    assert Draw.of(draw.as_extra() | {"other": 1}) == draw
    assert Draw.of(None) is Draw.of({}) is Draw.of({"other": 1}) is None


@pytest.mark.parametrize("fault", [{"seed": -1}, {"prompt_tokens": 0}, {"top_p": 0.0}, {"colour": 1}])
def test_invalid_noise_arguments_are_refused(fault: dict[str, Any]) -> None:
    extra = Draw(1, 2, 3, 0.5, 4, 0.5).as_extra()
    extra[KEY] |= fault
    with pytest.raises(ValueError, match="extra_args"):
        Draw.of(extra)
