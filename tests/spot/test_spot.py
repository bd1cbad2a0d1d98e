"""The spot trainer: interruption, transfer, evaluation, and training data of several target versions."""

from __future__ import annotations

import math
import random
from itertools import count

import pytest
import torch
from test_saving import same
from twin import Model, make_layer, make_model

from tlt.config import DrafterTrainConfig, EngineConfig
from tlt.draft.eagle import EagleLayer, eagle_options
from tlt.draft.features import Harvest
from tlt.engine.engine import Engine
from tlt.spot import trainer
from tlt.spot.saving import TrainerState
from tlt.spot.schedule import Evaluation, Schedule
from tlt.spot.spot import SpotTrainer
from tlt.spot.spot_worker import SpotWorker
from tlt.spot.trainer import DrafterTrainer
from tlt.spot.unroll import pack
from tlt.types import Prompt, Request, SamplingParams

CPU = torch.device("cpu")
CONFIG = DrafterTrainConfig(unroll=3, micro_batch_tokens=64, learning_rate=3e-3)


@pytest.fixture(autouse=True)
def short_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_WARMUP_STEPS", 2)


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(seed=1)


def rollout(model: Model, prompts: range) -> list[Harvest]:
    items: list[Harvest] = []
    layout = eagle_options(model.decoder.options, "eagle3", 32).layout
    engine = Engine(model.decoder, EngineConfig(), layout=layout, on_harvest=items.append)
    params = SamplingParams(0.7, max_new_tokens=48)
    for _ in engine.generate([Request(Prompt(i, "", (i % 9, i % 7, 3)), 0, 0, i, params) for i in prompts]):
        pass
    return items


@pytest.fixture(scope="module")
def items(model: Model) -> list[Harvest]:
    return rollout(model, range(24))


def fresh_layer(model: Model, seed: int = 0) -> EagleLayer:
    torch.manual_seed(seed)
    return EagleLayer(eagle_options(model.decoder.options, "eagle3", 32)).double()


def make_spot(
    model: Model, items: list[Harvest], layer: EagleLayer | None = None, now: list[Harvest] | None = None
) -> SpotTrainer:
    """Return a trainer with training data of four prompts of five. It is evaluated on the fifth, which is of the last
    rollout, or on `now`."""
    spot = SpotTrainer(layer or fresh_layer(model), model.decoder, CONFIG)
    for item in items:
        if now is not None or not is_new(item):
            spot.harvest(item)
    spot.target_moved()
    for item in filter(is_new, items) if now is None else now:
        spot.harvest(item)
    spot.rollout_ended()
    return spot


def is_new(item: Harvest) -> bool:
    return item.prompt_id % 5 == 0


def state_of(spot: SpotTrainer) -> TrainerState:
    state = spot.state()
    assert state
    return state


def test_an_interrupted_preparation_changes_nothing(model: Model, items: list[Harvest]) -> None:
    spot = make_spot(model, items)
    first = spot.trainer.whitening
    assert spot.train(0, lambda: True).micro_batches == 0
    assert spot.trainer.whitening is first
    assert spot.train(0).micro_batches == 1
    second = spot.trainer.whitening
    assert spot.train(0, lambda: spot.trainer.steps == 2).micro_batches == 1, "the step before it counts"
    assert spot.trainer.whitening is second is not first


def test_without_held_out_data_nothing_is_evaluated(model: Model, items: list[Harvest]) -> None:
    worker = SpotWorker(make_spot(model, items, now=[]), lambda layer: None)
    assert worker.evaluate_drafter(None, lambda: False) is None
    worker = SpotWorker(make_spot(model, items), lambda layer: None)
    found = worker.evaluate_drafter(None, lambda: True)
    assert found, "an interrupted evaluation continues in the next call"
    assert found.interrupted


def test_an_evaluation_continues_from_the_given_state(model: Model, items: list[Harvest]) -> None:
    one, other = make_spot(model, items), make_spot(model, items)
    one.train(0)
    worker, start = SpotWorker(other, lambda layer: None), state_of(one)
    worker.evaluate_drafter(start, lambda: False)
    found = worker.drafter_state()
    assert found
    assert same(start, found)


def test_interruptions_change_nothing(model: Model, items: list[Harvest]) -> None:
    """Ten calls of one micro-batch, and one trainer moved from worker to worker, end with the state of one call."""
    whole, steps = make_spot(model, items), make_spot(model, items)
    while whole.trainer.steps < 10:
        whole.train(0)
    steps.train(0)
    for _ in range(3):
        heir = make_spot(model, items)
        heir.load_state(state_of(steps))
        heir.rng.setstate(steps.rng.getstate())
        for _ in range(3):
            heir.train(0)
        steps = heir
    assert same(state_of(whole), state_of(steps))


