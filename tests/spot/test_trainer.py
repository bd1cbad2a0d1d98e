"""Training of the learned drafter: the unrolled pass against sequential drafting, the losses against hand-worked
numbers, the acceptance rate, and the initial weights."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from twin import Model, make_layer, make_model

from tlt.config import DrafterTrainConfig
from tlt.draft.eagle import Kind
from tlt.draft.features import Harvest
from tlt.spot.trainer import DrafterTrainer, Moments
from tlt.spot.unroll import bundles, pack, packs, unroll

CPU = torch.device("cpu")
CLASSES: tuple[Kind, ...] = ("eagle3", "eagle1")


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


def harvest(kind: Kind, start: int, length: int, prompt_length: int = 0, seed: int = 0) -> Harvest:
    generator = torch.Generator().manual_seed(1000 * start + 10 * length + seed)
    features = torch.randn(length, 64 if kind == "eagle3" else 16, dtype=torch.float64, generator=generator)
    return Harvest(0, start, prompt_length, torch.randint(11, (length,), generator=generator), features)


@pytest.mark.parametrize("window", [3, 64])
@pytest.mark.parametrize("kind", CLASSES)
def test_packs_draft_like_the_twin(model: Model, monkeypatch: pytest.MonkeyPatch, kind: Kind, window: int) -> None:
    """Several sequences in a pack, of different lengths, some from the middle of a text, with attention blocks of any
    size. The twin drafts the true tokens, one after the other."""
    layer, steps = make_layer(model.decoder, kind, window), 5
    items = [harvest(kind, start, length) for start, length in ((0, 17), (300, 9), (5, 1), (491, 21), (0, 4))]
    made, twin, wanted = DrafterTrainer(layer, model.decoder, DrafterTrainConfig()), model.twin(layer), []
    for item in items:
        known, tokens = twin.true_entries(item.features, item.tokens.tolist(), item.start), item.tokens.tolist()
        wanted += [twin.chain(known[: at + 1], tokens[at + 1 : at + steps]) for at in range(len(tokens))]
    for queries in (1, 7, 128):
        monkeypatch.setattr("tlt.spot.unroll._QUERIES", queries)
        with torch.no_grad():
            columns = list(unroll(layer, model.decoder.embedding, made.cos_sin, pack(items, CPU), steps))
        for entry, outputs in enumerate(wanted):
            for column, output in zip(columns, outputs, strict=False):  # fewer at the end of an item
                found, expected = model.decoder.head @ column[entry], twin.logits(output)
                assert torch.allclose(found.log_softmax(0), expected.log_softmax(0), rtol=1e-8, atol=1e-8), entry


# -- what is counted ---------------------------------------------------------------------------------------------------


def mixed_items() -> list[Harvest]:
    """Return a prompt and its response, the middle of a response, one that starts in the prompt, and a prompt alone."""
    return [harvest("eagle3", *of) for of in ((0, 13, 6), (40, 7, 6), (2, 9, 6), (0, 3, 9))]


def make_trainer(model: Model, **config: Any) -> DrafterTrainer:
    return DrafterTrainer(make_layer(model.decoder, "eagle3", 8), model.decoder, DrafterTrainConfig(**config))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_only_the_tokens_of_a_batch_are_converted_from_the_embedding(model: Model, kind: str) -> None:
    """The whole embedding in float32 would need gigabytes for a large vocabulary."""
    layer, batch, low = make_layer(model.decoder, kind, 8), pack(mixed_items(), CPU), model.decoder.embedding.bfloat16()
    cos_sin = make_trainer(model).cos_sin
    if kind == "eagle1":
        batch = batch._replace(features=batch.features[:, -16:])
    found, wanted = (list(unroll(layer, one, cos_sin, batch, 2)) for one in (low, low.double()))
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_the_loss_is_the_mean_over_draft_tokens(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Column t of entry i predicts token i + t + 2. Its teacher is the head on the target's last state of entry i + t +
    1. Later columns count at every fourth entry of the pack, another one in each step. Sixteen times the smooth L1
    distance between the input of the head and that state is added."""
    made, items, decay, head = make_trainer(model, unroll=4), mixed_items(), 0.4, model.decoder.head
    made.reach, made.steps = 4.0, 6
    columns = list(unroll(made.layer, model.decoder.embedding, made.cos_sin, pack(items, CPU), 4))
    monkeypatch.setattr("tlt.spot.unroll._QUERIES", 2)  # some blocks have no entry that counts
    loss, overlaps = made.loss(pack(items, CPU))
    loss.backward()
    assert all(parameter.grad is not None for parameter in made.layer.parameters()), "every tensor learns"
    total, weight = 0.0, 0.0
    places = [(item, i) for item in items for i in range(len(item.tokens))]
    for t, column in enumerate(columns):
        each, distances, seen = [], [], []
        for entry, (item, i) in enumerate(places):
            teacher = i + t + 1
            is_drafted = teacher < len(item.tokens) and item.start + teacher + 1 >= item.prompt_length
            if not is_drafted or (t > 0 and entry % 4 != 2):
                continue
            state = item.features[teacher, -16:]
            p, log_q = torch.softmax(head @ state, -1), torch.log_softmax(head @ column[entry], -1)
            each.append(-(p @ log_q).item())
            seen.append(torch.minimum(p, log_q.exp()).sum().item())
            distances += [d * d / 2 if d < 1 else d - 0.5 for d in (column[entry] - state).abs().tolist()]
        total += decay**t * (sum(each) / len(each) + 16 * sum(distances) / len(distances))
        weight += decay**t
        assert overlaps[t] == pytest.approx(sum(seen) / len(seen), abs=1e-12)
    assert loss.item() == pytest.approx(total / weight, abs=1e-12)


