"""The packed update against plain transformers, one sequence at a time, and against an enumerated policy gradient."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import widen
from tiny import random_batch, save_weights
from torch import Tensor
from transformers import AutoModelForCausalLM

from tlt.config import RolloutConfig, TrainConfig
from tlt.models.weights import sha256
from tlt.rl.batching import MicroBatch
from tlt.rl.groups import grpo
from tlt.rl.losses import LOSSES
from tlt.rl.measure import NotFinite
from tlt.rl.policy import Policy, learning_rate
from tlt.types import TrainBatch

CPU = torch.device("cpu")
VOCAB = 31
LONGEST = 12  # max_new_tokens
UNBOUNDED = 1e9  # max_grad_norm that never bites


def make_policy(
    folder: Path,
    dtype: torch.dtype = torch.float64,
    temperature: float = 1.0,
    reference: Path | None = None,
    **train: Any,
) -> Policy:
    settings = {"learning_rate": 1e-2, "max_grad_norm": UNBOUNDED, "micro_batch_tokens": 40, "loss": "grpo"} | train
    rollout = RolloutConfig(temperature=temperature, max_new_tokens=LONGEST)
    policy = Policy(folder, dtype, CPU, TrainConfig(**settings), rollout, reference)
    for model in (policy.model, policy.reference):
        if model and dtype == torch.float64:
            widen(model)  # else norms round by 1e-7, and not alike for losses that differ by a factor
    return policy


def plain_model(folder: Path) -> Any:
    return widen(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, local_files_only=True).eval())


def plain_logprobs(model: Any, prompt: tuple[int, ...], response: list[int]) -> Tensor:
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def plain_loss(model: Any, batch: TrainBatch, members: range, old: list[Tensor], loss: str = "grpo") -> Tensor:
    """Return the loss written out in full, with a clip of 0.2 on both sides."""
    total, tokens = torch.zeros((), dtype=torch.float64), sum(len(batch.response_ids[j]) for j in members)
    for i in members:
        logprobs = plain_logprobs(model, batch.prompt_ids[i], batch.response_ids[i])
        ratio, advantage = torch.exp(logprobs - old[i]), batch.advantages[i]
        if loss == "gspo":
            ratio = torch.exp((logprobs - old[i]).mean())
        terms = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if loss in ("grpo", "gspo"):
            total = total - terms.mean() / len(members)
        else:
            total = total - terms.sum() / (tokens if loss in ("ppo", "dapo") else LONGEST * len(members))
    return total


def all_plain_logprobs(model: Any, batch: TrainBatch) -> list[Tensor]:
    with torch.no_grad():
        return [plain_logprobs(model, p, r) for p, r in zip(batch.prompt_ids, batch.response_ids, strict=True)]


def gradient_of_update(policy: Policy, batch: TrainBatch) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def look(*_: Any) -> None:
        found.update({n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None})

    policy.optimizer.register_step_pre_hook(look)
    policy.update(batch, 0)
    return found


def gradient_of(model: Any, loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] - theirs[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize("budget", [1, 10_000])
@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_do_not_affect_updates(folder: Path, starting: Path, loss: str, budget: int) -> None:
    """It does not depend on the packing either, because a budget of 1 packs nothing."""
    settings = {"loss": loss, "kl_weight": 0.1, "importance_cap": 2.0}
    policies = [make_policy(folder, reference=starting, micro_batch_tokens=n, **settings) for n in (40, budget)]
    ours, theirs = (policy.update(random_batch(VOCAB), 0) for policy in policies)
    assert ours == pytest.approx(theirs, abs=1e-9)
    # Adam divides by the root of the squared gradient: where that is 0 up to rounding, its sign alone decides
    one, other = ({n: t for n, t in policy.optimizer_state().items() if n.endswith("exp_avg")} for policy in policies)
    assert_close(one, other, 1e-9)


def test_recomputed_layers_give_the_same_bits_and_apply_no_dropout(folder: Path) -> None:
    found, passes = [], []
    for again in (False, True):
        policy = make_policy(folder, gradient_checkpointing=again)
        training = {type(module).__name__ for module in policy.model.modules() if module.training}
        assert training == ({"Qwen3DecoderLayer"} if again else set())
        seen: list[int] = []
        policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        found.append(gradient_of_update(policy, random_batch(VOCAB)))
        passes.append(len(seen))
    assert passes[1] == 2 * passes[0] > 0
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_an_empty_batch_changes_nothing(folder: Path, tmp_path: Path) -> None:
    for loss, updates in (("grpo", 1), ("ppo", 2)):
        policy = make_policy(folder, loss=loss, updates_per_step=updates, kl_weight=0.1)
        before = sha256(policy.state_dict())
        metrics = policy.update(TrainBatch([], [], [], []), 0)
        assert metrics.pop("learning_rate") == 1e-2
        assert set(metrics.values()) == {0.0}
        assert sha256(policy.state_dict()) == before
    policy.save(tmp_path)
    make_policy(tmp_path / "policy").load_optimizer(tmp_path)


def spoil_gradients(policy: Policy, spoilt: Iterator[bool]) -> None:
    weight = policy.model.get_input_embeddings().weight
    weight.register_hook(lambda gradient: gradient * (math.nan if next(spoilt) else 1.0))


def test_a_gradient_that_is_not_finite_is_not_applied(folder: Path) -> None:
    batch, policy = random_batch(VOCAB), make_policy(folder, updates_per_step=2, micro_batch_tokens=999)
    spoil_gradients(policy, itertools.chain([True], itertools.repeat(False)))
    assert policy.update(batch, 0)["skipped"] == 0.5
    assert all(tensor.isfinite().all() for tensor in policy.state_dict().values())
    assert policy.update(random_batch(VOCAB, seed=1), 1)["skipped"] == 0.0


@pytest.mark.parametrize(
    ("spoilt", "steps", "named"),
    [
        ([True, False, True, True], [0, 1, 2, 3], "steps 3 and 4"),
        ([True] * 3, [0, 0, 1], "steps 1 and 2"),  # a step is repeated if another member is lost before it answers
    ],
)
def test_updates_without_a_finite_gradient_are_logged_and_then_end_the_run(
    folder: Path, caplog: pytest.LogCaptureFixture, spoilt: list[bool], steps: list[int], named: str
) -> None:
    batch, policy = random_batch(VOCAB), make_policy(folder, micro_batch_tokens=999)
    spoil_gradients(policy, iter(spoilt))
    for step, skips in zip(steps[:-1], spoilt, strict=False):
        assert policy.update(batch, step)["skipped"] == skips
    assert "no gradient of step 1 is finite" in caplog.text
    with pytest.raises(NotFinite, match=f"no gradient of {named} is finite"):
        policy.update(batch, steps[-1])


@pytest.mark.parametrize("what", ["the loss", "a log-prob of the policy"])
def test_a_loss_that_is_not_finite_is_an_error_before_it_changes_anything(folder: Path, what: str) -> None:
    batch, policy = random_batch(VOCAB), make_policy(folder)
    if what == "the loss":
        batch.advantages[0] = math.inf
    else:
        policy.state_dict()["model.norm.weight"][0] = math.nan
    digest = sha256(policy.state_dict())
    with pytest.raises(NotFinite, match=f"{what} is not finite in step 3"):
        policy.update(batch, 2)
    assert (sha256(policy.state_dict()), policy.version) == (digest, 0)


def test_a_weight_that_an_update_made_infinite_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    monkeypatch.setattr(policy.optimizer, "step", lambda: policy.state_dict()[name].view(-1)[0].fill_(math.inf))
    with pytest.raises(NotFinite, match=rf"{name} of the policy is not finite after step 1"):
        policy.update(random_batch(VOCAB), 0)
    assert policy.version is None


def test_one_nan_weight_of_a_model_folder_is_named_at_the_start(tmp_path: Path) -> None:
    save_weights(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][7, 0] = math.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotFinite, match=r"model\.embed_tokens\.weight of the policy is not finite in "):
        make_policy(tmp_path)


def test_gradient_norm_is_bounded(folder: Path) -> None:
    batch, bound = random_batch(VOCAB), 1e-3
    gradient = gradient_of_update(make_policy(folder, max_grad_norm=bound), batch)
    assert math.sqrt(sum(g.square().sum().item() for g in gradient.values())) == pytest.approx(bound, rel=1e-3)
    assert make_policy(folder).update(batch, 0)["grad_norm"] > bound


@pytest.mark.parametrize(
    ("steps", "members"), [({"epochs": 3}, [range(6)] * 3), ({"updates_per_step": 2}, [range(3), range(3, 6)])]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_epoch_uses_the_log_probs_from_before_the_first(
    folder: Path, loss: str, steps: dict[str, int], members: list[range]
) -> None:
    """The reference takes the same number of AdamW steps on the unpacked loss."""
    batch, model = random_batch(VOCAB), plain_model(folder)
    policy = make_policy(folder, loss=loss, clip_low=0.2, clip_high=0.2, learning_rate=1e-3, **steps)
    metrics = policy.update(batch, 0)
    old = all_plain_logprobs(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for some in members:
        with torch.no_grad():
            ratio_one = plain_loss(model, batch, some, all_plain_logprobs(model, batch), loss).item()
        value = plain_loss(model, batch, some, old, loss)
        losses.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    assert abs(losses[-1] - ratio_one) > 1e-4  # else the test could not tell old from new
    ours, theirs = dict(policy.model.named_parameters()), dict(model.named_parameters())
    share = [((ours[n] - theirs[n]).abs() < 1e-6).double().mean().item() for n in ours]
    assert min(share) > 0.99  # see above: Adam and gradients of 0


def test_carried_responses_have_the_ratio_to_the_policy_that_decoded_them(folder: Path) -> None:
    batch, model = random_batch(VOCAB), plain_model(folder)
    old = all_plain_logprobs(model, batch)
    for i in (0, 3):
        old[i] = old[i] - torch.linspace(-0.1, 0.15, len(old[i]), dtype=torch.float64)
        batch.old_logprobs[i] = old[i].tolist()
    expected = gradient_of(model, lambda m: plain_loss(m, batch, range(6), old))
    assert_close(gradient_of_update(make_policy(folder), batch), expected, 1e-9)
    batch.rollout_logprobs = [x.tolist() for x in old]
    for settings in ({}, {"epochs": 2}):
        assert make_policy(folder, **settings).update(batch, 0)["mismatch_p999"] < 1e-9


@pytest.mark.parametrize("loss", LOSSES)
def test_no_token_of_a_masked_response_is_trained_on(folder: Path, loss: str) -> None:
    batch, model = random_batch(VOCAB), plain_model(folder)
    batch.masked = {1, 4}
    old, rest = all_plain_logprobs(model, batch), [i for i in range(6) if i not in batch.masked]
    shares = shares_of(loss, [0 if i in batch.masked else len(r) for i, r in enumerate(batch.response_ids)])

    def policy_gradient(m: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in rest:
            ratio = torch.exp(plain_logprobs(m, batch.prompt_ids[i], batch.response_ids[i]) - old[i])
            total = total - shares[i] * batch.advantages[i] * ratio.sum()
        return total

    found = gradient_of_update(make_policy(folder, loss=loss), batch)
    assert_close(found, gradient_of(model, policy_gradient), 1e-9)
    tokens = sum(len(batch.response_ids[i]) for i in (*rest, 1))  # and of those left out one in eight is measured
    assert passed(make_policy(folder, loss=loss, kl_weight=0.1), batch) == tokens


def shares_of(loss: str, lengths: list[int]) -> list[float]:
    share = LOSSES[loss].share
    return [share.weight(length, LONGEST) / share.total(lengths) for length in lengths]


def with_replies(batch: TrainBatch) -> TrainBatch:
    """Return the batch with tokens of an environment in most responses. Two responses share their prompt."""
    generator = torch.Generator().manual_seed(0)
    batch.prompt_ids[1] = batch.prompt_ids[0] = (3, 1, 4, 1, 5, 9)
    for i in range(5):
        mask = (torch.rand(len(batch.response_ids[i]), generator=generator) < 0.6).tolist()
        batch.masks[i] = [*mask[:-1], True]
        batch.rollout_logprobs[i] = [-1.0] * sum(batch.masks[i])
    return batch


def sampled(batch: TrainBatch, tokens: list[Tensor]) -> list[Tensor]:
    return [one[torch.tensor(batch.mask(i))] for i, one in enumerate(tokens)]


@pytest.mark.parametrize("micro_batch_tokens", [16, 1000])
@pytest.mark.parametrize("loss", ["ppo", "grpo", "dr_grpo", "gspo"])
def test_tokens_of_an_environment_are_only_context(
    folder: Path, starting: Path, loss: str, micro_batch_tokens: int
) -> None:
    """Loss, divergence, entropy and lengths of two optimizer steps, against each sequence alone."""
    batch, model = with_replies(random_batch(VOCAB)), plain_model(folder)
    settings = {"loss": loss, "micro_batch_tokens": micro_batch_tokens, "clip_low": 0.2, "clip_high": 0.2}
    policy = make_policy(folder, kl_weight=0.5, reference=starting, **settings)
    old, reference = (sampled(batch, all_plain_logprobs(m, batch)) for m in (model, plain_model(starting)))
    for i in (0, 2):
        old[i] = old[i] - torch.linspace(-0.1, 0.15, len(old[i]), dtype=torch.float64)
        batch.old_logprobs[i] = old[i].tolist()
    lengths = [len(one) for one in old]
    assert lengths == [batch.num_sampled(i) for i in range(6)] != [len(r) for r in batch.response_ids]
    shares = shares_of(loss, lengths)

    def plain(m: Any) -> Tensor:
        total, pairs = torch.zeros((), dtype=torch.float64), zip(batch.prompt_ids, batch.response_ids, strict=True)
        for i, now in enumerate(sampled(batch, [plain_logprobs(m, p, r) for p, r in pairs])):
            ratio, advantage = torch.exp(now - old[i]), batch.advantages[i]
            if loss == "gspo":
                ratio = torch.exp((now - old[i]).mean()).expand_as(now)
            apart = reference[i] - now
            terms = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total + shares[i] * (terms + 0.5 * ratio * (torch.exp(apart) - apart - 1)).sum()
        return total

    assert_close(gradient_of_update(policy, batch), gradient_of(model, plain), 1e-8)
    entropy = torch.cat(sampled(batch, plain_entropies(model, batch))).mean().item()
    assert make_policy(folder, **settings).update(batch, 0)["entropy"] == pytest.approx(entropy, abs=1e-9)


def test_norms_are_not_decayed(folder: Path) -> None:
    policy = make_policy(folder, weight_decay=0.5)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    policy.update(without_spread(random_batch(VOCAB), range(6)), 0)  # gradients of 0: what changes has decayed
    changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "norm" not in name}


def test_the_betas_are_those_of_the_recipe(folder: Path) -> None:
    policy = make_policy(folder, adam_beta2=0.6)
    assert all(group["betas"] == (0.9, 0.6) for group in policy.optimizer.param_groups)
    assert make_policy(folder).optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_learning_rate_warms_up(folder: Path) -> None:
    policy = make_policy(folder, warmup_steps=4)
    for step, rate in enumerate([2.5e-3, 5e-3, 7.5e-3]):
        policy.update(random_batch(VOCAB), step)
        assert policy.optimizer.param_groups[0]["lr"] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        # of 1e-2, over 8 steps; without warm-up the fall begins at once, at 1
        ("linear", 0, [1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("linear", 4, [1 / 4, 2 / 4, 3 / 4, 1.0, 1.0, 3 / 4, 2 / 4, 1 / 4]),
        # (1 + cos(pi k / 4)) / 2
        ("cosine", 4, [1 / 4, 2 / 4, 3 / 4, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
        ("constant", 2, [1 / 2, *[1.0] * 7]),
    ],
)
def test_schedules_by_hand(schedule: Any, warmup: int, rates: list[float]) -> None:
    config = TrainConfig(learning_rate=1e-2, steps=8, schedule=schedule, warmup_steps=warmup)
    found = [learning_rate(config, step) / 1e-2 for step in range(8)]
    assert found == pytest.approx(rates, abs=1e-6)


def test_the_divergence_from_the_reference_is_reported(folder: Path, starting: Path) -> None:
    """Without another reference model it is that from the initial policy, which is zero at first."""
    batch = random_batch(VOCAB)
    now, reference = (all_plain_logprobs(plain_model(of), batch) for of in (folder, starting))
    apart = [(torch.exp(r - n) - (r - n) - 1).mean().item() for n, r in zip(now, reference, strict=True)]
    found = make_policy(folder, reference=starting, kl_weight=0.3).update(batch, 0)["kl"]
    assert found == pytest.approx(sum(apart) / len(apart))
    policy = make_policy(folder, kl_weight=0.5)
    assert policy.update(batch, 0)["kl"] == pytest.approx(0.0, abs=1e-12)
    assert policy.update(batch, 1)["kl"] > 1e-4


def test_the_divergence_may_be_subtracted_from_the_rewards(folder: Path, starting: Path) -> None:
    batch, model = random_batch(VOCAB), plain_model(folder)
    old, reference = (all_plain_logprobs(m, batch) for m in (model, plain_model(starting)))
    apart = [o - r for o, r in zip(old, reference, strict=True)]
    rewards = [1.0, 0.0, 0.5, 0.25, 2.0, 1.0]
    batch.rewards = [rewards[:4], rewards[4:]]
    penalized = [r - 0.3 * a.sum().item() for r, a in zip(rewards, apart, strict=True)]
    batch.advantages = [0.0] * 6  # of no use: they are made anew
    expected = replace(batch, advantages=[*grpo(penalized[:4], 1e-6), *grpo(penalized[4:], 1e-6)])
    gradient = gradient_of(model, lambda m: plain_loss(m, expected, range(6), old))
    settings = {"kl_weight": 0.3, "kl_in": "reward"}
    assert_close(gradient_of_update(make_policy(folder, reference=starting, **settings), batch), gradient, 1e-7)
    found = make_policy(folder, reference=starting, **settings).update(batch, 0)["kl"]
    assert found == pytest.approx(torch.cat(apart).mean().item())


def without_spread(batch: TrainBatch, members: Iterable[int]) -> TrainBatch:
    nothing = set(members)
    return replace(batch, advantages=[0.0 if i in nothing else a for i, a in enumerate(batch.advantages)])


def seen_before_passes(policy: Policy, look: Callable[[Any, MicroBatch], Any]) -> list[Any]:
    seen, before = [], policy.passes.logprobs

    def logprobs(model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        seen.append(look(model, micro))
        return before(model, micro)

    policy.passes.logprobs = logprobs  # type: ignore[method-assign]
    return seen


def passed(policy: Policy, batch: TrainBatch) -> int:
    """Update, and return the number of response tokens that went through the model."""
    seen = seen_before_passes(policy, lambda model, micro: len(micro.targets) if model is policy.model else 0)
    policy.update(batch, 0)
    return sum(seen)


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_without_gradient_count_in_the_loss_and_take_little_time(folder: Path, loss: str) -> None:
    batch, model = without_spread(random_batch(VOCAB), (0, 3, 4)), plain_model(folder)
    old = all_plain_logprobs(model, batch)
    expected = gradient_of(model, lambda m: plain_loss(m, batch, range(6), old, loss))
    assert_close(gradient_of_update(make_policy(folder, loss=loss), batch), expected, 1e-10)
    assert passed(make_policy(folder, loss=loss), batch) == sum(len(batch.response_ids[i]) for i in (0, 1, 2, 5)), (
        "of those without, the first stands for all"
    )
    everything = sum(len(response) for response in batch.response_ids)
    assert passed(make_policy(folder, loss=loss, kl_weight=0.1), batch) == everything, "KL has a gradient on all"


def test_a_step_without_gradients_equals_one_with_zero_gradients(folder: Path) -> None:
    """Adam's moments and the weight decay still apply."""
    batch, policy = random_batch(VOCAB), make_policy(folder, weight_decay=0.1)
    policy.update(batch, 0)
    twin = copy.deepcopy(policy.model)
    matrices, vectors = ([p for p in twin.parameters() if (p.dim() > 1) == kind] for kind in (True, False))
    decays = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(decays, lr=1e-2, betas=(0.9, 0.999))
    theirs.load_state_dict(copy.deepcopy(policy.optimizer.state_dict()))
    for parameter in twin.parameters():
        parameter.grad = torch.zeros_like(parameter)
    theirs.step()
    metrics = policy.update(without_spread(batch, range(6)), 1)
    assert metrics["loss"] == metrics["grad_norm"] == 0.0
    assert metrics["entropy"] > 0, "though nothing was learned from it"
    assert sha256(policy.state_dict()) == sha256(twin.state_dict())