def test_training_changes_neither_the_given_layer_nor_a_state(model: Model, items: list[Harvest]) -> None:
    layer = fresh_layer(model)
    spot = make_spot(model, items, layer=layer)
    spot.train(0)
    state = state_of(spot)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    spot.train(0)
    assert same(state, kept)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), fresh_layer(model).parameters(), strict=True))


def test_an_interrupted_call_does_not_apply_its_micro_batch(model: Model, items: list[Harvest]) -> None:
    spot, looks = make_spot(model, items), count()
    spot.train(0)
    spot.train(0)
    assert spot.train(0, lambda: next(looks) < 0).micro_batches == 1
    before = state_of(spot)
    for reached in range(last := next(looks)):
        looks = count()
        report = spot.train(60.0, lambda at=reached, looks=looks: next(looks) == at)
        assert (report.micro_batches, report.tokens, next(looks)) == (0, 0, reached + 1)
        assert report.seconds > 0.0, "the schedule counts the time of dropped micro-batches too"
        assert same(before, state_of(spot))
    assert last >= 2 * spot.trainer.depth
    looks = count()
    report = spot.train(60.0, lambda: next(looks) > last)
    assert report.micro_batches > 0, "those before the dropped one count"
    spot.train(0)
    assert not same(before, state_of(spot))


def test_after_a_change_of_the_task_it_trains_first_tokens_at_the_full_rate(model: Model, items: list[Harvest]) -> None:
    layer = fresh_layer(model)
    layer.acceptance_rate = 0.9
    spot = make_spot(model, items, layer=layer)
    assert spot.trainer.depth == CONFIG.unroll
    before = state_of(spot)
    spot.forget()
    spot.load_state(before)  # of another worker, from before the change
    spot.enough, spot.trainer.steps = 1, 1000
    spot.harvest(items[0])
    for _ in range(2):  # drafters are trained on the rollouts before the last one
        spot.target_moved()
    assert spot.train(0).micro_batches == 1
    assert spot.trainer.optimizer.param_groups[0]["lr"] == pytest.approx(CONFIG.learning_rate)
    assert 0.0 < spot.trainer.reach <= 0.1, "of one first guess, in a mean over ten"
    spot.trainer.reach = 2.0
    spot.train(0)
    assert spot.trainer.reach > 1.5, "it begins anew once"


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_first_step_is_prepared_on_training_data_alone(
    model: Model, items: list[Harvest], monkeypatch: pytest.MonkeyPatch, is_trained: bool
) -> None:
    """Training from random weights begins with a linear map. A trained drafter keeps its weights."""
    calls: list[tuple[list[Harvest], bool]] = []
    monkeypatch.setattr(
        DrafterTrainer, "prepare", lambda _, sample, from_scratch, stop: calls.append((list(sample), from_scratch))
    )
    layer = fresh_layer(model)
    layer.acceptance_rate = 0.5 if is_trained else None
    spot = make_spot(model, items, layer=layer)
    while spot.trainer.steps < 5:
        spot.train(0)
    assert [from_scratch for _, from_scratch in calls] == [not is_trained, False, False, False]  # steps 0, 1, 2, 4
    assert all(sample and not any(map(is_new, sample)) for sample, _ in calls)


@pytest.mark.parametrize("spoilt", [False, True], ids=["no data", "NaN"])
def test_without_finite_training_data_nothing_is_trained(model: Model, items: list[Harvest], spoilt: bool) -> None:
    spot = make_spot(model, [item._replace(features=item.features * math.nan) for item in items if spoilt])
    before = state_of(spot)
    report = spot.train(0)
    assert same(before, state_of(spot))
    if not spoilt:
        assert not spot.ready
        assert report.micro_batches == 0
        assert spot.evaluate()._replace(seconds=0.0) == Evaluation()


def test_an_evaluation_has_many_responses_and_is_fixed_for_a_target(model: Model, items: list[Harvest]) -> None:
    spot = make_spot(model, items, now=items)
    evidence = spot.held_out()
    assert [item.tokens.tolist() for item in evidence] == [item.tokens.tolist() for item in spot.held_out()]
    assert sum(len(item.tokens) for item in evidence) <= spot.judged_tokens
    assert all(item.drafted and len(item.tokens) <= 64 for item in evidence)
    assert len({item.prompt_id for item in evidence}) > 2
    before = spot.evaluate()._replace(seconds=0.0)
    spot.harvest(items[0])
    assert spot.evaluate()._replace(seconds=0.0) == pytest.approx(before), "later data are of those who end first"