def test_a_pack_without_draft_tokens_changes_nothing(model: Model) -> None:
    made = make_trainer(model, unroll=3)
    before = made.layer.fc.weight.clone()
    for item in (harvest("eagle3", 0, 1), harvest("eagle3", 0, 4, prompt_length=100)):
        assert all(math.isnan(overlap) for overlap in made.step(pack([item], CPU)))
    assert torch.equal(made.layer.fc.weight, before)


def test_an_evaluation_in_chunks_equals_the_whole_evaluation(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, batch = [make_layer(model.decoder, "eagle3", 8, seed) for seed in (0, 1)], pack(mixed_items(), CPU)
    made = DrafterTrainer(layers[0], model.decoder, DrafterTrainConfig(unroll=3))
    alone = [made.judge([layer], batch) for layer in layers]
    monkeypatch.setattr("tlt.spot.trainer.LOGITS", 3 * 11)
    together, entries = made.judge(layers, batch)
    assert [([found], entries) for found in together] == [
        ([pytest.approx(found, rel=1e-9)], count) for [found], count in alone
    ]


def test_distributions_are_compared_on_the_draft_vocabulary(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.draft.eagle._DRAFT_VOCABULARY", 5)
    items, made, mass = mixed_items(), make_trainer(model, unroll=2), torch.zeros(11, dtype=torch.float64)
    made.prepare(items, from_scratch=False)
    for item in items:
        for i in range(len(item.tokens)):
            if item.start + i + 2 >= item.prompt_length:
                mass += torch.softmax(model.decoder.head @ item.features[i, -16:], -1)
    likeliest = sorted(sorted(range(11), key=lambda token: -float(mass[token]))[:5])
    assert made.layer.vocabulary is not None
    assert made.layer.vocabulary.tolist() == likeliest

    def results() -> tuple[float, list[float], object]:
        loss, overlaps = made.loss(pack(items, CPU))
        return loss.item(), overlaps, made.judge([made.layer], pack(items, CPU))

    found, head = results(), made.target.head
    made.layer.vocabulary = None
    whole = results()
    monkeypatch.setattr(model.decoder, "head", head[likeliest])
    made.heads = {0: head[likeliest]}
    assert found == results() != whole


def test_the_acceptance_rate_of_a_sample_is_that_of_the_loss(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all packs, in chunks, for every draft token of a chain, at any state of the training."""
    made, batch = make_trainer(model, unroll=4), pack(mixed_items(), CPU)
    made.reach = 4.0
    _, overlaps = made.loss(batch)
    made.reach = 0.0
    monkeypatch.setattr("tlt.spot.unroll.LOGITS", 3 * 11)
    for batches in ([batch], [batch, batch]):
        assert made.acceptance(batches) == pytest.approx(overlaps, abs=1e-12)
    assert made.acceptance([pack([harvest("eagle3", 0, 3)], CPU)])[2:] == [0.0, 0.0], "no chain is so long"


def test_a_pack_has_one_target_version_and_each_epoch_another_order() -> None:
    drawn = [(0, 5), (0, 5), (1, 5), (1, 7), (1, 5), (1, 20), (2, 5)]  # an item that fits nowhere is alone
    items = [harvest("eagle3", 0, length)._replace(target_version=version) for version, length in drawn]
    found = [[item.target_version for item in held] for held in bundles(items, 12)]
    assert found == [[0, 0], [1, 1], [1], [1], [2]]
    items, rng = [harvest("eagle3", 0, 5, seed=i) for i in range(20)], random.Random(0)
    one, two = ([b.tokens.tolist() for b in packs(items, 10, CPU, rng)] for _ in range(2))
    assert one != two
    everything = sorted(token for item in items for token in item.tokens.tolist())
    assert all(sorted(token for part in epoch for token in part) == everything for epoch in (one, two))


@pytest.mark.parametrize("kind", CLASSES)
def test_fc_learns_like_a_layer_with_white_inputs(model: Model, kind: Kind) -> None:
    """The twin holds W with fc = W whitening, and Adam steps W by autograd's gradient. After every step its folded
    weights equal those of the layer, which are published."""
    items = [harvest(kind, 3 * n, 20, seed=n) for n in range(6)]
    made = DrafterTrainer(make_layer(model.decoder, kind, 8), model.decoder, DrafterTrainConfig(unroll=2))
    twin = DrafterTrainer(make_layer(model.decoder, kind, 8), model.decoder, DrafterTrainConfig(unroll=2))
    made.prepare(items, from_scratch=False)
    white = (twin.layer.fc.weight.detach() @ torch.linalg.inv(made.whitening)).requires_grad_()
    others = [parameter for name, parameter in twin.layer.named_parameters() if name != "fc.weight"]
    adam = torch.optim.AdamW([white, *others], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    batch = pack(items, CPU)
    for step in range(4):
        made.reach = twin.reach = 2.0
        twin.steps = step
        del twin.layer.fc.weight
        twin.layer.fc.weight = white @ made.whitening  # type: ignore[assignment]
        adam.zero_grad()
        twin.loss(batch)[0].backward()
        torch.nn.utils.clip_grad_norm_([white, *others], 0.5)
        adam.param_groups[0]["lr"] = 1e-3 * (step + 1) / 20
        adam.step()
        made.step(batch)
        assert torch.allclose(made.layer.fc.weight, white @ made.whitening, rtol=0, atol=1e-12)
        for name, parameter in twin.layer.named_parameters():
            assert torch.allclose(made.layer.get_parameter(name), parameter, rtol=0, atol=1e-12), name


def test_a_gradient_that_is_not_finite_is_skipped(model: Model) -> None:
    made = make_trainer(model, unroll=2)
    layer, before = made.layer, made.layer.fc.weight.clone()
    spoilt = layer.q_proj.weight.register_hook(lambda gradient: gradient * math.inf)
    assert all(math.isfinite(overlap) for overlap in made.step(pack(mixed_items(), CPU)))
    assert made.steps == 0
    assert torch.equal(layer.fc.weight, before)
    spoilt.remove()
    made.step(pack(mixed_items(), CPU))
    assert made.steps == 1
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize(("reach", "columns"), [(0.0, 1), (0.3, 2), (1.95, 3), (2.2, 4), (3.9, 5), (5.0, 5)])
def test_training_goes_one_draft_token_beyond_the_accepted_ones(model: Model, reach: float, columns: int) -> None:
    made, other = make_trainer(model, unroll=5), make_trainer(model, unroll=5)
    made.reach = reach
    overlaps = made.step(pack(mixed_items(), CPU))
    assert len(overlaps) == columns
    right = sum(math.prod(overlaps[: t + 1]) for t in range(columns))
    assert made.reach == pytest.approx(reach + 0.1 * (right - reach))
    other.load_state(made.state())
    assert other.reach == made.reach


def test_a_head_of_an_older_version_does_not_change_when_the_target_loads_weights() -> None:
    """The distribution to learn is that of the version that computed the hidden states."""
    model, other = make_model(seed=0), make_model(seed=1)
    trainer = make_trainer(model)
    trainer.target_moved([])
    before = model.decoder.head.clone()
    model.decoder.load(other.hf.state_dict(), version=1)
    trainer.target_moved([0])
    assert torch.equal(trainer.heads[0], before)
    assert torch.equal(trainer.heads[1], other.decoder.head)
    model.decoder.load(model.hf.state_dict(), version=2)
    assert torch.equal(trainer.heads[1], other.decoder.head)


def harvests(kind: Kind) -> list[Harvest]:
    """Return hidden states that follow from earlier ones with some noise."""
    generator = torch.Generator().manual_seed(3)
    items = []
    for start, n in enumerate((40, 1, 90, 25, 60)):
        features = torch.randn(n, 64 if kind == "eagle3" else 16, dtype=torch.float64, generator=generator).cumsum(0)
        items.append(Harvest(0, start, 0, torch.randint(11, (n,), generator=generator), features))
    return items


def rows(model: Model, kind: Kind, items: list[Harvest]) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs of fc at each entry, and the hidden state of the next one (NaN at the end of an item)."""
    embedding, x, y = model.decoder.embedding.numpy(), [], []
    for item in items:
        for i, token in enumerate(item.tokens.tolist()):
            features = item.features[i].numpy()
            x.append(features[:48] if kind == "eagle3" else np.concatenate([embedding[token], features]))
            last = i + 1 == len(item.tokens)
            y.append(np.full(16, math.nan) if last else item.features[i + 1, -16:].numpy())
    return np.array(x), np.array(y)


def test_a_random_drafter_begins_with_the_best_linear_map(model: Model) -> None:
    """NumPy's least squares, with the ridge as 32 more rows. The other parts of the layer add nothing in any column."""
    items = harvests("eagle1")
    made = DrafterTrainer(make_layer(model.decoder, "eagle1", 8), model.decoder, DrafterTrainConfig())
    made.prepare(items, from_scratch=True)
    x, y = rows(model, "eagle1", items)
    known = ~np.isnan(y[:, 0])
    ridge = math.sqrt(1e-3 * (x**2).sum() / 32)
    # what has no next entry is among the inputs, and adds to the ridge
    more = np.concatenate([x[known], x[~known], ridge * np.eye(32)])
    wanted = np.concatenate([y[known], np.zeros((len(more) - known.sum(), 16))])
    fc = np.linalg.lstsq(more, wanted, rcond=None)[0].T
    assert np.allclose(made.layer.fc.weight.detach().numpy(), fc, rtol=0, atol=1e-9)
    with torch.no_grad():
        first, second = unroll(made.layer, model.decoder.embedding, made.cos_sin, pack(items, CPU), 2)
    assert np.allclose(first.numpy(), x @ fc.T, rtol=0, atol=1e-9)
    embedded = model.decoder.embedding[items[0].tokens[1:]].numpy()
    chain = np.concatenate([embedded, first[: len(embedded)].numpy()], axis=1) @ fc.T
    assert np.allclose(second[: len(embedded)].numpy(), chain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_white_inputs_have_unit_moments_except_for_the_floor(model: Model, kind: Kind) -> None:
    items = harvests(kind)
    layer = make_layer(model.decoder, kind, 8)
    whitening = Moments(layer, model.decoder.embedding, torch.float64, items).whitening().numpy()
    x, _ = rows(model, kind, items)
    moments = x.T @ x / len(x)
    raised = moments + 0.1 * np.trace(moments) / len(moments) * np.eye(len(moments))
    assert np.allclose(whitening @ raised @ whitening, np.eye(len(moments)), rtol=0, atol=1e-9)
    assert np.allclose(whitening, whitening.T, rtol=0, atol=1e-12)


def test_a_drafter_that_was_trained_keeps_its_weights(model: Model) -> None:
    for kind, from_scratch in (("eagle1", False), ("eagle3", True)):
        layer = make_layer(model.decoder, kind, 8)
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        made = DrafterTrainer(layer, model.decoder, DrafterTrainConfig())
        made.prepare(harvests(kind), from_scratch)
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
        assert not torch.equal(made.whitening, torch.eye(len(made.whitening)))
