"""Training of the learned drafter on hidden states of rollouts, one short optimizer step at a time.

The drafter learns the target's full distribution. This distribution is recomputed from the target's last hidden state,
with the output head of the same version of the target.

Two matrices are estimated from a sample of the training data (`Moments`). One whitens the inputs of the layer `fc`. The
other is weights of `fc` that predict the next hidden state best.

Shapes: N entries of an item, T entries (token positions) of a pack, D hidden, I inputs of fc, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.config import DrafterTrainConfig
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import Harvest
from tlt.models.decoder import Decoder
from tlt.spot.unroll import LOGITS, Pack, draft_loss, draft_overlap, logits, packs, product_dtype, unroll

_RIDGE = 1e-3  # fraction of the mean second moment that is added to the diagonal in the regression
_FLOOR = 0.1  # the same for the whitening; larger, because other prompts have directions that the sample lacks
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FC = "fc.weight"
_EVERY = 4  # one in this many entries is the root of a chain that is trained beyond its first draft token
_FEATURE_WEIGHT = 16.0  # weight of the distance to the target's hidden states in the loss (EAGLE: 10)
_COUNTED = 2048  # number of entries from which the draft vocabulary is chosen
_DECAY = 0.4  # weight of each draft token of a chain in the loss, relative to the one before
_WARMUP_STEPS = 20  # steps over which the learning rate rises linearly
_MAX_GRAD_NORM = 0.5
_LATELY = 10  # number of steps that the running mean `reach` covers


class Moments:
    """Second moments of a sample, summed over its entries in float64: `inputs` [I, I] of fc's inputs with themselves,
    and `following` [D, I] of the next hidden states with the inputs.

    `embedding` [V, D] is the target's embedding. Products are computed in `dtype`.
    """

    def __init__(self, layer: EagleLayer, embedding: Tensor, dtype: torch.dtype, sample: Iterable[Harvest]) -> None:
        size, out = layer.fc.in_features, layer.fc.out_features
        self.inputs = torch.zeros(size, size, dtype=torch.float64, device=embedding.device)
        self.following = torch.zeros(out, size, dtype=torch.float64, device=embedding.device)
        self.entries = 0
        for item in sample:
            x = fc_inputs(layer, embedding, dtype, item)
            self.inputs += x.T @ x
            self.following += item.features[1:, -out:].to(x).T @ x[:-1]
            self.entries += len(x)

    def next_hidden(self) -> Tensor:
        """Return the matrix [D, I] from inputs to the next entry's hidden state, by ridge regression."""
        return torch.linalg.solve(self._raised(_RIDGE), self.following, left=False)

    def whitening(self) -> Tensor:
        """Return a symmetric matrix [I, I]. Inputs [N, I] times this matrix have second moments of about 1."""
        values, vectors = torch.linalg.eigh(self._raised(_FLOOR) / self.entries)
        return (vectors * values.rsqrt()) @ vectors.T

    def _raised(self, share: float) -> Tensor:
        mean = self.inputs.diagonal().mean()
        return self.inputs + share * mean * torch.eye(len(self.inputs)).to(self.inputs)


def fc_inputs(layer: EagleLayer, embedding: Tensor, dtype: torch.dtype, item: Harvest) -> Tensor:
    """Return the inputs [N, I] of the drafter's layer `fc` at each entry of an item of training data, in `dtype`."""
    features = item.features.to(embedding.device, dtype)
    if layer.options.kind == "eagle3":
        return features[:, : layer.fc.in_features]
    embedded = F.embedding(item.tokens.to(embedding.device), embedding).to(dtype)
    return torch.cat([embedded, features[:, -layer.options.hidden_size :]], dim=-1)


