"""Faults of sampling.py: noise, law, ranking."""

from __future__ import annotations

from mutants.mutant import Mutant

FILE, TESTS = "sampling.py", "test_sampling.py"

MUTANTS = [
    Mutant(
        "two lanes of the noise change places",
        FILE,
        "return c0, c1 & _MASK, c2, c3 & _MASK",
        "return c0, c3 & _MASK, c2, c1 & _MASK",
        TESTS,
    ),
    Mutant(
        "one bit of the seed is in both halves of the key",
        FILE,
        "seed >> 32 & _MASK",
        "seed >> 31 & _MASK",
        TESTS,
    ),
    Mutant(
        "the position is another word of the counter",
        FILE,
        "(lane, zero, position, zero)",
        "(lane, position, zero, zero)",
        TESTS,
    ),
    Mutant("a uniform may be 0, and its noise infinite", FILE, "add_(0.5)", "add_(0.0)", TESTS),
    Mutant("uniforms are of 24 bits", FILE, "dim=-1).double().add_", "dim=-1).float().add_", TESTS),
    Mutant(
        "a block of lanes begins with those of the row's first",
        FILE,
        "lanes[block[1]])",
        "lanes[: min(_BLOCK, len(lanes) - lane)])",
        TESTS,
    ),
    Mutant(
        "epoch and index run together in the seed",
        FILE,
        "{epoch}/{index}",
        "{epoch}{index}",
        TESTS,
    ),
    Mutant(
        "bfloat16 logits are not widened for the law",
        FILE,
        "wide = logits if logits.dtype == torch.float64 else logits.float()",
        "wide = logits",
        TESTS,
    ),
    Mutant(
        "float64 logits are narrowed for the law",
        FILE,
        "wide = logits if logits.dtype == torch.float64 else logits.float()",
        "wide = logits.float()",
        TESTS,
    ),
    Mutant(
        "a temperature of 0 is a very low one, in the full log-probs too",
        FILE,
        "torch.where(law.temperature > 0, temperature, 1.0)",
        "temperature.clamp(min=1e-3)",
        TESTS,
    ),
    Mutant(
        "of equal logits the higher id stays",
        FILE,
        "    ordered, ids = torch.sort(full, dim=-1, descending=True, stable=True)\n",
        "    ordered, ids = torch.sort(full.flip(-1), dim=-1, descending=True, stable=True)\n"
        "    ids = full.shape[-1] - 1 - ids\n",
        TESTS,
    ),
    Mutant("top-k keeps one more", FILE, "device=full.device) >= top_k", "device=full.device) > top_k", TESTS),
    Mutant(
        "top-p's mass is of all tokens, not of those that top-k kept",
        FILE,
        "probabilities = torch.softmax(ordered, dim=-1)",
        "probabilities = ordered.exp()",
        TESTS,
    ),
    Mutant(
        "top-p's mass is summed in float32",
        FILE,
        "dim=-1, dtype=torch.float64) - probabilities",
        "dim=-1) - probabilities",
        TESTS,
    ),
    Mutant(
        "top-p keeps one more where a prefix has exactly its mass",
        FILE,
        "outside = before >= top_p",
        "outside = before > top_p",
        TESTS,
    ),
    Mutant(
        "a top-p of 1 cuts the tail where a sum is rounded up to 1",
        FILE,
        "torch.where(law.top_p < 1, law.top_p, torch.inf)  #",
        "law.top_p  #",
        TESTS,
    ),
    Mutant(
        "the law that is left is not brought to a sum of 1",
        FILE,
        "torch.log_softmax(ordered.masked_fill(outside, -torch.inf), dim=-1)",
        "ordered.masked_fill(outside, -torch.inf)",
        TESTS,
    ),
    Mutant(
        "a row without top-k and top-p gets other bits beside one that has them",
        FILE,
        "return torch.where(((law.top_k > 0) | (law.top_p < 1)).view(shape), restricted, full), full",
        "return restricted, full",
        TESTS,
    ),
    Mutant(
        "of tied scores the last is the sample",
        FILE,
        "        scores, picks = noisy.max(dim=-1, keepdim=True)\n",
        "        scores, picks = noisy.flip(-1).max(dim=-1, keepdim=True)\n"
        "        picks = noisy.shape[-1] - 1 - picks\n",
        TESTS,
    ),
]
