"""Training data that the policy recomputes equal those that our own engine saves while it decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config

from tlt.build import open_workplace
from tlt.draft.eagle import EagleLayer, eagle_options
from tlt.engine.engine import Engine
from tlt.rl.choose import make_policy
from tlt.rl.teacher import PolicyTeacher, spot_trainer
from tlt.spot.buffer import Harvest, Transcript
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


def decoded(config: Any, target: Any, layout: Any) -> tuple[list[Harvest], list[Transcript]]:
    """Return the training data of our engine, and the same responses."""
    found: list[Harvest] = []
    engine = Engine(target, config.engine, layout=layout, on_harvest=found.append)
    lengths = (3, WINDOW, 40, 2 * WINDOW + 1, 2 * WINDOW - 6)  # the last one fills whole windows
    asked = [
        Request(Prompt(i, "", tuple(range(1, 4 + i))), 0, 0, i, SamplingParams(0.7, max_new_tokens=n))
        for i, n in enumerate(lengths)
    ]
    responses = list(engine.generate(asked))
    prompts = [response.request.prompt for response in responses]
    return found, [
        Transcript(len(prompt.token_ids), (*prompt.token_ids, *response.token_ids))
        for prompt, response in zip(prompts, responses, strict=True)
    ]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_recomputed_data_equal_those_of_our_engine(kind: Any, world: Any) -> None:
    config, target, policy = world
    layout = eagle_options(target.options, kind, WINDOW).layout
    harvested, transcripts = decoded(config, target, layout)
    recompute = Recompute(PolicyTeacher(policy, target), layout, 10_000)
    for transcript in transcripts:
        recompute.add(transcript)
    recompute.rollout_ended()
    mine: list[Harvest] = []
    while found := recompute.take(False, never):
        mine += found

    def key(item: Harvest) -> tuple[int, list[int]]:
        return item.start, item.tokens.tolist()

    assert sorted(map(key, mine)) == sorted(map(key, harvested))
    for ours, theirs in zip(sorted(mine, key=key), sorted(harvested, key=key), strict=True):
        assert ours[:3] == theirs[:3]
        assert torch.equal(ours.tokens, theirs.tokens)
        torch.testing.assert_close(ours.features, theirs.features, atol=1e-5, rtol=1e-5)  # transformers' float32 parts


def test_entries_of_earlier_turns_are_left_out(world: Any) -> None:
    """Hidden states depend on the whole context, though."""
    _, target, policy = world
    layout = eagle_options(target.options, "eagle1", WINDOW).layout
    recompute = Recompute(PolicyTeacher(policy, target), layout, 10_000)
    tokens = tuple(range(1, 3 * WINDOW))
    (*_, whole) = recompute._harvest(Transcript(2, tokens), never)
    for first in (whole.end - WINDOW - 3, whole.end - 3):
        items = recompute._harvest(Transcript(2, tokens, first), never)
        entries = {entry for item in items for entry in range(item.start, item.end)}
        assert entries == set(range(first, whole.end))
    assert torch.equal(items[-1].features, whole.features[-3:])


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
    _, target, policy = world
    layout = eagle_options(target.options, "eagle1", WINDOW).layout
    recompute = Recompute(PolicyTeacher(policy, target), layout, 10_000)
    recompute.add(Transcript(2, (1, 2, 3, 4)))
    assert recompute.tokens(past=False) == 0, "the rollout is not over"
    recompute.rollout_ended()
    asked = iter([False, True])
    with pytest.raises(Interrupted):
        recompute.take(False, lambda: next(asked))
    assert recompute.tokens(past=False) == 4
    assert [item.start for item in recompute.take(False, never)] == [0]
    assert recompute.tokens(past=False) == 0
    assert not policy.model.base_model.layers[0]._forward_pre_hooks


def test_the_longest_responses_of_a_step_come_first_and_the_oldest_are_dropped(world: Any) -> None:
    _, target, policy = world
    layout = eagle_options(target.options, "eagle1", WINDOW).layout
    recompute = Recompute(PolicyTeacher(policy, target), layout, 30)
    for tokens in ((1,) * 9, (2,) * 6, (4,) * 8):
        recompute.add(Transcript(2, tokens))
    recompute.rollout_ended()
    recompute.add(Transcript(2, (3,) * 10))
    recompute.rollout_ended()
    recompute.add(Transcript(2, (5,) * 7))
    assert (recompute.tokens(past=True), recompute.tokens(past=False)) == (14, 10), "the oldest is gone"
    assert recompute.take(True, never)[0].tokens.tolist() == [4] * 7
    assert recompute.take(False, never)[0].tokens.tolist() == [3] * 9
    assert (recompute.tokens(past=True), recompute.tokens(past=False)) == (6, 0)
    recompute.rollout_ended()
    assert (recompute.tokens(past=True), recompute.tokens(past=False)) == (0, 7), "what is older is too old"


def test_data_have_the_teachers_version_and_only_finite_features(world: Any) -> None:
    _, target, policy = world
    layout = eagle_options(target.options, "eagle1", WINDOW).layout
    transcript = Transcript(2, (1, 2, 3, 4))
    target.load(policy.state_dict(), 3)
    recompute = Recompute(PolicyTeacher(policy, target), layout, 10_000)
    assert [item.target_version for item in recompute._harvest(transcript, never)] == [3]
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[2] = torch.inf
    assert recompute._harvest(transcript, never) == []


def test_a_drafter_is_trained_and_evaluated_on_the_data(world: Any) -> None:
    config, target, policy = world

    class Elsewhere:
        options, dtype, device, version = target.options, target.dtype, target.device, 0

    layer = EagleLayer(eagle_options(target.options, "eagle1", WINDOW))
    trainer = spot_trainer(layer, Elsewhere(), policy, config)  # pyright: ignore
    _, transcripts = decoded(config, target, layer.options.layout)

    def step() -> None:
        for number in range(12):
            trainer.harvest(transcripts[number % 4])

    step()
    trainer.target_moved()
    assert not trainer.ready, "that of the last rollout is to judge by"
    step()
    trainer.target_moved()
    assert trainer.ready
    assert trainer.train(60.0, lambda: trainer.trainer.steps >= 3).micro_batches == 3
    found = trainer.evaluate()
    assert found.entries > 0
    assert found.candidate > 0
    assert {id(item) for item in trainer.buffer.latest}.isdisjoint(id(item) for item in trainer.buffer.past)
    assert trainer.evaluate(lambda: True).interrupted
    for _ in range(2):
        trainer.target_moved()
    assert trainer.recompute
    assert trainer.recompute.tokens(past=True) == 0, "what is two steps old"
