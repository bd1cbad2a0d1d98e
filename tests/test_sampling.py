"""The noise, the distribution p, and their sum, against published vectors, plain Python and transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tlt.sampling import (
    SamplingTensors,
    _gumbel,
    _host_words,
    gumbel_noise,
    gumbel_topk,
    philox,
    philox_words,
    request_seed,
    sampling_log_probs,
)

INF = math.inf
BIG_VOCAB = 151_936  # Qwen's

VECTORS = {  # Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result
    "zeros": ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}


def slow_philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Return Philox4x32-10 computed with Python integers, which do not overflow."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 % 2**32, p0 >> 32 ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


def fast_philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([word]) for word in (*counter, *key))
    return tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1)))


@pytest.mark.parametrize("name", VECTORS)
def test_philox_has_the_published_vectors(name: str) -> None:
    counter, key, result = (tuple(int(word, 16) for word in words.split()) for words in VECTORS[name])
    assert slow_philox(counter, key) == result
    assert fast_philox(counter, key) == result


def test_random_words_of_a_device_are_those_of_the_host() -> None:
    """This finds a counter that begins elsewhere. The words of the host come from another library."""
    seeds, positions = signed([0, 5, 2**32, 2**64 - 1]), torch.tensor([0, 1, 2**31, 2**32 - 1])
    for count in (1, 6, 1003):
        here = torch.stack([*_host_words(seeds.tolist(), positions.tolist(), count)])
        assert torch.equal(philox_words(seeds, positions, count), here)


def signed(seeds: Sequence[int]) -> Tensor:
    return torch.tensor(seeds, dtype=torch.uint64).view(torch.int64)


def noise(seed: int, position: int, vocab_size: int) -> Tensor:
    return gumbel_noise(signed([seed]), torch.tensor([position]), vocab_size)[0]


def slow_noise(seed: int, position: int, token: int) -> np.float32:
    word = slow_philox((token // 4, 0, position, 0), (seed % 2**32, seed >> 32))[token % 4]
    u = (word + 0.5) / 2**32
    return np.float32(-math.log(-math.log1p(-u)))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(0, 300))
def test_noise_equals_its_slow_twin(seed: int, position: int, token: int) -> None:
    """In float32, up to the last bit, because the two logarithms are of different libraries."""
    ours, twin = noise(seed, position, token + 1)[token].item(), slow_noise(seed, position, token)
    assert abs(ours - twin) <= np.spacing(abs(twin))


def test_noise_does_not_depend_on_other_rows_and_tokens() -> None:
    """It is equal bit for bit, whatever else is computed with it: other rows, other tokens, more threads."""
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (37,), generator=generator)
    positions = torch.randint(0, 5000, (37,), generator=generator)
    together = gumbel_noise(seeds, positions, 1003)
    order = torch.randperm(37, generator=generator)
    assert torch.equal(gumbel_noise(seeds[order], positions[order], 1003), together[order])
    alone = torch.cat([gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 1003) for i in range(37)])
    assert torch.equal(alone, together)
    for vocab_size in (1, 2, 3, 4, 5, 1000, 1002):
        assert torch.equal(gumbel_noise(seeds, positions, vocab_size), together[:, :vocab_size])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    large = gumbel_noise(seeds[:2], positions[:2], BIG_VOCAB)  # many blocks a row
    torch.set_num_threads(threads)
    assert torch.equal(large[:, :1003], together[:2])


def test_the_first_and_the_last_word_have_finite_noise() -> None:
    """Each occurs once in 2^32 draws: u = 2^-33 and 1 - 2^-33, and -log(-log(1 - u))."""
    assert _gumbel(torch.tensor([0, 2**32 - 1])).tolist() == pytest.approx(
        [33 * math.log(2), -math.log(33 * math.log(2))], abs=1e-5
    )


def test_request_seed_is_stable() -> None:
    """A run that is resumed with a later version must decode the same responses."""
    assert request_seed(0, "train", 0, 0, 0) == 4044430428229421024
    assert request_seed(1, "eval", 23, 4, 5) == 9747506720172578356


def test_request_seed_depends_on_every_field() -> None:
    """Fields that are joined without a separator ("1/11" and "11/1") would give two requests one seed."""
    fields = [(1, 11, 111), ("train", "eval", "1"), (1, 11, 111), (1, 11, 111), (1, 11, 111)]
    seeds = {request_seed(*chosen) for chosen in product(*fields)}
    assert len(seeds) == 3**5
    assert all(0 <= seed < 2**64 for seed in seeds)


def sampling_of(*rows: tuple[float, int, float], dtype: torch.dtype = torch.float32) -> SamplingTensors:
    """Return the sampling parameters of rows, each (temperature, top_k, top_p)."""
    temperature, top_k, top_p = (torch.tensor(values, dtype=torch.float64) for values in zip(*rows, strict=True))
    restricted = bool((top_k > 0).any() or (top_p < 1).any())
    return SamplingTensors(temperature.to(dtype), top_k.long(), top_p, restricted)


def brute_force(logits: Sequence[float], temperature: float, top_k: int, top_p: float) -> list[float] | None:
    """Return the distribution in exact sums, or None if a prefix's mass is too close to top_p for floats."""
    best = max(logits)
    weight = [Fraction(math.exp((x - best) / temperature)) for x in logits]
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))[: top_k or None]
    total, kept, mass = sum(weight[v] for v in order), [], Fraction(0)
    for v in order:
        if kept and top_p < 1 and mass >= Fraction(top_p) * total:
            break
        kept.append(v)
        mass += weight[v]
        if top_p < 1 and abs(mass / total - Fraction(top_p)) < 1e-12:
            return None
    return [float(weight[v] / mass) if v in kept else 0.0 for v in range(len(logits))]


