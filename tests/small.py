"""A model small enough to enumerate, the distribution of its responses, and checks that find an engine that changes it.

Nothing here trusts the engine. Logits come from transformers' own model (one full pass for each context, no cache). The
distribution is computed with temperature, top-k and top-p in plain Python, and responses are decoded from both, one
token at a time. Only the noise (`gumbel_noise`, which test_sampling.py compares with a second implementation) and the
seeds of requests are taken from tlt. Each check raises AssertionError. test_losslessness.py applies them to the engine,
and test_planted_bugs.py to bugs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from tiny import qwen3
from torch import Tensor, nn

from tlt import sampling
from tlt.attention.key_counts import BLOCK
from tlt.attention.slot_memory import HeadShape
from tlt.attention.slots import SlotAttention
from tlt.config import EngineConfig
from tlt.draft.chains import Draft
from tlt.draft.drafter import Drafter, Offer, Prefix, PrefixDrafter
from tlt.draft.eagle import EagleLayer, Kind, eagle_options
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.engine import Engine
from tlt.engine.kv_cache import KVCache
from tlt.engine.runner import Runner
from tlt.engine.tuner import Fixed, Tuner
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options
from tlt.sampling import gumbel_noise
from tlt.types import Prompt, Request, Response, SamplingParams

VOCAB = 5
LENGTH = 4  # tokens of a response whose distribution is enumerated: 5^4 = 625 cells
ALPHA = 1e-6
PROMPTS = (Prompt(0, "", (1, 2, 3)), Prompt(1, "", (4, 0, 2, 2, 1)))
Context = tuple[int, ...]


class Violation(AssertionError):
    """Error of a check. It has a class of its own, so that another failing assertion does not count as a found bug."""


_noise = gumbel_noise  # bound here, so that a bug planted in tlt does not reach the reference


# -- the model and its distribution ---------------------------------------------------------------------------------


class Target:
    """Random Qwen3 whose next-token distribution depends strongly on the context, and the engine's decoder for it."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        self.model = qwen3(seed, vocab_size=VOCAB, hidden_size=16, intermediate_size=32, **heads)
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if weight.dim() == 2:
                    weight.normal_(0.0, 1.8 * weight.shape[1] ** -0.5)
                elif name.endswith(("q_norm.weight", "k_norm.weight")):
                    weight.fill_(1.5)  # sharp attention: a key at the wrong place shows
            self.model.lm_head.weight.mul_(0.7)
        widen(self.model)
        self.decoder = Decoder(decoder_options(self.model.config), dtype, torch.device("cpu"))
        self.decoder.load(self.model.state_dict(), version=0)
        self._logits: dict[Context, list[float]] = {}
        self._distributions: dict[tuple[Context, SamplingParams], list[float]] = {}

    @torch.no_grad()
    def logits(self, contexts: Iterable[Context]) -> list[list[float]]:
        """Return logits after each context, by full passes, padded at the right, which causal attention ignores."""
        contexts = list(contexts)
        new = [c for c in dict.fromkeys(contexts) if c not in self._logits]
        if new:
            longest = max(len(c) for c in new)
            batch = torch.tensor([c + (0,) * (longest - len(c)) for c in new])
            last = torch.tensor([len(c) - 1 for c in new])
            rows = self.model(batch, use_cache=False).logits[torch.arange(len(new)), last]
            self._logits.update(zip(new, rows.tolist(), strict=True))
        return [self._logits[c] for c in contexts]

    def distribution(self, context: Context, params: SamplingParams) -> list[float]:
        """Return the probabilities of the next token."""
        key = (context, params)
        if key not in self._distributions:
            self._distributions[key] = plain_distribution(self.logits([context])[0], params)
        return self._distributions[key]

    def step_distribution(self, prompt: Prompt, params: SamplingParams, t: int) -> np.ndarray:
        """Return the probability of token t given every possible response before it, [VOCAB] * (t + 1)."""
        contexts = [prompt.token_ids + tokens for tokens in np.ndindex(*[VOCAB] * t)]
        self.logits(contexts)
        return np.array([self.distribution(c, params) for c in contexts]).reshape([VOCAB] * (t + 1))

    def sequence_distribution(self, prompt: Prompt, params: SamplingParams, length: int) -> np.ndarray:
        """Return the probability of every response of `length` tokens, [VOCAB] * length."""
        distribution = np.ones(())
        for t in range(length):
            distribution = distribution[..., None] * self.step_distribution(prompt, params, t)
        return distribution