def expected_rounds(right: Tensor, segments: Tensor) -> tuple[float, float]:
    """Return the expected number of rounds that decode n entries (token positions), and the expected number of these
    rounds whose first draft token is accepted.

    right: [n, K] for the chain that begins at each entry, the probability that draft token k is accepted if all draft
    tokens before it are. segments: [n] id of the sequence of each entry; entries of a sequence are consecutive. A round
    begins at the first entry of each sequence. The last round of a sequence counts by the fraction of its tokens that
    are among these entries.
    """
    ids = segments.tolist()
    edges = [0, *(i for i, (a, b) in enumerate(pairwise(ids), start=1) if a != b), len(ids)]
    reached = torch.nn.functional.pad(right.double().cumprod(1), (1, 1))
    reached[:, 0] = 1.0
    exactly = (reached[:, :-1] - reached[:, 1:]).tolist()  # [n, K + 1] probability of exactly k accepted draft tokens
    firsts = right[:, 0].tolist()
    found = [_of_sequence(exactly[low:high], firsts[low:high]) for low, high in pairwise(edges) if high > low]
    return sum(rounds for rounds, _ in found), sum(first for _, first in found)


def _of_sequence(exactly: Sequence[Sequence[float]], firsts: Sequence[float]) -> tuple[float, float]:
    n, rounds, first = len(exactly), 0.0, 0.0
    begins = [1.0] + [0.0] * (n - 1)  # probability that a round begins at an entry
    for i, chances in enumerate(exactly):
        share = 0.0  # expected fraction of a round's tokens that are among these entries
        for k, chance in enumerate(chances):
            share += chance * min(1.0, (n - i) / (k + 1))
            if i + k + 1 < n:
                begins[i + k + 1] += begins[i] * chance
        rounds += begins[i] * share
        first += begins[i] * share * firsts[i]
    return rounds, first


class Interrupted(Exception):
    """Signal that `stop` ended a step, an evaluation or a computation of training data early. The interrupted work has
    changed nothing."""


def _until(stop: Callable[[], bool], sample: Iterable[Harvest]) -> Iterator[Harvest]:
    """Yield the items of a sample. If `stop` returns True, raise Interrupted, also after the last item."""
    for item in sample:
        yield item
        if stop():
            raise Interrupted