def plain_entropies(model: Any, batch: TrainBatch, temperature: float = 1.0) -> list[Tensor]:
    pairs = zip(batch.prompt_ids, batch.response_ids, strict=True)
    with torch.no_grad():
        logits = [model(torch.tensor([[*p, *r]])).logits[0, len(p) - 1 : -1] / temperature for p, r in pairs]
    return [torch.distributions.Categorical(logits=one).entropy() for one in logits]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_mean_entropy_is_over_all_tokens_with_any_loss(folder: Path, loss: str) -> None:
    batch = random_batch(VOCAB)
    expected = torch.cat(plain_entropies(plain_model(folder), batch, 0.6)).mean().item()
    for untaught in ((), (2,)):
        found = make_policy(folder, temperature=0.6, loss=loss).update(without_spread(batch, untaught), 0)["entropy"]
        assert found == pytest.approx(expected, rel=1e-9), "a single one is measured itself"


@pytest.mark.parametrize("taught", [0, 2])
def test_one_in_eight_tokens_without_gradient_represents_all(folder: Path, taught: int) -> None:
    batch = without_spread(random_batch(VOCAB, responses=12), range(taught, 12))
    policy, gaps = make_policy(folder), [torch.full((len(r),), i + 0.5) for i, r in enumerate(batch.response_ids)]
    rows = policy.logprobs(batch)
    batch.rollout_logprobs = [[x + (-1) ** i * (i + 0.5) for x in row] for i, row in enumerate(rows)]

    def mean(values: list[Tensor]) -> Any:
        each = torch.cat(values[taught::8]).mean()
        everything = torch.cat([*values[:taught], *(each.expand(len(one)) for one in values[taught:])])
        return pytest.approx(everything.mean().item(), rel=1e-6)

    found = policy.update(batch, 0)
    assert found["entropy"] == mean(plain_entropies(plain_model(folder), batch))
    assert found["mismatch_mean"] == mean(gaps), "a step without a gradient shows it too"
    assert found["mismatch_p999"] == pytest.approx(gaps[taught + 8][0])