def widen(model: nn.Module) -> nn.Module:
    """Compute norms and rotary angles in float64. transformers keeps them in float32."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    def rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(norm, module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = partial(rotary, module)
    return model


def plain_distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Return softmax(logits / temperature) cut by top-k, then by top-p, one token at a time."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    if params.temperature == 0:
        return [float(v == order[0]) for v in range(len(logits))]
    order = order[: params.top_k or None]
    weights = [math.exp((logits[v] - logits[order[0]]) / params.temperature) for v in order]
    total, mass, distribution = sum(weights), 0.0, [0.0] * len(logits)
    for v, weight in zip(order, weights, strict=True):
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        distribution[v] = weight
        mass += weight
    return [p / mass for p in distribution]


def make_requests(
    prompts: Iterable[Prompt], params: Sequence[SamplingParams], group: int = 2, epochs: int = 1, run_seed: int = 0
) -> list[Request]:
    """Return requests by epoch, prompt, and index in the group. Sampling parameters are assigned in turn."""
    places = [(epoch, prompt, index) for epoch in range(epochs) for prompt in prompts for index in range(group)]
    return [
        Request(prompt, index, epoch, _seed(run_seed, prompt, epoch, index), params[i % len(params)])
        for i, (epoch, prompt, index) in enumerate(places)
    ]


def _seed(run_seed: int, prompt: Prompt, epoch: int, index: int) -> int:
    return sampling.request_seed(run_seed, "test", prompt.prompt_id, epoch, index)


class Reference(NamedTuple):
    """Expected result of a request."""

    token_ids: list[int]
    logprobs: list[float]
    full_logprobs: list[float]
    finish_reason: str


def request(prompt: Sequence[int] = (1, 2, 3), seed: int = 0, new_tokens: int = 8, **sampling: Any) -> Request:
    """Return one request. Ten seeds in a row are a group of one prompt."""
    params = SamplingParams(**sampling, max_new_tokens=new_tokens)
    return Request(Prompt(seed // 10, "", tuple(prompt)), seed % 10, 0, seed, params)


def reference(target: Target, requests: Sequence[Request]) -> list[Reference]:
    """Decode by argmax of log p + g, token by token, with full passes and without an engine."""
    out = [Reference([], [], [], "length") for _ in requests]
    noise = [_noise_of(request) for request in requests]
    open_ = list(range(len(requests)))
    while open_:
        logits = target.logits([requests[i].prompt.token_ids + tuple(out[i].token_ids) for i in open_])
        for i, row in zip(list(open_), logits, strict=True):
            params = requests[i].sampling
            distribution = plain_distribution(row, params)
            g = noise[i][len(out[i].token_ids)] if params.temperature > 0 else [0.0] * VOCAB
            token = max(range(VOCAB), key=lambda v: _log(distribution[v]) + g[v])
            full = plain_distribution(row, SamplingParams(temperature=params.temperature or 1.0))
            out[i].token_ids.append(token)
            out[i].logprobs.append(_log(distribution[token]))
            out[i].full_logprobs.append(_log(full[token]))
            if token in params.stop_token_ids:
                out[i] = out[i]._replace(finish_reason="stop")
            if token in params.stop_token_ids or len(out[i].token_ids) == params.max_new_tokens:
                open_.remove(i)
    return out


def _noise_of(request: Request) -> list[list[float]]:
    """Return noise [position][token]."""
    seed = torch.tensor([request.seed], dtype=torch.uint64).view(torch.int64)
    T = request.sampling.max_new_tokens
    return _noise(seed.expand(T), torch.arange(T), VOCAB).double().tolist()


def _log(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf


# -- drafters -------------------------------------------------------------------------------------------------------


class ContextDrafter(PrefixDrafter):
    """Drafter whose log q = `trust` times the target's own log p, plus noise of size `spread` that is a function of the
    context.

    trust 1 and spread 0 is the oracle. trust 0 knows nothing. A negative trust is wrong wherever possible. `listed` > 0
    gives the sparse form: this number of the likeliest tokens, the least likely first, padded by one."""

    name = "context"

    def __init__(self, target: Target, trust: float, spread: float, seed: int = 0, listed: int = 0) -> None:
        self.target, self.trust, self.spread, self.seed, self.listed = target, trust, spread, seed, listed
        self._known: dict[tuple[Context, SamplingParams], list[float]] = {}

    def log_q(self, context: Context, params: SamplingParams) -> list[float]:
        key = (context, params)
        if key not in self._known:
            floor = 0.0 if self.trust == 1 else 1e-9  # only the oracle excludes what the target's distribution excludes
            scores = [self.trust * _log(max(p, floor)) for p in self.target.distribution(context, params)]
            shift = np.random.default_rng([self.seed, *context]).normal(size=VOCAB) * self.spread
            self._known[key] = [score + s for score, s in zip(scores, shift.tolist(), strict=True)]
        return self._known[key]

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        contexts = [(*p.request.prompt.token_ids, *p.committed, *p.drafted) for p in prefixes]
        self.target.logits(contexts)
        log_q = torch.tensor(
            [self.log_q(c, p.request.sampling) for c, p in zip(contexts, prefixes, strict=True)], dtype=torch.float64
        )
        if not self.listed:
            return Offer(None, log_q)
        best = log_q.topk(self.listed, dim=-1)
        pad = torch.full((len(prefixes), 1), -1)
        return Offer(
            torch.cat([best.indices.flip(-1), pad], dim=-1),
            torch.cat([best.values.flip(-1), torch.full(pad.shape, -math.inf, dtype=torch.float64)], dim=-1),
        )


def oracle(target: Target) -> ContextDrafter:
    """Return the target itself as a drafter, by full passes without a cache."""
    return ContextDrafter(target, trust=1.0, spread=0.0)


class Replay(PrefixDrafter):
    """Drafter that continues as the known responses do."""

    name = "replay"

    def __init__(self, known: Iterable[Response]) -> None:
        self.known = by_seed(known)

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        behind = [self.known[p.request.seed][len(p.committed) + len(p.drafted) :] for p in prefixes]
        return Offer(torch.tensor([tokens[:1] or [-1] for tokens in behind]), torch.zeros(len(prefixes), 1))


def learned(target: Target, seed: int = 0, kind: Kind = "eagle3", window: int = 16) -> EagleDrafter:
    """Return a drafter with random weights, large enough that it proposes different tokens in every context."""
    torch.manual_seed(seed)
    layer = EagleLayer(eagle_options(target.decoder.options, kind, window)).double()
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 1.5 * weight.shape[1] ** -0.5)
    return EagleDrafter(layer, target.decoder)


ANY_SIZE = tuple(range(1, BLOCK + 1))
"""`key_counts` that round nothing"""

# -- running the engine ---------------------------------------------------------------------------------------------


def build(
    target: Target,
    drafter: Drafter | None = None,
    strategy: Strategy = PLAIN,
    max_rows: int = 64,
    bound_tokens: int | None = None,
    prefill_tokens: int = 2048,
    others: Sequence[Drafter] = (),
    tuner: Tuner | None = None,
) -> Engine:
    """Return an engine that always drafts with this drafter and the shape of `strategy`. Without a drafter it uses
    plain decoding. `others` are further drafters. A `tuner` chooses among all.

    `bound_tokens` sets the cache's bound below the smallest one of a configuration in MiB."""
    config = EngineConfig(max_rows=max_rows, prefill_tokens=prefill_tokens)
    drafters = [*others, *([] if drafter is None else [drafter])]
    layout = next((d.options.layout for d in drafters if isinstance(d, EagleDrafter)), None)
    tuner = tuner or Fixed(strategy_for(drafter, strategy))
    engine = Engine(target.decoder, config, drafters, tuner, layout=layout, kv_tokens=bound_tokens)
    return with_slots_of_any_size(engine) if bound_tokens else engine


