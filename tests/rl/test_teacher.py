"""Training data that the policy recomputes equal those that our own engine saves while it decodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_config

from tlt.build import open_workplace
from tlt.draft.eagle import EagleLayer, eagle_options
from tlt.draft.features import Harvest, Transcript
from tlt.engine.engine import Engine
from tlt.rl.choose import make_policy
from tlt.rl.teacher import PolicyTeacher, spot_trainer
from tlt.spot.recompute import Recompute
from tlt.spot.trainer import Interrupted
from tlt.types import Prompt, Request, SamplingParams

WINDOW = 16


@pytest.fixture
def world(tmp_path: Path) -> Any:
    config = tiny_config(tmp_path, speculation={"drafter": "off", "training": {"micro_batch_tokens": 32, "unroll": 2}})
    return config, open_workplace(config).target, make_policy(config, config.model.path)


def never() -> bool:
    return False


def recompute_of(world: Any, kind: Any = "eagle1", most: int = 10_000) -> Recompute:
    _, target, policy = world
    return Recompute(PolicyTeacher(policy, target), eagle_options(target.options, kind, WINDOW).layout, most)


def decoded(config: Any, target: Any, layout: Any) -> tuple[list[Harvest], list[Transcript]]:
    """Return the training data of our engine, and the same responses."""
    found: list[Harvest] = []
    engine = Engine(target, config.engine, layout=layout, on_harvest=found.append)
    lengths = (3, WINDOW, 40, 2 * WINDOW + 1, 2 * WINDOW - 6)  # the last one fills whole windows
    prompts = [Prompt(i, "", tuple(range(1, 4 + i))) for i in range(len(lengths))]
    params = [SamplingParams(0.7, max_new_tokens=n) for n in lengths]
    asked = [Request(prompts[i], 0, 0, i, params[i]) for i in range(len(lengths))]
    pairs = [(one.request.prompt.token_ids, one.token_ids) for one in engine.generate(asked)]
    return found, [Transcript(len(prompt), (*prompt, *tokens)) for prompt, tokens in pairs]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_recomputed_data_equal_those_of_our_engine(kind: Any, world: Any) -> None:
    config, target, _ = world
    harvested, transcripts = decoded(config, target, eagle_options(target.options, kind, WINDOW).layout)
    recompute, mine = recompute_of(world, kind), list[Harvest]()
    for transcript in transcripts:
        recompute.add(transcript)
    recompute.rollout_ended()
    while found := recompute.take(False, never):
        mine += found

    def key(item: Harvest) -> tuple[int, list[int]]:
        return item.start, item.tokens.tolist()

    for ours, theirs in zip(sorted(mine, key=key), sorted(harvested, key=key), strict=True):
        assert (ours[:3], key(ours)) == (theirs[:3], key(theirs))
        torch.testing.assert_close(ours.features, theirs.features, atol=1e-5, rtol=1e-5)  # transformers' float32 parts


def test_entries_of_earlier_turns_are_left_out(world: Any) -> None:
    recompute, tokens = recompute_of(world), tuple(range(1, 3 * WINDOW))
    (*_, whole) = recompute._harvest(Transcript(2, tokens), never)
    for first in (whole.end - WINDOW - 3, whole.end - 3):
        items = recompute._harvest(Transcript(2, tokens, first), never)
        entries = {entry for item in items for entry in range(item.start, item.end)}
        assert entries == set(range(first, whole.end))
    assert torch.equal(items[-1].features, whole.features[-3:])
    sizes = [(item.features.untyped_storage().nbytes(), item.features.nbytes) for item in items]
    assert all(held == own for held, own in sizes), "an item holds no memory of dropped ones"


def test_the_head_of_a_version_does_not_change(world: Any) -> None:
    _, target, policy = world
    teacher = PolicyTeacher(policy, target)
    head, copied = teacher.head, teacher.head.clone()
    assert torch.equal(head, target.head)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.add_(1.0)
    assert torch.equal(head, copied)
    target.load(policy.state_dict(), 1)
    assert torch.equal(teacher.head, copied + 1)
    assert torch.equal(teacher.embedding, target.embedding)


def test_an_interrupted_pass_is_repeated(world: Any) -> None:
    recompute, asked = recompute_of(world), iter([False, True])
    recompute.add(Transcript(2, (1, 2, 3, 4)))
    assert recompute.tokens(past=False) == 0, "the rollout is not over"
    recompute.rollout_ended()
    with pytest.raises(Interrupted):
        recompute.take(False, lambda: next(asked))
    assert recompute.tokens(past=False) == 4
    assert [item.start for item in recompute.take(False, never)] == [0]
    assert recompute.tokens(past=False) == 0
    assert not world[2].model.base_model.layers[0]._forward_pre_hooks


def test_the_longest_responses_of_a_step_come_first_and_the_oldest_are_dropped(world: Any) -> None:
    recompute = recompute_of(world, most=30)

    def tokens() -> tuple[int, int]:
        return recompute.tokens(past=True), recompute.tokens(past=False)

    for step in ([(1,) * 9, (2,) * 6, (4,) * 8], [(3,) * 10]):
        for response in step:
            recompute.add(Transcript(2, response))
        recompute.rollout_ended()
    recompute.add(Transcript(2, (5,) * 7))
    assert tokens() == (14, 10), "the oldest is gone"
    assert recompute.take(True, never)[0].tokens.tolist() == [4] * 7
    assert recompute.take(False, never)[0].tokens.tolist() == [3] * 9
    assert tokens() == (6, 0)
    recompute.rollout_ended()
    assert tokens() == (0, 7), "what is older is too old"


def test_data_have_the_teachers_version_and_only_finite_features(world: Any) -> None:
    _, target, policy = world
    transcript = Transcript(2, (1, 2, 3, 4))
    target.load(policy.state_dict(), 3)
    assert [item.target_version for item in recompute_of(world)._harvest(transcript, never)] == [3]
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[2] = torch.inf
    assert recompute_of(world)._harvest(transcript, never) == []


def test_a_drafter_is_trained_and_evaluated_on_the_data(world: Any) -> None:
    config, target, policy = world
    layer = EagleLayer(eagle_options(target.options, "eagle1", WINDOW))
    elsewhere: Any = SimpleNamespace(options=target.options, dtype=target.dtype, device=target.device, version=0)
    trainer = spot_trainer(layer, elsewhere, policy, config)
    _, transcripts = decoded(config, target, layer.options.layout)
    for is_ready in (False, True):  # the data of the last rollout are for evaluations
        for number in range(12):
            trainer.harvest(transcripts[number % 4])
        trainer.target_moved()
        assert trainer.ready == is_ready
    assert trainer.train(60.0, lambda: trainer.trainer.steps >= 3).micro_batches == 3
    found = trainer.evaluate()
    assert min(found.entries, found.candidate) > 0
    assert {id(item) for item in trainer.buffer.latest}.isdisjoint(id(item) for item in trainer.buffer.past)
    assert trainer.evaluate(lambda: True).interrupted
    for _ in range(2):
        trainer.target_moved()
    assert trainer.recompute
    assert trainer.recompute.tokens(past=True) == 0, "what is two steps old"