def test_drafters_are_evaluated_on_the_last_rollout_and_trained_on_others(model: Model, items: list[Harvest]) -> None:
    """So evaluations have data that no drafter was trained on, and all data are used for training later."""
    spot = make_spot(model, items)
    sampled = [item for _ in range(50) for item in spot.buffer.sample(60, random.Random(_))]
    assert sampled
    assert not any(is_new(item) for item in sampled)
    assert spot.held_out()
    assert all(is_new(item) for item in spot.held_out())
    spot.rollout_ended()
    spot.target_moved()
    assert all(is_new(item) for item in spot.held_out()), "it ends once"
    spot.target_moved()
    assert spot.held_out() == []
    assert spot.evaluate().entries == 0, "of a rollout that gave nothing"
    assert any(is_new(item) for _ in range(50) for item in spot.buffer.sample(60, random.Random(_)))


def test_an_interrupted_evaluation_ends_at_the_next_column(model: Model, items: list[Harvest]) -> None:
    """It returns the parts on which both drafters were compared by then."""
    spot = make_spot(model, items)
    spot.load_state(state_of(make_spot(model, items, layer=fresh_layer(model, 1))))
    looks = count()
    whole = spot.evaluate(lambda: next(looks) < 0)
    seen: list[Evaluation] = []
    for reached in range(last := next(looks)):
        looks = count()
        seen.append(spot.evaluate(lambda at=reached, looks=looks: next(looks) == at))
        assert next(looks) == reached + 1
        assert seen[-1].interrupted
    assert last >= 4 * CONFIG.unroll, "of two drafters and two parts"
    for one in (seen[0], seen[2 * CONFIG.unroll - 1]):
        assert one._replace(seconds=0.0) == Evaluation(interrupted=True)
    assert 0 < seen[-1].entries < whole.entries
    assert seen[-1].entries >= max(seen[-1].in_use, seen[-1].candidate)
    assert len({one.in_use for one in seen if one.entries}) > 1, "not of the same part each time: they are added up"
    assert spot.evaluate()._replace(seconds=0.0) == pytest.approx(whole._replace(seconds=0.0))
    assert whole.seconds > 0
    assert not whole.interrupted


def test_an_evaluation_by_hand(model: Model, items: list[Harvest]) -> None:
    """A round accepts draft token k with a_k = 1 - TV(target at entry + k, the twin's draft token k). Rounds are
    counted from the end: the round that begins here, and all rounds after it."""
    layer = make_layer(model.decoder, "eagle3", 32)
    item = items[0]
    twin, head = model.twin(layer), model.hf.lm_head.weight.detach()
    known = twin.true_entries(item.features, item.tokens.tolist(), item.start)
    right: list[list[float]] = []
    for at in range(len(item.tokens) - 3):
        if item.start + at + 2 < item.prompt_length:
            continue
        outputs, chances = twin.chain(known[: at + 1], item.tokens[at + 1 : at + 3].tolist()), []
        for k, output in enumerate(outputs):
            p = torch.softmax(head @ item.features[at + 1 + k, -16:], 0)
            chances.append(float(torch.minimum(p, torch.softmax(twin.logits(output), 0)).sum()))
        right.append(chances)
    count = len(right)

    def left(at: int) -> tuple[float, float]:
        """Return the expected rounds from there on, and their accepted first draft tokens."""
        if at >= count:
            return 0.0, 0.0
        a, b, c = right[at]
        rounds = firsts = 0.0
        for commits, chance in enumerate((1 - a, a * (1 - b), a * b * (1 - c), a * b * c), start=1):
            within = min(1.0, (count - at) / commits)
            more, first = left(at + commits)
            rounds += chance * (within + more)
            firsts += chance * (within * a + first)
        return rounds, firsts

    made = DrafterTrainer(layer, model.decoder, CONFIG)
    count = min(count, 12)  # the twin goes through every path
    [found], entries = made.judge([layer], pack([item.cut(0, len(item.tokens) - (len(right) - count))], CPU))
    assert found == pytest.approx(left(0), rel=1e-6)
    assert entries == count