@pytest.mark.parametrize("updates_per_step", [1, 2])
def test_an_update_reports_its_progress(folder: Path, updates_per_step: int) -> None:
    policy = make_policy(folder, micro_batch_tokens=1, updates_per_step=updates_per_step)
    seen = seen_before_passes(policy, lambda model, micro: policy.updated)
    for step in range(2):
        seen.clear()
        policy.update(random_batch(VOCAB), step)
        assert seen[0] == 0.0
        assert seen == sorted(set(seen)), "it moves with every micro-batch"
        assert 0.5 < seen[-1] < 1.0
        assert policy.updated == 0.0, "it is over"


def test_optimizer_states_are_copies_and_an_empty_one_resets_the_moments(folder: Path) -> None:
    policy, batch = make_policy(folder), random_batch(VOCAB)
    start = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    assert policy.optimizer_state() == {}
    policy.update(batch, 0)
    first, state = sha256(policy.state_dict()), {n: t.clone() for n, t in policy.optimizer_state().items()}
    policy.load_optimizer_state(state)
    policy.update(batch, 1)
    assert all(tensor.item() == 1 for name, tensor in state.items() if name.endswith("/step"))
    policy.model.load_state_dict(start)
    policy.load_optimizer_state({})
    policy.update(batch, 0)
    assert sha256(policy.state_dict()) == first


def test_bfloat16_trains_float32_masters(folder: Path) -> None:
    policy = make_policy(folder, torch.bfloat16, learning_rate=1e-6)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    policy.update(random_batch(VOCAB), 0)
    assert all(tensor.dtype == torch.float32 for tensor in policy.state_dict().values())
    assert all(t.dtype == torch.float32 for t in policy.optimizer_state().values())
    one, other = before["model.embed_tokens.weight"], policy.state_dict()["model.embed_tokens.weight"]
    assert (one != other).double().mean() > 0.9
    assert (one.bfloat16() != other.bfloat16()).double().mean() < 0.1  # bfloat16 weights would have lost such a step