def with_slots_of_any_size(engine: Engine) -> Engine:
    """Let the engine's cache have slots of any number of tokens, for bounds below the smallest rounded slot. Its
    log-probs may then differ by rounding."""
    engine.cache.store.key_counts = ANY_SIZE
    return engine


def strategy_for(drafter: Drafter | None, shape: Strategy) -> Strategy:
    """Return the shape (a strategy whose `drafter` is ignored) with this drafter."""
    return PLAIN if drafter is None else shape._replace(drafter=drafter.name)


def decoder_of(model: Any, dtype: torch.dtype = torch.float64) -> Decoder:
    """Return the engine's decoder with the weights of transformers' own model."""
    decoder = Decoder(decoder_options(model.config), dtype, torch.device("cpu"))
    decoder.load(model.state_dict(), version=0)
    return decoder


def decode(
    engine: Engine,
    requests: Sequence[Request],
    shuffle: int | None = None,
    after_round: Callable[[Engine], None] | None = None,
) -> list[Response]:
    """Return the responses in the order of `requests`, whatever the order of submission (`shuffle` is a seed)."""
    if after_round is not None:
        _after_each_round(engine, after_round)
    submitted = list(requests)
    if shuffle is not None:
        np.random.default_rng(shuffle).shuffle(submitted)  # type: ignore[arg-type]
    done = {id(response.request): response for response in engine.generate(submitted)}
    return [done[id(request)] for request in requests]


