"""vLLM behind the interface of our engine, and a run of workers with one vLLM each. vLLM is not needed: `fake_vllm` has
its engine's documented interface, in float64, so that all tokens are compared."""

from __future__ import annotations

import random
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
import torch
from tiny import tiny_config

from tlt.build import open_engine, open_target, open_workplace
from tlt.config import Config, EngineConfig, ModelConfig
from tlt.draft.ahead import Ahead
from tlt.draft.drafter import Drafter
from tlt.draft.eagle import EagleLayer, eagle_options, load_drafter, save_drafter
from tlt.draft.features import Harvest
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.drafters import Drafters
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed, RoundResult, Tuner
from tlt.models.families import decoder_options, read_config
from tlt.models.model_folder import ModelError
from tlt.models.weights import read_safetensors
from tlt.rl.parity import check_parity, take_weights
from tlt.rl.policy import Policy
from tlt.sampling import gumbel_noise
from tlt.spot.schedule import RULE
from tlt.types import Request, Response, SamplingParams
from tlt.verify.modes import InTurn
from tlt.verify.oracle import OracleDrafter, causal_hidden
from tlt.vllm.drafting import DraftedRow, Drafting
from tlt.vllm.noise import Draw
from tlt.vllm.settings import WIDEST, VllmError, engine_arguments
from tlt.vllm.vllm_engine import VllmEngine

sys.path.insert(0, str(Path(__file__).parent.parent / "cluster"))

from test_coordinator import config_of, train


def opened(config: Config) -> VllmEngine:
    config = fake_vllm.by_vllm(config)
    engine = open_engine(config, open_target(config, config.model.path))
    assert isinstance(engine, VllmEngine)
    return engine


def engines(home: Path, count: int, drafter: str = "off") -> tuple[VllmEngine, Engine, list[Request]]:
    """Return an engine of vLLM, our own one, and this number of requests."""
    config = tiny_config(home, speculation={"drafter": drafter})
    place = open_workplace(config)
    return opened(config), Engine(place.target, config.engine), requests(place, count)