def test_a_better_candidate_is_published_and_is_then_the_reference(model: Model, items: list[Harvest]) -> None:
    spot, schedule = make_spot(model, items), Schedule(CONFIG.micro_batch_tokens)
    first = spot.evaluate()
    assert first.candidate == first.in_use
    assert not schedule.publishes(first), "not the very same one"
    while spot.trainer.steps < 60:
        spot.train(0)
    found = spot.evaluate()
    assert schedule.publishes(found)
    assert 0 < found.first < found.candidate < found.entries
    assert found.candidate + found.first < found.entries
    assert spot.evaluate().in_use == pytest.approx(first.in_use, rel=1e-12), "to evaluate is not to publish"
    state = state_of(spot)
    layer = spot.publish(state, 0.5)
    after = spot.evaluate()
    assert after.in_use == after.candidate == pytest.approx(found.candidate, rel=1e-12)
    assert layer.acceptance_rate == 0.5
    assert all(torch.equal(p, state[f"mean.{name}"]) for name, p in layer.named_parameters())
    assert layer.fc.weight.data_ptr() != spot.in_use.fc.weight.data_ptr()


def test_the_draft_vocabulary_is_published(model: Model, items: list[Harvest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.draft.eagle._DRAFT_VOCABULARY", 5)
    spot, other = make_spot(model, items), make_spot(model, items)
    spot.train(0)
    chosen = spot.trainer.layer.vocabulary
    assert chosen is not None
    assert chosen.tolist() != list(range(5))
    state = state_of(spot)
    other.load_state(state)
    assert torch.equal(state_of(other)["mean.vocabulary"], chosen)
    published = other.publish(state, 0.5).vocabulary
    assert published is not None
    assert torch.equal(published, chosen)


@pytest.mark.parametrize(
    ("part", "value"), [("weight", math.nan), ("moment", math.inf), ("mean", math.nan), ("candidate", math.inf)]
)
def test_training_that_is_not_finite_restarts(model: Model, items: list[Harvest], part: str, value: float) -> None:
    spot = make_spot(model, items)
    spot.train(0)
    layer = spot.publish(state_of(spot), 0.5)
    spot.train(0)
    weight = spot.trainer.layer.fc.weight
    moment = spot.trainer.optimizer.state[spot.trainer.parameters["fc.weight"]]["exp_avg_sq"]
    {"weight": weight.data, "moment": moment}.get(part, spot.mean[0]).view(-1)[-1] = value
    if part == "candidate":
        assert spot.evaluate() == Evaluation()
    else:
        assert spot.state() is None
    for parameter, mean, wanted in zip(spot.trainer.layer.parameters(), spot.mean, layer.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
        assert torch.equal(mean, wanted)
    assert spot.trainer.steps == 0
    assert spot.state()
    assert spot.train(0).tokens > 0


def test_the_teacher_is_the_target_of_the_datas_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of an old item stays the same although the head has changed. A planted mix-up is found."""
    monkeypatch.setattr("tlt.spot.spot._STEPS", 8)
    model = make_model(seed=1)
    items = rollout(model, range(6))
    spot, old = make_spot(model, items), model.decoder.head.clone()
    state = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in model.hf.state_dict().items()}
    model.decoder.load(state, version=1)
    spot.target_moved()
    assert torch.equal(spot.trainer.heads[0], old)
    assert torch.equal(spot.trainer.heads[1], model.decoder.head)
    batch, spot.trainer.reach = pack(items[:3], CPU), 0.0
    hidden, (out,) = batch.features[:, -16:].double(), spot.trainer._unrolled(spot.trainer.layer, batch, 1)
    p, log_q = torch.softmax(hidden @ old.T, -1), torch.log_softmax(out @ model.decoder.head.T, -1)
    follows = (batch.segments[1:] == batch.segments[:-1]) & batch.counted[:-1]
    overlap = torch.minimum(p[1:], log_q[:-1].exp()).sum(-1)[follows].mean().item()
    assert spot.trainer.loss(batch)[1] == [pytest.approx(overlap)], "trained towards the distributions of its version"
    distribution = torch.cat([distribution for _, distribution in spot.trainer._target_distributions(batch)])
    assert torch.allclose(distribution, p), "judged by the same"
    spot.target_moved()
    spot.train(0)
    for version in range(2, 9):
        assert spot.ready
        model.decoder.load(state, version=version)
        spot.target_moved()
    spot.target_moved()
    assert spot.buffer.versions == set(), "what was not seen for eight steps is gone"
    assert spot.trainer.heads.keys() == {8}, "with its head"
    assert not spot.ready


@pytest.mark.parametrize(("heads", "steps"), [(0.5, 1), (4.5, 3), (99, 64)])
def test_data_are_kept_if_heads_fit(model: Model, monkeypatch: pytest.MonkeyPatch, heads: float, steps: int) -> None:
    monkeypatch.setattr("tlt.spot.spot._HEADS", int(heads * model.decoder.head.nbytes))
    assert make_spot(model, []).buffer.whole.maxlen == steps + 1, "and those of the last rollout"