def finish(engine: Engine) -> list[Response]:
    """Run rounds until no request is left, and return the responses in the order in which they ended."""
    responses: list[Response] = []
    while engine.busy:
        responses += engine.round()
    return responses


def by_seed(responses: Iterable[Response]) -> dict[int, list[int]]:
    """Return the tokens of each response, by the seed of its request."""
    return {response.request.seed: list(response.token_ids) for response in responses}


def _after_each_round(engine: Engine, action: Callable[[Engine], None]) -> None:
    one_round = engine.round

    def observed() -> list[Response]:
        responses = one_round()
        action(engine)
        return responses

    engine.round = observed


class Step(NamedTuple):
    """Effect of one round on one row."""

    request: Request
    draft: Draft
    sampled: list[int]
    before: int
    after: int


def record_steps(engine: Engine) -> list[Step]:
    """Return a list that is filled while the engine runs."""
    steps: list[Step] = []
    commit = engine._commit

    def observed(now, drafts, sampled):
        before = [len(row.tokens) for row in now.rows]
        tokens = [list(t) for t in sampled.tokens]
        responses = commit(now, drafts, sampled)
        for row, draft, picked, start in zip(now.rows, drafts, tokens, before, strict=True):
            steps.append(Step(row.request, draft, picked, start, len(row.tokens)))
        return responses

    engine._commit = observed
    return steps


def draw(engine: Engine, params: SamplingParams, epochs: int, group: int = 2, run_seed: int = 0) -> np.ndarray:
    """Return the tokens [epoch, prompt, index in the group, LENGTH] of all responses of the engine to PROMPTS."""
    requests = make_requests(PROMPTS, [params], group, epochs, run_seed)
    tokens = [response.token_ids for response in decode(engine, requests)]
    return np.array(tokens).reshape(epochs, len(PROMPTS), group, LENGTH)


