"""Log-probs computed in chunks equal those of all tokens at once, and no [T, V] tensor of a micro-batch is ever
made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import random_batch, save_weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tlt.config import RolloutConfig, TrainConfig
from tlt.rl.batching import pack
from tlt.rl.logprobs import LogProbs, TransformersForward, in_chunks, token_logprobs
from tlt.rl.parallel import Alone
from tlt.rl.policy import Policy
from tlt.types import TrainBatch

CPU = torch.device("cpu")
T, D, V = 11, 5, 23


def random_head() -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden [T, D], head [V, D] and targets [T]."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, D, generator=generator, dtype=torch.float64).requires_grad_() for n in (T, V))
    return hidden, head, torch.randint(V, (T,), generator=generator)


def distribution_under(head: Tensor, temperature: float = 1.0) -> Any:
    def distribution(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(hidden @ head.T / temperature, -1)
        return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1).detach()

    return distribution


@pytest.mark.parametrize("tokens", [1, 3, T - 1, 1000])
def test_values_and_gradients_of_chunks_are_those_of_all(tokens: int) -> None:
    hidden, head, targets = random_head()
    pull = torch.linspace(-1, 2, T, dtype=torch.float64)
    found = []
    for size in (tokens, T):
        logprobs, entropy = in_chunks(distribution_under(head), hidden, targets, size)
        found.append((logprobs, entropy, *torch.autograd.grad((logprobs * pull).sum(), (hidden, head))))
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_values_and_gradients_are_those_of_autograd(temperature: float) -> None:
    hidden, head, targets = random_head()
    pull = torch.linspace(-1, 2, T, dtype=torch.float64)
    theirs = distribution_under(head, temperature)(hidden, targets)
    ours = LogProbs.apply(hidden @ head.T, targets, temperature)
    gradients = [torch.autograd.grad((logprobs * pull).sum(), (hidden, head)) for logprobs, _ in (ours, theirs)]
    for found, expected in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def make_policy(folder: Path, dtype: torch.dtype = torch.float32, **train: Any) -> Policy:
    return Policy(folder, dtype, CPU, TrainConfig(learning_rate=1e-3, **train), RolloutConfig())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [1e-37, 1e-46, 5e-324])
def test_the_lowest_temperatures_have_finite_log_probs(tmp_path: Path, dtype: torch.dtype, temperature: float) -> None:
    """All probability is on the best token, as in the engine. There is nothing to learn then, and no value is NaN."""
    policy, tokens = make_policy(save_weights(tmp_path, vocab_size=17), dtype), torch.arange(5)
    model = policy.model
    best = model(tokens[None]).logits[0].argmax(-1)
    micro = pack([[0]], [[0]], [tokens[1:].tolist()], CPU)._replace(targets=best[:4])
    logprobs, entropy = token_logprobs(policy.passes.forwards[id(model)], micro, temperature)
    logprobs.sum().backward()
    assert logprobs.tolist() == entropy.tolist() == [0.0] * 4
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_chunks_under_autocast_are_recomputed_under_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of float32 logits would differ from the others by far more than the order of sums."""
    folder, batch = save_weights(tmp_path, 30_000, scale=0.1), random_batch(30_000, responses=20)
    whole, chunked = (make_policy(folder, torch.bfloat16) for _ in range(2))
    tokens, seen = sum(map(len, batch.response_ids)), []
    chunked.passes.forwards[id(chunked.model)] = TransformersForward(chunked.model, autocast=True)
    whole.passes.forwards[id(whole.model)] = TransformersForward(whole.model, autocast=True)
    chunked.model.lm_head.register_forward_hook(
        lambda module, given, logits: seen.append((logits.dtype, logits.shape[1]))
    )
    theirs = whole.update(batch, 0)
    monkeypatch.setattr("tlt.rl.logprobs.LOGITS_MB", 1)
    ours = chunked.update(batch, 0)
    assert {dtype for dtype, _ in seen} == {torch.bfloat16}
    assert max(size for _, size in seen) == 8 < tokens, "1 MiB / (30,000 * 4); under autocast log-probs are float32"
    assert sum(size for _, size in seen) == 2 * tokens
    assert ours == pytest.approx(theirs, rel=1e-3)
    name = "model.embed_tokens.weight/exp_avg"
    one, other = chunked.optimizer_state()[name], whole.optimizer_state()[name]
    assert (one - other).norm() < 1e-2 * other.norm()


def test_bfloat16_logits_are_widened_before_the_softmax(tmp_path: Path) -> None:
    """Log-probs in bfloat16 have an error of 1 % at best."""
    policy, batch, seen = make_policy(save_weights(tmp_path, 31), torch.bfloat16), random_batch(31), []
    policy.model.lm_head.register_forward_hook(lambda module, given, logits: seen.append(logits[0].detach().double()))
    (micro,) = policy.passes.micro_batches([policy.model], batch, range(6), Alone())
    logprobs, entropy = token_logprobs(TransformersForward(policy.model, autocast=True), micro, 0.6)
    distribution = torch.distributions.Categorical(logits=seen[0] / 0.6)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    assert torch.allclose(logprobs.double(), distribution.log_prob(micro.targets), rtol=0, atol=1e-5)
    assert torch.allclose(entropy.double(), distribution.entropy(), rtol=0, atol=1e-5)


class Largest(TorchDispatchMode):
    """Mode that records the largest tensor that any operation returns, forward or backward."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return out


def test_no_tensor_of_all_tokens_by_the_vocabulary_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, tokens = 20_000, 96  # more than the 32 of the model's own width, whose weights are [V, 32]
    folder = save_weights(tmp_path, vocab, layers=1, scale=0.1)
    batch = TrainBatch([(1, 2)] * 3, [[7] * 32] * 3, [1.0, -1.0, 0.5], [[-1.0] * 32] * 3)
    largest = {}
    for logits_mb in (1, 1024):
        monkeypatch.setattr("tlt.rl.logprobs.LOGITS_MB", logits_mb)
        policy = make_policy(folder)
        with Largest() as seen:
            policy.update(batch, 0)
        largest[logits_mb] = seen.elements
    assert largest[1] == 32 * vocab
    assert largest[1024] == tokens * vocab