def requests(place: Any, count: int) -> list[Request]:
    sampling = replace(place.sampling, temperature=0.8)
    return [Request(place.prompts[i % 4], i // 4, 0, random.Random(i).getrandbits(64), sampling) for i in range(count)]


def decode(engine: Any, asked: list[Request]) -> dict[int, Response]:
    return {response.request.seed: response for response in engine.generate(asked)}


def facts(responses: dict[int, Response]) -> dict[int, Any]:
    return {
        seed: (r.token_ids, r.finish_reason, [round(p, 5) for p in (*r.logprobs, *r.full_logprobs)])
        for seed, r in responses.items()
    }


@pytest.mark.parametrize("drafter", ["off", "adaptive"])
def test_responses_are_our_own_engines(drafter: str, started: Any, tmp_path: Path) -> None:
    """They continue after an end token of the model that is no stop token."""
    engine, own, asked = engines(tmp_path, 11, drafter)
    expected = decode(own, asked)
    started[-1].end_token = expected[asked[0].seed].token_ids[2]
    assert facts(decode(engine, asked)) == facts(expected)


def in_other_processes(engine: VllmEngine) -> None:
    """Let vLLM's workers get copies, as with tensor parallelism."""
    llm, call = engine.target.llm, engine.target.llm.collective_rpc
    llm.collective_rpc = lambda method, args=(): call(method, deepcopy(args))
    engine.target.parallel = True


def use(engine: VllmEngine, tuner: Tuner, *drafters: Drafter) -> Drafting:
    """Let this tuner choose, and these drafters draft, if there are any."""
    assert engine.drafting
    engine.drafting.tuner = tuner
    if drafters:
        engine.drafting.drafters = Drafters(list(drafters), None)
    return engine.drafting


@pytest.mark.parametrize("parallel", [False, True])
def test_look_ahead_tokens_are_drafts(parallel: bool, started: Any, tmp_path: Path) -> None:
    engine, _, asked = engines(tmp_path, 6, "adaptive")
    use(engine, Fixed(PLAIN._replace(ahead=16)))
    if parallel:
        in_other_processes(engine)
    engine.start(())
    engine.look_ahead(asked)
    while engine.looks_ahead:
        engine.round()
    assert all(engine.store.has_ended(request) for request in asked)
    ahead = {request.seed: engine.store.get(request).tokens.tolist() for request in asked}  # pyright: ignore
    responses = decode(engine, asked)
    assert {seed: response.token_ids for seed, response in responses.items()} == ahead
    stats = engine.stats
    assert stats.seen_ahead == stats.ahead_drafted > 0
    assert stats.tokens > 2 * stats.row_passes
    assert sum(response.decoded.seen_ahead for response in responses.values()) == stats.seen_ahead


@pytest.mark.parametrize("parallel", [False, True])
def test_responses_of_an_earlier_epoch_are_drafts(parallel: bool, started: Any, tmp_path: Path) -> None:
    engine, own, asked = engines(tmp_path, 6, "suffix")
    use(engine, Fixed(Strategy("suffix", 8, min_chance=0.0)))
    if parallel:
        in_other_processes(engine)
    expected, alone = facts(decode(own, asked)), facts(decode(engine, asked))
    before = engine.stats.accept_length
    engine.start(())
    engine.store.put(Ahead.of(r, 0, ended=True)._replace(seed=s + 1) for s, r in decode(own, asked).items())
    assert facts(decode(engine, asked)) == alone == expected
    assert engine.stats.accept_length > 2 > 1.5 > before


def test_memory_is_freed_if_no_request_is_active(started: Any, tmp_path: Path) -> None:
    """A worker's two engines share a vLLM, and each slice releases the idle one."""
    engine, _, asked = engines(tmp_path, 6)
    expected = facts(decode(engine, asked))
    assert engine_arguments(ModelConfig(path="folder"), EngineConfig(), None, 100, sleeps=True)["enable_sleep_mode"]
    engine.target._sleeps = True  # as on a GPU
    plain = engine.plain_engine()
    engine.start(asked)
    responses = engine.round()
    plain.release()
    assert not started[-1].asleep, "rows are under way"
    while engine.busy:
        responses += engine.round()
    engine.release()
    assert started[-1].asleep
    assert facts({r.request.seed: r for r in responses}) == expected
    assert facts(decode(engine, asked)) == expected, "it is awake again"


def test_a_request_that_vllm_ends_by_itself_is_not_waited_for(started: Any, tmp_path: Path) -> None:
    engine, _, asked = engines(tmp_path, 2)
    llm, step = engine.target.llm, engine.target.llm.step

    def ends_all() -> list[Any]:
        for output in (outputs := step()):
            output.finished = True
        return outputs

    llm.step = ends_all
    with pytest.raises(VllmError, match="unexpectedly"):
        list(engine.generate(asked))


def test_a_new_rollout_drops_the_log_probs_of_the_last_one(started: Any, tmp_path: Path) -> None:
    engine, _, asked = engines(tmp_path, 3)
    engine.start(asked)
    engine.round()
    table = started[-1].worker._tlt_table
    for slot in list(table.draws):
        table.leave(slot)
    assert table._left
    engine.start(())
    assert not table._left


def looking_ahead(home: Path, count: int) -> tuple[VllmEngine, list[Request]]:
    engine, _, asked = engines(home, count, "adaptive")
    engine.start(())
    engine.look_ahead(asked)
    engine.round()
    return engine, asked


def stored(engine: VllmEngine, request: Request) -> list[int]:
    known = engine.store.get(request)
    return known.tokens.tolist() if known else []


def test_look_ahead_rows_are_preempted_with_their_tokens_and_continue(started: Any, tmp_path: Path) -> None:
    engine, _, asked = engines(tmp_path, 10, "adaptive")
    engine.start(())
    engine.look_ahead(asked[:6])
    for _ in range(2):
        engine.round()
    had = {row.request.seed: list(row.tokens) for row in engine.rows}
    assert len(had) == engine.config.max_rows
    engine.submit(asked[6:])
    engine.round()
    assert [row.request for row in engine.rows] == asked[6:]
    assert {request.seed: stored(engine, request) for request in asked[:4]} == had
    while engine.busy or engine.looks_ahead:
        engine.round()
    assert all(engine.store.has_ended(request) for request in asked[:6])
    assert all(stored(engine, request)[:2] == had[request.seed] for request in asked[:4])
    tokens = sum(len(stored(engine, request)) for request in asked[:6])
    assert engine.stats.ahead_tokens == tokens, "nothing is decoded again"


def test_repeated_look_ahead_requests_continue_and_others_leave_with_their_tokens(started: Any, tmp_path: Path) -> None:
    engine, asked = looking_ahead(tmp_path, 3)
    engine.look_ahead(asked[1:])
    assert [row.request for row in engine.rows] == asked[1:]
    assert len(stored(engine, asked[0])) == 1
    engine.round()
    assert [row.request for row in engine.rows] == asked[1:], "each is decoded once"


def test_look_ahead_requests_are_not_transferred_and_a_request_that_is_too_large_is_refused(
    started: Any, tmp_path: Path
) -> None:
    """A worker that takes over a request decodes it for this step. Look-ahead tokens of it are not part of a
    response."""
    engine, asked = looking_ahead(tmp_path, 3)
    assert engine.release_requests([request.seed for request in asked]) == []
    long = replace(asked[0], sampling=replace(asked[0].sampling, max_new_tokens=10_000))
    with pytest.raises(ValueError, match=r"may reach 10011 tokens, but vLLM was started for .*: lower rollout"):
        engine.look_ahead([long])
    assert [row.request for row in engine.rows] == asked, "those before go on"


def test_a_new_rollout_drops_requests_and_keeps_the_tokens_of_look_ahead(started: Any, tmp_path: Path) -> None:
    engine, _, asked = engines(tmp_path, 11, "adaptive")
    engine.start(asked[:2])
    engine.look_ahead(asked[2:6])
    engine.tuner.free_rows = lambda rows: 4  # type: ignore[method-assign]
    for _ in range(2):
        engine.round()
    engine.submit(asked[6:8])
    engine.start(asked[8:])
    assert [request for request in asked if engine.store.get(request)] == asked[2:4]
    responses = [response for _ in range(200) if engine.busy for response in engine.round()]
    assert {response.request.seed for response in responses} == {request.seed for request in asked[8:]}
    assert not engine.looks_ahead


def test_a_pass_has_room_for_all_rows_and_their_drafts(started: Any, tmp_path: Path) -> None:
    for prefill, expected in ((7, 4 * (1 + WIDEST)), (500, 500)):
        engine = {"prefill_tokens": prefill, "max_rows": 4}
        opened(tiny_config(tmp_path, engine=engine, speculation={"drafter": "adaptive"}))
        assert started[-1].arguments["max_num_batched_tokens"] == expected


def test_prompts_and_responses_may_be_a_few_tokens(started: Any, tmp_path: Path) -> None:
    """They are shorter than the text on which the distributions are compared."""
    config = fake_vllm.by_vllm(tiny_config(tmp_path, data={"max_prompt_tokens": 12}, rollout={"max_new_tokens": 3}))
    target = open_target(config, config.model.path)
    policy = Policy(config.model.path, torch.float64, torch.device("cpu"), config.train, config.rollout)
    take_weights(target, policy, 1)
    moved = {name: tensor * 1.05 for name, tensor in policy.state_dict().items()}
    target.load(moved, 2)
    with pytest.raises(ModelError, match="not one model at version 2: after 14 tokens"):
        check_parity(target, policy)


@pytest.mark.parametrize("fault", ["no noise", "noise of another position"])
def test_other_draws_are_refused(started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    config = fake_vllm.by_vllm(tiny_config(tmp_path))
    target = open_target(config, config.model.path)
    policy = Policy(config.model.path, torch.float64, torch.device("cpu"), config.train, config.rollout)
    take_weights(target, policy, 1)
    shift = 0.0 if fault == "no noise" else 1.0
    other = lambda seeds, positions, size: shift * gumbel_noise(seeds, positions + 1, size)  # noqa: E731
    monkeypatch.setattr("tlt.vllm.noise.gumbel_noise", other)
    with pytest.raises(
        VllmError, match=r"does not draw tokens with tlt's noise \(token ids \[\d+\] instead of \[\d+\]\)"
    ):
        take_weights(target, policy, 2)


def test_requests_continue_elsewhere_with_their_tokens(started: Any, tmp_path: Path) -> None:
    engine, own, asked = engines(tmp_path, 6)
    expected = facts(decode(own, asked))
    engine.start(asked)
    responses = [response for _ in range(5) for response in engine.round()]
    left = engine.release_requests([request.seed for request in asked[::2]])
    assert all(len(row.logprobs) == len(row.tokens) for row in left)
    engine.submit([], left)
    while engine.busy:
        responses += engine.round()
    assert facts({response.request.seed: response for response in responses}) == expected


def test_new_weights_clear_the_prefix_cache_even_with_active_rows(started: Any, tmp_path: Path) -> None:
    engine, _, asked = engines(tmp_path, 4, "adaptive")
    engine.start(())
    engine.look_ahead(asked[:2])
    engine.round()
    engine.target.load(weights_of(tmp_path), 1)
    assert started[-1].cached_by == engine.target.llm.runner.target.version
    engine.start(asked[2:])
    engine.round()


def weights_of(home: Path) -> dict[str, torch.Tensor]:
    return dict(read_safetensors(home / "model"))


def learned(home: Path) -> Path:
    """Return the folder of a drafter."""
    tiny_config(home)
    torch.manual_seed(3)
    layer = EagleLayer(eagle_options(decoder_options(read_config(home / "model")), "eagle1", 16))
    layer.acceptance_rate = 0.5
    save_drafter(layer, home / "drafter")
    return home / "drafter"


def drafted(home: Path, **settings: Any) -> tuple[VllmEngine, Any, list[Request], Config]:
    """Return an engine with a learned drafter, and requests with short and long responses."""
    speculation = {"drafter": "adaptive", "path": str(learned(home))}
    config = tiny_config(home, speculation=speculation, **settings)
    place = open_workplace(config)
    lengths = (3, 17, 24, 40)
    asked = [
        replace(r, sampling=replace(r.sampling, max_new_tokens=lengths[i % 4]))
        for i, r in enumerate(requests(place, 11))
    ]
    return opened(config), place, asked, config


@pytest.mark.parametrize("top_k", [0, 9])
def test_tokens_and_training_data_do_not_depend_on_strategies(top_k: int, started: Any, tmp_path: Path) -> None:
    """They change from round to round, and so do the rows."""
    engine, place, asked, config = drafted(tmp_path)
    asked = [replace(r, sampling=replace(r.sampling, top_k=top_k * (i % 2))) for i, r in enumerate(asked)]
    layer = load_drafter(str(config.speculation.path), place.target.options)
    found, expected = list[Harvest](), list[Harvest]()
    own = open_engine(config, place.target, layer, expected.append)
    engine = VllmEngine(
        engine.target, config.engine, speculation=config.speculation, layer=layer, on_harvest=found.append
    )
    arms = [PLAIN, Strategy("eagle", 3), Strategy("suffix", 4), Strategy("eagle", 1), PLAIN._replace(ahead=4)]
    use(engine, InTurn(arms))
    assert facts(decode(engine, asked)) == facts(decode(own, asked))
    stats = engine.stats
    assert {name.split()[0] for name in stats.strategies} == {"plain", "eagle", "suffix", "ahead"}
    assert 0 < stats.accepted < stats.drafted
    assert stats.drafter_failures == 0
    by_place = lambda item: (item.prompt_id, item.start, item.tokens.tolist())  # noqa: E731
    for mine, theirs in zip(sorted(found, key=by_place), sorted(expected, key=by_place), strict=True):
        assert by_place(mine) == by_place(theirs)
        torch.testing.assert_close(mine.features, theirs.features)


def test_a_perfect_drafter_is_always_right(started: Any, tmp_path: Path) -> None:
    """Its drafts have the noise of the target."""
    engine, place, asked, _ = drafted(tmp_path)
    use(engine, Fixed(Strategy("oracle", 3)), OracleDrafter(place.target))
    decode(engine, asked)
    assert engine.stats.accepted == engine.stats.drafted > 2 * engine.stats.draft_passes


def test_hidden_states_of_cached_prompts_are_those_of_the_group(started: Any, tmp_path: Path) -> None:
    """vLLM's prefix cache has prompts that the same pass or an earlier one computed, but not their hidden states."""
    engine, place, asked, _ = drafted(tmp_path)
    assert engine.drafting
    started[-1].runner.block = 4
    asked = [replace(request, prompt=place.prompts[0], index=i) for i, request in enumerate(asked[:6])]
    engine.start(asked[:3])
    for _ in range(9):
        engine.round()
    rest = engine.release_requests([asked[1].seed])
    engine.submit(asked[3:], rest)
    while engine.busy:
        engine.round()
        rollout = engine.drafting.rollout
        assert rollout.window
        for row_place, row in enumerate(rollout.rows):
            low, high = rollout.window.start(row_place), rollout.window.length[row_place]
            assert high == row.kv_length
            assert low == max(0, high - 16) or row.request.seed == asked[1].seed, "its own first tokens are unknown"
            hidden = causal_hidden(place.target, torch.tensor([row.context[:high]]))[0, low:]
            with torch.inference_mode():
                features, tokens = rollout.window.read(row_place, low, high)
            torch.testing.assert_close(features, hidden)
            assert tokens.tolist() == list(row.context[low + 1 : high + 1])


def test_rows_and_drafts_without_room_in_a_pass(started: Any, tmp_path: Path) -> None:
    """vLLM leaves out rows, which keep their drafts, and cuts drafts. What it verifies is counted."""
    engine, place, asked, _ = drafted(tmp_path)
    drafting = use(engine, Fixed(Strategy("oracle", 3)), OracleDrafter(place.target))
    expected, llm = facts(decode(engine, asked)), started[-1]
    engine.start(asked)
    responses = list[Response]()
    while engine.busy:
        left = list(llm.runner.live)[1:2] if engine.stats.rounds % 2 else []
        waiting = {name: llm.runner.live.pop(name) for name in left}
        llm.drafts_of = {name: draft[: 1 + engine.stats.rounds % 3] for name, draft in llm.drafts_of.items()}
        responses += engine.round()
        llm.runner.live |= waiting
        assert not waiting.keys() & {row.name for row in drafting.rollout.rows if isinstance(row, DraftedRow)}
    assert facts({response.request.seed: response for response in responses}) == expected
    assert 0 < engine.stats.accepted == engine.stats.drafted
    assert not drafting.known


def test_finished_requests_without_a_key_are_forgotten(started: Any, tmp_path: Path) -> None:
    """verl asks for no log-probs, and then takes nothing of a request."""
    engine, _, asked = engines(tmp_path, 6, "suffix")
    assert engine.drafting
    engine.start(())
    for name, request in enumerate(asked):
        prompt = list(request.prompt.token_ids)
        extra = Draw(None, request.seed, len(prompt), 1.0, 0, 1.0).as_extra()
        params = fake_vllm.Params(temperature=0, max_tokens=3, stop_token_ids=[], ignore_eos=True, extra_args=extra)
        started[-1].add_request(str(name), {"prompt_token_ids": prompt}, params)
        while started[-1].runner.live:
            started[-1].step()
        assert len(engine.drafting.known) <= 2


def test_requests_of_others_have_no_drafts_and_are_not_timed(started: Any, tmp_path: Path) -> None:
    engine, place, asked, config = drafted(tmp_path)
    seen, llm = list[RoundResult](), started[-1]
    use(engine, tuner := Fixed(Strategy("suffix", 4)))
    tuner.record = seen.append  # type: ignore[method-assign]
    engine.start(asked[2:4])
    for _ in range(3):
        engine.round()
    assert seen.pop().scored
    greedy = replace(asked[0], sampling=SamplingParams(temperature=0.0, max_new_tokens=9))
    theirs = fake_vllm.Params(temperature=0, max_tokens=9, stop_token_ids=[], ignore_eos=True, extra_args=None)
    seen.clear()
    llm.add_request("theirs", {"prompt_token_ids": list(greedy.prompt.token_ids)}, theirs)
    row = llm.runner.live["theirs-own"]
    while "theirs-own" in llm.runner.live:
        engine.round()
        assert not llm.drafts_of["theirs-own"]
    assert len(seen) == 9
    assert not any(result.scored for result in seen)
    assert row.tokens == decode(Engine(place.target, config.engine), [greedy])[greedy.seed].token_ids


def test_plain_passes_are_not_verified(started: Any, tmp_path: Path) -> None:
    """vLLM gives its runner counts of draft tokens in every pass if it was started with a drafter."""
    engine, own, asked = engines(tmp_path, 3, "adaptive")
    runner, found = started[-1].runner, list[tuple[bool, bool]]()
    use(engine, Fixed(PLAIN._replace(ahead=16)))
    engine.start(asked)
    engine.store.put([Ahead.of(response, 0) for response in decode(own, asked).values()])
    while engine.busy:
        drafts = any(started[-1].drafts_of.values())
        engine.round()
        found.append((drafts, runner.verifies))
    assert {verifies for drafts, verifies in found if drafts} == {True}
    assert {verifies for drafts, verifies in found if not drafts} == {False}


def test_the_tuner_learns_from_passes_without_a_prefill(started: Any, tmp_path: Path) -> None:
    engine, _, asked, _ = drafted(tmp_path)
    seen = list[RoundResult]()
    use(engine, tuner := Fixed(Strategy("suffix", 4)))
    tuner.record = seen.append  # type: ignore[method-assign]
    decode(engine, asked)
    scored = [result for result in seen if result.scored]
    assert 0 < len(scored) < len(seen)
    for result in scored:
        assert 0 < result.drafting < result.seconds
        assert len(result.tokens) <= result.computed <= 5 * len(result.tokens)
    assert sum(sum(result.tokens) for result in seen) < sum(len(r.token_ids) for r in decode(engine, asked).values())


@pytest.mark.parametrize("rounds", [0, 1])
def test_the_drafter_of_later_rounds_is_another(rounds: int, started: Any, tmp_path: Path) -> None:
    """A resumed run replaces it before its first rollout."""
    engine, _, asked, config = drafted(tmp_path)
    assert engine.drafting
    for _ in range(rounds):
        engine.start(asked)
        engine.round()
    layer = load_drafter(str(config.speculation.path), engine.target.options)
    engine.draft_with(layer)
    in_use = engine.drafting.drafters.usable["eagle"]
    if not rounds:
        engine.start(asked)
    while engine.busy:
        engine.round()
    assert engine.drafting.drafters.usable["eagle"] is in_use, "it did not fail"


def run_of(home: Path, steps: int, **speculation: Any) -> Config:
    """Return a run of two workers."""
    sections = {"speculation": speculation} if speculation else {}
    config = config_of(home, 2, rollout={"max_new_tokens": 32}, **sections)
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def test_idle_workers_look_ahead(started: Any, tmp_path: Path) -> None:
    plain = train(run_of(tmp_path, 2))[:2]
    digest, learned_from, pool = train(
        fake_vllm.by_vllm(run_of(tmp_path, 2, drafter="adaptive")), random.Random(3).randrange
    )
    assert (digest, learned_from) == plain
    assert any(method == "look_ahead" for _, method in pool.log)


def test_idle_workers_train_the_drafter_of_all(started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third rollout trains on responses of the first one."""
    plain = train(run_of(tmp_path, 4))[:2]
    monkeypatch.setattr("tlt.spot.schedule.RULE", replace(RULE, stretch=1, rest_share=1e9))
    monkeypatch.setattr("tlt.spot.spot._ENOUGH", 1)
    monkeypatch.setattr("tlt.spot.schedule.Schedule.publishes", lambda schedule, whole: whole.entries > 0)
    training = {"micro_batch_tokens": 32, "unroll": 2, "learning_rate": 1e-2}
    config = run_of(tmp_path, 4, drafter="eagle", path=str(learned(tmp_path)), training=training, depth=1)
    digest, learned_from, pool = train(fake_vllm.by_vllm(config), random.Random(5).randrange)
    assert (digest, learned_from) == plain
    log = [method for _, method in pool.log]
    assert any(worker.spot.trainer.trainer.steps > 0 for worker in pool.workers)
    assert log.count("take_drafter") >= 2
    for worker in pool.workers:
        in_use = worker.engine.drafting.drafters.usable["eagle"]
        weights = worker.spot.trainer.in_use.down_proj.weight.detach()
        torch.testing.assert_close(in_use.fused.down.weight, weights.to(in_use.fused.down.weight))