def reference_draw(
    target: Target, params: SamplingParams, epochs: int, group: int = 2, run_seed: int = 0
) -> np.ndarray:
    """Return the expected result of `draw`: argmax of log p + g over a table of all contexts."""
    requests = [(p, e, i) for e in range(epochs) for p in range(len(PROMPTS)) for i in range(group)]
    prompt = np.array([p for p, _, _ in requests])
    seeds = torch.tensor([_seed(run_seed, PROMPTS[p], e, i) for p, e, i in requests], dtype=torch.uint64)
    tokens = np.zeros((len(requests), LENGTH), dtype=np.int64)
    for t in range(LENGTH):
        g = _noise(seeds.view(torch.int64), torch.full(seeds.shape, t), VOCAB).double().numpy()
        for p in range(len(PROMPTS)):
            mine = prompt == p
            with np.errstate(divide="ignore"):
                log_p = np.log(target.step_distribution(PROMPTS[p], params, t))
            tokens[mine, t] = (log_p[tuple(tokens[mine, :t].T)] + g[mine]).argmax(-1)
    return tokens.reshape(epochs, len(PROMPTS), group, LENGTH)


# -- checks ---------------------------------------------------------------------------------------------------------


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Violation(message)


def check_distribution(observed: np.ndarray, distribution: np.ndarray, what: str) -> None:
    """Compare counts with probabilities by chi-square. Cells that expect fewer than 5 are pooled."""
    counts, expected = observed.ravel(), distribution.ravel() * observed.sum()
    impossible = int(counts[expected == 0].sum())
    _require(impossible == 0, f"{what}: {impossible} draws of sequences that the distribution excludes")
    order = np.argsort(expected)
    pooled = int((expected < 5.0).sum())
    while expected[order[:pooled]].sum() < 5.0:  # the pool itself must expect 5
        pooled += 1
    o = np.append(counts[order[pooled:]], counts[order[:pooled]].sum())
    e = np.append(expected[order[pooled:]], expected[order[:pooled]].sum())
    statistic, freedom = float(((o - e) ** 2 / e).sum()), len(e) - 1
    p_value = float(stats.chi2.sf(statistic, freedom))
    _require(p_value > ALPHA, f"{what}: chi-square {statistic:.0f}, {freedom} degrees of freedom, p = {p_value:.1e}")


def count(tokens: np.ndarray) -> np.ndarray:
    """Return how often each of the sequences [n, L] occurs, as [VOCAB] * L."""
    counts = np.zeros([VOCAB] * tokens.shape[1], dtype=np.int64)
    np.add.at(counts, tuple(tokens.T), 1)
    return counts


def check_joint(draws: np.ndarray, target: Target, params: SamplingParams) -> None:
    """Check that the first 1, 2, 3 and 4 tokens of each prompt's responses follow the enumerated distribution."""
    for p, prompt in enumerate(PROMPTS):
        for length in range(1, LENGTH + 1):
            distribution = target.sequence_distribution(prompt, params, length)
            check_distribution(
                count(draws[:, p, :, :length].reshape(-1, length)), distribution, f"prompt {p}, {length} tokens"
            )


def check_group_independence(draws: np.ndarray, target: Target, params: SamplingParams) -> None:
    """Check that the first two tokens of responses 0 and 1 of a group follow the product of their distributions."""
    for p, prompt in enumerate(PROMPTS):
        distribution = target.sequence_distribution(prompt, params, 2)
        _check_product(
            draws[:, p, 0, :2], draws[:, p, 1, :2], distribution, distribution, f"prompt {p}, responses 0 and 1"
        )


def check_request_independence(draws: np.ndarray, target: Target, params: SamplingParams) -> None:
    """Check that first tokens of two prompts, and of one prompt in two epochs, follow the product distribution."""
    distributions = [target.sequence_distribution(prompt, params, 2) for prompt in PROMPTS]
    _check_product(draws[:, 0, 0, :2], draws[:, 1, 0, :2], distributions[0], distributions[1], "prompts 0 and 1")
    even, odd = draws[0::2, 0, 0, :2], draws[1::2, 0, 0, :2]
    _check_product(even[: len(odd)], odd, distributions[0], distributions[0], "two epochs of prompt 0")