class DrafterTrainer:
    """Owner of the drafter in training (`layer`), in float32 or wider, and of its optimizer. Each step reads the
    embedding and the head of the target's current version. The distribution to learn is that of the version which
    computed the hidden states. `target_moved` keeps the head of that version."""

    def __init__(self, layer: EagleLayer, target: Decoder, config: DrafterTrainConfig, seed: int = 0) -> None:
        self.layer, self.target, self.config = layer, target, config
        self.dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        layer.to(target.device, self.dtype)
        self.whitening = torch.eye(layer.fc.in_features, dtype=self.dtype, device=target.device)
        """[I, I] matrix; inputs of fc times this matrix are white (second moments of about 1)"""
        self._white = torch.zeros_like(layer.fc.weight, requires_grad=True)  # one step of fc, in terms of white inputs
        self.parameters = dict(layer.named_parameters()) | {_FC: self._white}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.rng = random.Random(seed)
        self.heads = {target.version: target.head.clone()}
        self.steps = 0
        """number of optimizer steps"""
        self.reach = float(config.unroll) if layer.trained else 0.0
        """running mean of the number of accepted draft tokens in a chain of the training data"""
        self.rate_scale = 1.0
        """factor on the configured learning rate, set by the caller"""
        cis = target.cis(torch.arange(target.options.max_positions, device=target.device))[:, 0].repeat(1, 2)
        self.cos_sin = (cis.real.to(self.dtype), cis.imag.to(self.dtype))

    def prepare(self, sample: Iterable[Harvest], from_scratch: bool, stop: Callable[[], bool] = lambda: False) -> None:
        """Estimate the whitening of fc's inputs, and choose the draft vocabulary, from a sample of the training data.
        If `from_scratch`, also set the layer to the best linear map to the next hidden state. (Not for eagle3, because
        its fc does not read the embedding.) A sample that is not finite is ignored. If `stop` returns True, raise
        Interrupted."""
        sample = list(sample)
        moments = Moments(self.layer, self.target.embedding, self.dtype, _until(stop, sample))
        if not moments.inputs.isfinite().all():
            return
        self.whitening = moments.whitening().to(self.dtype)
        if self.layer.vocabulary is not None:
            self.layer.vocabulary.copy_(self._likeliest(sample, len(self.layer.vocabulary)))
        if from_scratch and self.layer.options.kind == "eagle1":
            with torch.no_grad():
                self.layer.fc.weight.copy_(moments.next_hidden())
                self.layer.o_proj.weight.zero_()
                self.layer.down_proj.weight.zero_()

    @torch.no_grad()
    def _likeliest(self, sample: Sequence[Harvest], count: int) -> Tensor:
        """Return `count` token ids, ascending: those with the largest summed probability under the target over some
        entries of the sample."""
        mass = torch.zeros(self.target.options.vocab_size, dtype=self.dtype, device=self.target.device)
        for batch in islice(packs(sample, _COUNTED, self.target.device, random.Random(0)), 1):
            teacher, head = self._teacher(batch)[batch.counted][:_COUNTED], self.heads[batch.version].to(self.dtype)
            for rows in teacher.split(max(1, LOGITS // len(mass))):
                mass += torch.softmax(F.linear(rows, head), dim=-1).sum(0)
        return mass.topk(count).indices.sort().values

    def _rows(self, head: Tensor) -> Tensor:
        """Return the rows of an output head [V, D] for the draft vocabulary, over which the distributions of target and
        drafter are compared. Without a draft vocabulary, return all rows."""
        return self.layer.head(head).to(product_dtype(head.device, self.dtype))

    def target_moved(self, held: Collection[int]) -> None:
        """Record that the target has new weights. Keep its head, and the heads of the versions in `held`, which have
        training data."""
        self.heads = {version: head for version, head in self.heads.items() if version in held}
        self.heads[self.target.version] = self.target.head.clone()  # the next load changes it in place

    @property
    def depth(self) -> int:
        """Number of draft tokens of a chain that are trained: `reach` rounded up, plus one, and at most `unroll`. Later
        tokens are not trained, because they cost as much but follow a token that is often rejected."""
        return min(self.config.unroll, math.ceil(self.reach) + 1)

    def loss(self, batch: Pack, stop: Callable[[], bool] = lambda: False) -> tuple[Tensor, list[float]]:
        """Return the loss, and the mean of 1 - TV at each depth of the chains (NaN for a depth without entries). TV is
        the total variation distance between the distributions of drafter and target.

        The loss is a mean over the depths. Depth t has the weight `_DECAY` ** t. The loss includes the distance between
        the drafter's outputs and the target's hidden states. At depth 0 all entries count. At each later depth one
        entry in four counts. If `stop` returns True, raise Interrupted at the next depth or chunk of the loss, in this
        call or in `backward`."""

        def check_stop(gradient: Tensor | None = None) -> None:
            if stop():
                raise Interrupted

        outs, places = zip(*self._draft_tokens(batch, self.depth, check_stop), strict=True)
        shares = [_DECAY**t if len(out) else 0.0 for t, out in enumerate(outs)]
        each = [share / max(1, len(out)) / max(1e-9, sum(shares)) for share, out in zip(shares, outs, strict=True)]
        weights = torch.cat([out.new_full([len(out)], weight) for out, weight in zip(outs, each, strict=True)])
        out, at, teacher = torch.cat(outs), torch.cat(places), self._teacher(batch)
        head, known = self._rows(self.target.head), self._rows(self.heads[batch.version])
        loss, overlap = draft_loss(out, weights, teacher, at, head, known, check_stop)
        distance = F.smooth_l1_loss(out, teacher[at], reduction="none").mean(-1)
        overlaps = torch.stack([one.mean() for one in overlap.split([len(out) for out in outs])])
        return loss + _FEATURE_WEIGHT * (weights @ distance), overlaps.tolist()

    def _draft_tokens(
        self, batch: Pack, depth: int, check_stop: Callable[..., None] = lambda: None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each depth of a chain: the drafter's outputs [M, D], which the target's head reads, and the entries
        [M] whose distributions they should match. `check_stop` is called at each depth, here and in `backward`."""
        at = torch.arange(len(batch.tokens), device=batch.tokens.device)
        roots = at[self.steps % _EVERY :: _EVERY].contiguous()
        for t, out in enumerate(self._unrolled(self.layer, batch, depth, roots)):
            check_stop()
            if out.requires_grad:
                out.register_hook(check_stop)
            at = roots if t else at
            ahead = (at + 1 + t).clamp(max=len(batch.tokens) - 1)
            inside = (ahead > at + t) & (batch.segments[ahead] == batch.segments[at])
            where = inside & batch.counted[ahead - 1]
            yield out[where], ahead[where]

    @torch.no_grad()
    def acceptance(self, batches: Iterable[Pack]) -> list[float]:
        """Return the mean of 1 - TV (total variation) for each draft token of a chain of `unroll` draft tokens. The
        first one is averaged over all entries of `batches`, and each later one over one entry in four. The mean
        estimates the probability that the draft token is accepted if those before it are."""
        overlaps: list[list[Tensor]] = [[] for _ in range(self.config.unroll)]
        for batch in batches:
            head, known = self._rows(self.target.head), self._rows(self.heads[batch.version])
            teacher = self._teacher(batch)
            for (out, at), found in zip(self._draft_tokens(batch, self.config.unroll), overlaps, strict=True):
                found += draft_overlap(out, teacher, at, head, known)
        means = (torch.cat(found).mean() for found in overlaps)
        return [float(mean.nan_to_num()) for mean in means]  # 0 for a draft token that no chain reaches

    @torch.no_grad()
    def judge(
        self, layers: Sequence[EagleLayer], batch: Pack, stop: Callable[[], bool] = lambda: False
    ) -> tuple[list[tuple[float, float]], int]:
        """Return two numbers for each drafter, and the number of entries that were compared. The first is the expected
        number of rounds in which chains of `unroll` draft tokens decode these entries (`expected_rounds`). The second
        is the expected number of these rounds in which the first draft token is accepted.

        An entry is not compared if its chain would exceed its sequence, or if its first draft token belongs to a
        prompt. If `stop` returns True, raise Interrupted at the next depth. The probability that a draft token is
        accepted is taken as 1 - TV (total variation). In a test, 1 - TV was 0.90, and the measured acceptance rate was
        0.88.
        """
        deepest, head = self.config.unroll, self._rows(self.target.head)
        inside = batch.segments[deepest:] == batch.segments[:-deepest]
        where = (inside & batch.counted[: len(inside)]).nonzero().squeeze(1)
        overlaps = torch.zeros(len(layers), len(where), deepest, dtype=self.dtype, device=where.device)
        outs: dict[tuple[int, int], Tensor] = {}  # by drafter and depth: [entries, D]
        for number, layer in enumerate(layers):
            for t, out in enumerate(self._unrolled(layer, batch, deepest)):
                if stop():
                    raise Interrupted
                outs[number, t] = out[where]
        for first, p in self._target_distributions(batch):  # once for all drafters and depths, because it is slow
            for (number, t), out in outs.items():
                if stop():
                    raise Interrupted
                at = where + 1 + t - first
                known = ((at >= 0) & (at < len(p))).nonzero().squeeze(1)
                q = torch.softmax(logits(out[known], head), dim=-1)
                overlaps[number, known, t] = torch.minimum(p[at[known]], q).sum(-1)
        return [expected_rounds(right, batch.segments[where]) for right in overlaps], len(where)

    def _target_distributions(self, batch: Pack) -> Iterator[tuple[int, Tensor]]:
        """Yield for each chunk of M entries the index of its first entry, and the target's distributions [M, V] at
        these entries."""
        known, teacher = self._rows(self.heads[batch.version]), self._teacher(batch)
        rows = max(1, LOGITS // len(known))
        for first in range(0, len(teacher), rows):
            yield first, torch.softmax(logits(teacher[first : first + rows], known), dim=-1)

    def _unrolled(self, layer: EagleLayer, batch: Pack, depth: int, roots: Tensor | None = None) -> Iterable[Tensor]:
        """Return the drafter's outputs at each depth (inputs of the target's head), as `unroll` yields them."""
        batch = batch._replace(features=batch.features.to(self.dtype))
        return unroll(layer, self.target.embedding, self.cos_sin, batch, depth, roots)

    def _teacher(self, batch: Pack) -> Tensor:
        """Return the target's last hidden states [T, D], which are the inputs of its head."""
        return batch.features[:, -self.layer.options.hidden_size :].to(self.dtype)

    def step(self, batch: Pack, stop: Callable[[], bool] = lambda: False) -> list[float]:
        """Take one optimizer step, or none if the gradient is not finite. Return the mean of 1 - TV at each depth
        before the step. If `stop` returns True, raise Interrupted at the next depth or chunk of the loss."""
        rate = self.config.learning_rate * self.rate_scale * min(1.0, (self.steps + 1) / _WARMUP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.layer.zero_grad()
        loss, overlaps = self.loss(batch, stop)
        if all(math.isnan(overlap) for overlap in overlaps):
            return overlaps
        loss.backward()
        right = sum(accumulate((x for x in overlaps if not math.isnan(x)), mul))
        self.reach += (right - self.reach) / _LATELY
        self._descend()
        return overlaps

    @torch.no_grad()
    def _descend(self) -> None:
        """Take the optimizer's step. For fc, Adam optimizes W = fc @ inverse(whitening), because the inputs of W are
        white: they are `whitening` times the inputs of fc. The step is added to fc at once, so fc can be published at
        any time."""
        fc = self.layer.fc.weight
        assert fc.grad is not None
        self._white.grad = fc.grad @ self.whitening
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), _MAX_GRAD_NORM)
        if norm.isfinite():  # else the step would make weights NaN
            self.optimizer.step()
            fc += self._white @ self.whitening
            self._white.zero_()
            self.steps += 1

    def state(self) -> dict[str, Tensor]:
        """Return all that training changes: the weights, both moments of Adam, the number of steps, `reach` and
        `whitening`. The tensors are not copies."""
        numbers = {"steps": self.steps, "reach": self.reach}
        tensors = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
        tensors["whitening"] = self.whitening
        for name, parameter in self.layer.named_parameters():
            moments = self.optimizer.state.get(self.parameters[name], {})
            tensors[f"weight.{name}"] = parameter.detach()
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = moments.get(moment, torch.zeros_like(parameter))
        return tensors

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from another trainer's `state`."""
        self.steps, self.reach = int(state["steps"]), float(state["reach"])
        self.whitening = state["whitening"].to(self.target.device, self.dtype, copy=True)
        for name, parameter in self.layer.named_parameters():
            parameter.copy_(state[f"weight.{name}"])
            moments = {m: state[f"{m}.{name}"].to(parameter.device, parameter.dtype, copy=True) for m in _MOMENTS}
            self.optimizer.state[self.parameters[name]] = {"step": torch.tensor(float(self.steps)), **moments}

    def epoch(self, items: Iterable[Harvest]) -> Iterator[list[float]]:
        """Train once on all items. Yield the result of each `step`, so that a caller may stop between two steps."""
        for batch in packs(items, self.config.micro_batch_tokens, self.target.device, self.rng):
            yield self.step(batch)