def assert_distributions(logits: Tensor, sampling: SamplingTensors, atol: float) -> None:
    """Compare each row of logits [M, V] with the distribution in exact sums."""
    log_p, full = sampling_log_probs(logits, sampling)
    parameters = zip(*(x.tolist() for x in sampling[:3]), strict=True)
    for row, (numbers, (temperature, top_k, top_p)) in enumerate(zip(logits.tolist(), parameters, strict=True)):
        expected = brute_force(numbers, temperature or 1.0, top_k, top_p)
        assert log_p[row].exp().tolist() == pytest.approx(expected, abs=atol)
        expected = brute_force(numbers, temperature or 1.0, 0, 1.0)
        assert full[row].exp().tolist() == pytest.approx(expected, abs=atol)


some_logits = st.lists(st.sampled_from([-6.0, -2.0, -1.0, -0.5, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=12)
temperatures = st.sampled_from([0.3, 0.7, 1.0, 2.0])
top_ks = st.sampled_from([0, 1, 2, 3, 5, 20])
top_ps = st.sampled_from([1.0, 0.99, 0.9, 0.7, 0.5, 0.2, 1e-6, 0.0])


@settings(max_examples=300)
@given(some_logits, temperatures, top_ks, top_ps)
def test_distribution_against_brute_force(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    """If logits are equal, the lower token id is kept."""
    assume(brute_force(logits, temperature, top_k, top_p) is not None)
    sampling = sampling_of((temperature, top_k, top_p), dtype=torch.float64)
    assert_distributions(torch.tensor([logits], dtype=torch.float64), sampling, 1e-12)


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.6, 0.1])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_distribution_against_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(20, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    sampling = sampling_of(*[(temperature, top_k, top_p)] * 20, dtype=torch.float64)
    assert torch.allclose(sampling_log_probs(logits, sampling)[0].exp(), scores.softmax(-1), rtol=0, atol=1e-12)


def test_each_row_has_its_own_sampling_parameters() -> None:
    rows = [(1.0, 0, 1.0), (0.5, 2, 1.0), (0.7, 0, 0.6), (2.0, 3, 0.9)] * 6
    logits = torch.randn(24, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert_distributions(logits, sampling_of(*rows), 1e-7)


@pytest.mark.parametrize("other", [(1.0, 0, 0.5), (1e-300, 0, 1.0)], ids=["top-p", "lowest temperature"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, other: tuple[float, int, float]) -> None:
    """It must not differ by a bit. top_p = 1 keeps every token, however small its probability."""
    logits = torch.randn(2, 5000, dtype=dtype, generator=torch.Generator().manual_seed(3)) * 4
    alone, _ = sampling_log_probs(logits[:1], sampling_of((0.7, 0, 1.0), dtype=torch.float64))
    both, _ = sampling_log_probs(logits, sampling_of((0.7, 0, 1.0), other, dtype=torch.float64))
    assert torch.isfinite(both[0]).all()
    assert torch.equal(both[0], alone[0])


@pytest.mark.parametrize(("top_p", "kept"), [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_a_prefix_with_exactly_the_mass_of_top_p_is_enough(top_p: float, kept: int) -> None:
    """Four equal tokens, whose sums are exact."""
    log_p, _ = sampling_log_probs(torch.zeros(1, 4), sampling_of((1.0, 0, top_p)))
    assert log_p[0].exp().tolist() == pytest.approx([1 / kept] * kept + [0.0] * (4 - kept))


@pytest.mark.parametrize("top_p", [0.9999, 0.99995])
def test_the_mass_of_a_long_tail_is_summed_exactly(top_p: float) -> None:
    """One token, and 100,000 tokens of about 2e-9. Next to 1 a float32 has an error of 6e-8, or 30 of them."""
    logits = 0.5 * torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0)) - 20
    logits[0, 0] = 0.0
    log_p, full = sampling_log_probs(logits, sampling_of((1.0, 0, top_p)))
    likeliest_first = full[0].sort(descending=True).values.softmax(-1).double().numpy()
    kept = 1 + int((np.cumsum(likeliest_first) < top_p).sum())
    assert abs(int(torch.isfinite(log_p).sum()) - kept) <= 1


def test_dtypes_are_kept_or_widened() -> None:
    """float64 is not cast to float32, and no wider type to bfloat16."""
    logits = torch.randn(3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for row in ((0.7, 0, 1.0), (0.7, 5, 0.9)):
        sampling = sampling_of(row, row, row)
        assert [x.dtype for x in sampling_log_probs(logits, sampling)] == [torch.float64] * 2
        assert [x.dtype for x in sampling_log_probs(logits.float(), sampling)] == [torch.float32] * 2
        narrow, wide = (sampling_log_probs(x, sampling) for x in (logits.bfloat16(), logits.bfloat16().float()))
        assert all(map(torch.equal, narrow, wide))


def test_temperature_zero_is_greedy() -> None:
    """The argmax is the greedy token, the first of equal ones. The full log-probs are those of temperature 1."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]], dtype=torch.float64)
    for top_k, top_p in ((0, 1.0), (2, 0.5)):
        log_p, full = sampling_log_probs(logits, sampling_of((0.0, top_k, top_p)))
        assert gumbel_topk(log_p, torch.zeros(1, 4)).picks.item() == 1
        assert torch.equal(full, torch.log_softmax(logits, dim=-1))


LOWEST = [1e-29, 1e-37, 1e-39, 1e-42, 1e-46, 1e-300, 1e-310, 5e-324]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (3, 0.4)])
@pytest.mark.parametrize("logits", [[0.25, 100.0, -3.0, 100.0, 99.5], [-1e4, 1e4, 0.0], [0.0, 0.0, -1e-3]], ids=str)
def test_the_lowest_temperatures_share_the_probability_among_the_best(
    logits: list[float], top_k: int, top_p: float, dtype: torch.dtype
) -> None:
    """Below 1e-38 a temperature is subnormal or 0 in float32, and a logit divided by it is infinite."""
    rows = [(temperature, top_k, top_p) for temperature in (*LOWEST, 1.0, 0.0)]
    sampling = sampling_of(*rows, dtype=torch.float64)
    assert_distributions(torch.tensor([logits] * len(rows), dtype=dtype), sampling, 1e-6)


@pytest.mark.parametrize("across", ["seeds", "positions"])
def test_argmax_has_the_distribution(across: str) -> None:
    """Chi-square of 1,000,000 draws, alpha 1e-6. It finds a total variation of 0.5 % with 95 % power."""
    N, V = 1_000_000, 20
    p = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).softmax(-1)
    counts = torch.zeros(V, dtype=torch.int64)
    for first in range(0, N, 100_000):
        moving, fixed = torch.arange(first, first + 100_000), torch.full((100_000,), 12345)
        seeds, positions = (moving, fixed) if across == "seeds" else (fixed, moving)
        noise = _gumbel(philox_words(seeds, positions, V)).float()  # is gumbel_noise, in a hundredth of its time
        counts += torch.bincount(gumbel_topk(p.log(), noise).picks[:, 0], minlength=V)
    assert stats.chisquare(counts.numpy(), (p * N).numpy()).pvalue > 1e-6


def test_rank_orders_the_best_tokens() -> None:
    """The best comes first, as in a sort of the sums. Equal scores go to the lower index, and -inf comes last."""
    log_p = torch.log_softmax(torch.randn(7, 30, generator=torch.Generator().manual_seed(6)), dim=-1)
    log_p[:, 3] = -INF
    g = gumbel_noise(torch.arange(7), torch.arange(7), 30)
    best = gumbel_topk(log_p, g, k=5)
    for scores, picks, sums in zip(best.scores.tolist(), best.picks.tolist(), (log_p + g).tolist(), strict=True):
        order = sorted(range(30), key=lambda v: -sums[v])
        assert picks == order[:5]
        assert scores == [sums[v] for v in order[:5]]
    assert torch.equal(gumbel_topk(log_p, g).picks, best.picks[:, :1])
    assert gumbel_topk(torch.zeros(1, 6), torch.zeros(1, 6)).picks.item() == 0
    assert gumbel_topk(log_p, g, k=99).picks.shape == (7, 30)
    assert (gumbel_topk(log_p, g, k=30).picks[:, -1] == 3).all()