def _check_product(
    one: np.ndarray, other: np.ndarray, distribution: np.ndarray, other_distribution: np.ndarray, what: str
) -> None:
    check_distribution(
        count(np.concatenate([one, other], axis=1)), np.multiply.outer(distribution, other_distribution), what
    )


def check_same_draws(draws: np.ndarray, expected: np.ndarray) -> None:
    """Compare draws token for token."""
    different = int((draws != expected).any(axis=-1).sum())
    _require(different == 0, f"{different} of {draws[..., 0].size} responses differ from the reference")


def check_tokens(responses: Sequence[Response], expected: Sequence[Reference]) -> None:
    """Compare responses token for token, and their finish reasons."""
    for i, (response, right) in enumerate(zip(responses, expected, strict=True)):
        got, want = (response.token_ids, response.finish_reason), (right.token_ids, right.finish_reason)
        _require(got == want, f"request {i}: {got}, but should be {want}")


def check_logprobs(responses: Sequence[Response], expected: Sequence[Reference], tolerance: float = 1e-9) -> None:
    """Compare both log-probs of every token."""
    for i, (response, right) in enumerate(zip(responses, expected, strict=True)):
        for name in ("logprobs", "full_logprobs"):
            got, want = np.array(getattr(response, name)), np.array(getattr(right, name))
            _require(got.shape == want.shape, f"request {i}: {len(got)} {name}, but {len(want)} tokens")
            _require(
                np.allclose(got, want, rtol=0, atol=tolerance),
                f"request {i}: {name} are off by {abs(got - want).max()}",
            )


def cache_for(target: Decoder, bound_tokens: int) -> KVCache:
    """Return an empty cache with slots for this decoder."""
    store = SlotAttention(HeadShape.of(target.options, target.dtype, target.device))
    store.key_counts = ANY_SIZE
    return KVCache(store, bound_tokens)


def check_integrity(engine: Engine, tolerance: float = 1e-9) -> None:
    """Check that keys and values [0, kv_length) of every active row are those of a new prefill of its context."""
    live = list(engine.rows)
    if not live:
        return
    contexts = [(*row.request.prompt.token_ids, *row.tokens) for row in live]
    longest = max(len(context) for context in contexts)
    fresh = cache_for(engine.target, 10**6)
    fresh.reserve(len(live), longest)
    Runner(engine.target, fresh, window=None, prefill_tokens=10**6).prefill(0, contexts)
    for layer in range(engine.target.options.num_layers):
        for slot, context in enumerate(contexts):
            got, want = (cache.store.layers[layer][:, slot] for cache in (engine.cache, fresh))
            T = len(context) - 1  # of [2, K, T, E]; the last token is the root of the round to come
            same = torch.allclose(got[:, :, :T], want[:, :, :T], rtol=0, atol=tolerance)
            _require(same, f"slot {slot}, layer {layer}: keys and values are not those of its context")


def check_oracle(steps: Sequence[Step], strategy: Strategy) -> None:
    """Check that the drafter is the target: every draft token is the target's, and all of them are committed.

    It is for requests without stop tokens, which may end a run of tokens early."""
    _require(bool(steps) and any(step.draft.tokens for step in steps), "nothing was drafted")
    for step in steps:
        for depth, (drafted, picked) in enumerate(zip(step.draft.tokens, step.sampled, strict=False)):
            where = f"position {step.before + depth}, depth {depth + 1}"
            _require(drafted == picked, f"{where}: drafted {drafted}, but the target took {picked}")
        taken, room = step.after - step.before, step.request.sampling.max_new_tokens - step.before
        _require(
            taken == min(strategy.depth + 1, room),
            f"position {step.before}: {taken} tokens from {strategy.depth} drafted",
        )
