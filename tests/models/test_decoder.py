"""The rollout decoder against transformers' full forward pass: random checkpoints of every family and kind of RoPE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import cache_for, widen
from tiny import add_node
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tlt.draft.tree import DraftTree, stack
from tlt.engine.noise import NoiseWindow
from tlt.engine.runner import Runner
from tlt.engine.sampling_table import sampling_tensors
from tlt.models.decoder import Decoder, RMSNorm
from tlt.models.families import decoder_options, read_config
from tlt.models.weights import read_safetensors
from tlt.types import Prompt, Request, Row, SamplingParams

CPU = torch.device("cpu")
VOCAB = 61
FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.2}
    | {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [2.0, 4.0, 6.0, 8.0]},
}


def rope(kind: str, theta: float = 10_000.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **ROPES[kind]}}


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "llama every head its own keys": {"num_key_value_heads": 4},
    "llama one key head": {"num_key_value_heads": 1},
    "llama tied": {"tie_word_embeddings": True},
    "llama wide heads": {"head_dim": 16},
    **{f"llama {kind}": rope(kind) for kind in ROPES},
    "mistral": {"sliding_window": None},
    "mistral window": {"sliding_window": 64, "num_key_value_heads": 1},
    "mistral yarn": rope("yarn") | {"head_dim": 16},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2 window": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    "qwen2 dynamic": rope("dynamic", 1e6),
    "qwen3": {"head_dim": 16},
    "qwen3 tied": {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3 biases": {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 4},
    "qwen3 yarn": rope("yarn", 1e6) | {"head_dim": 16},
    "qwen3 longrope": rope("longrope") | {"head_dim": 8},
}
ONE_OF_EACH_FAMILY = ["llama biases", "mistral yarn", "qwen2", "qwen3"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
each_family = pytest.mark.parametrize("variant", ONE_OF_EACH_FAMILY)


def checkpoint(folder: Path, variant: str, max_shard_size: str = "1GB", positions: int = 128) -> nn.Module:
    """Save a tiny model in which every weight, bias and norm matters. Return transformers' own float32 model."""
    torch.manual_seed(len(variant))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    changes = {"vocab_size": VOCAB, **sizes, "num_key_value_heads": 2, "max_position_embeddings": positions}
    model = AutoModelForCausalLM.from_config(FAMILIES[variant.split()[0]](**(changes | VARIANTS[variant]))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def reference(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """Return logits [T, V] of a full forward pass without a cache."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0]


class RecordingDecoder(Decoder):
    """Decoder that records the logits of the last pass, which the engine reduces to samples."""

    last: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        self.last = super().logits(hidden)
        return self.last


class Rows:
    """Batch of contexts, decoded with the engine's own runner and cache."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        contexts: Sequence[Sequence[int]],
        prefill_tokens: int = 2048,
        kind: type[RecordingDecoder] = RecordingDecoder,
    ) -> None:
        options = decoder_options(read_config(folder))
        self.decoder = kind(options, dtype, CPU)
        self.decoder.load(read_safetensors(folder), version=0)
        self.cache = cache_for(self.decoder, 100_000)
        self.cache.reserve(len(contexts), max(map(len, contexts)) + 40)
        self.runner = Runner(self.decoder, self.cache, None, prefill_tokens)
        self.runner.prefill(0, contexts)
        self.lengths = [len(context) - 1 for context in contexts]
        self.sampling = sampling_tensors([SamplingParams()] * len(contexts), CPU)
        self.noise = NoiseWindow(len(contexts), options.vocab_size, 16, CPU)
        long = SamplingParams(max_new_tokens=10**6)
        for row in range(len(contexts)):
            self.noise.append(Row(Request(Prompt(0, "", (1,)), 0, 0, row, long)), kept=0)

    def logits(self, trees: Sequence[DraftTree]) -> Tensor:
        """Compute one target pass over trees whose root is each row's last token. Nothing is committed."""
        self.noise.prepare([0] * len(trees), 16)
        self.runner.verify(
            stack(trees, CPU), self.lengths, self.noise, torch.zeros(len(trees), dtype=torch.long), self.sampling
        )
        return self.decoder.last

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep the keys of these nodes of the verified tree, as the engine does after its walk."""
        start = self.lengths[row]
        moves = torch.tensor([(row, start + node, start + i) for i, node in enumerate(path)])
        self.cache.move(*moves.unbind(1))
        self.lengths[row] += len(path)


def some_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def some_tree(root: int, size: int, seed: int) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    tree = DraftTree([root])
    for node in range(1, size):
        add_node(tree, int(torch.randint(node, (), generator=generator)), (7 * node + seed) % VOCAB)
    return tree


def path_to(tree: DraftTree, node: int) -> list[int]:
    return [node] if node == 0 else [*path_to(tree, tree.parents[node]), node]


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-4, torch.float64: 1e-11}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@every_variant
def test_ragged_prefill_cached_decode_and_trees_equal_a_full_forward(
    tmp_path: Path, variant: str, dtype: torch.dtype
) -> None:
    model = checkpoint(tmp_path, variant)
    model = widen(model.double()) if dtype == torch.float64 else model
    texts = [some_tokens(length + 3, length) for length in (1, 19, 6)]
    rows = Rows(tmp_path, dtype, [text[:-2] for text in texts])
    want = [reference(model, text) for text in texts]
    assert max(float(w.abs().max()) for w in want) > 1, (
        "logits must be large enough for the tolerance to mean something"
    )
    for step in (-3, -2):
        got = rows.logits([DraftTree([text[step]]) for text in texts])
        torch.testing.assert_close(got[:, 0], torch.stack([w[step] for w in want]), atol=tolerance(dtype), rtol=0)
        for row in range(len(texts)):
            rows.commit(row, [0])

    trees = [some_tree(text[-1], size, size) for text, size in zip(texts, (9, 1, 5), strict=True)]
    got = rows.logits(trees)
    for row, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        for node in range(len(tree.tokens)):
            path = [tree.tokens[n] for n in path_to(tree, node)]
            one_path = reference(model, text[:-1] + path)[-1]
            torch.testing.assert_close(got[row, node], one_path, atol=tolerance(dtype), rtol=0)


@each_family
def test_a_committed_branch_leaves_nothing_of_other_branches(tmp_path: Path, variant: str) -> None:
    model = widen(checkpoint(tmp_path, variant).double())
    texts = [some_tokens(5, 1), some_tokens(11, 2)]
    rows = Rows(tmp_path, torch.float64, texts)
    for turn in range(3):
        trees = [some_tree(text[-1], 8, turn + row) for row, text in enumerate(texts)]
        rows.logits(trees)
        for row, tree in enumerate(trees):
            path = path_to(tree, len(tree.tokens) - 1 - row)
            rows.commit(row, path)
            texts[row] += [*(tree.tokens[n] for n in path[1:]), turn]
        got = rows.logits([DraftTree([text[-1]]) for text in texts])
        want = torch.stack([reference(model, text)[-1] for text in texts])
        torch.testing.assert_close(got[:, 0], want, atol=1e-11, rtol=0)


@each_family
def test_a_prefill_in_chunks_and_small_batches_equals_one_pass(tmp_path: Path, variant: str) -> None:
    checkpoint(tmp_path, variant)
    texts = [some_tokens(length, length) for length in (23, 2, 40, 9)]
    roots = [DraftTree([text[-1]]) for text in texts]
    at_once = Rows(tmp_path, torch.float64, texts).logits(roots)
    for prefill_tokens in (1, 7, 60):
        in_chunks = Rows(tmp_path, torch.float64, texts, prefill_tokens).logits(roots)
        torch.testing.assert_close(in_chunks, at_once, atol=1e-12, rtol=0)


@pytest.mark.parametrize("variant", ["llama biases", "llama tied", "qwen2 tied", "qwen3"])
def test_sharded_safetensors_are_the_same_model(tmp_path: Path, variant: str) -> None:
    model = checkpoint(tmp_path, variant, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    text = some_tokens(9, 3)
    got = Rows(tmp_path, torch.float32, [text]).logits([DraftTree([text[-1]])])
    torch.testing.assert_close(got[0, 0], reference(model, text)[-1], atol=1e-4, rtol=0)


@each_family
def test_bfloat16_is_as_close_to_float32_as_in_transformers(tmp_path: Path, variant: str) -> None:
    model = checkpoint(tmp_path, variant)
    texts = [some_tokens(length, length) for length in (5, 12, 30)]
    exact = torch.stack([reference(model, text)[-1] for text in texts])
    theirs = torch.stack([reference(model.bfloat16(), text)[-1] for text in texts]).float()
    ours = Rows(tmp_path, torch.bfloat16, texts).logits([DraftTree([text[-1]]) for text in texts])
    assert ours.dtype == torch.bfloat16
    error, allowed = (ours[:, 0].float() - exact).norm(), (theirs - exact).norm()
    assert error < 1.5 * allowed
    assert error < 0.1 * exact.norm()


@pytest.mark.parametrize("size", [8, 64, 300])
def test_a_norm_of_bfloat16_is_rounded_once(size: int) -> None:
    """The reference is torch's norm in float64, rounded at the end. One number in a hundred may differ in the last
    place, at a tie."""
    generator = torch.Generator().manual_seed(size)
    x, weight = (torch.randn(n, size, generator=generator).bfloat16() for n in (200, 1))
    norm = RMSNorm(weight[0], 1e-5)
    for ours, factor in ((norm(x), weight[0].double()), (norm.unit(x), torch.ones(size).double() / size**0.5)):
        want = F.rms_norm(x.double(), (size,), factor, 1e-5).bfloat16()
        assert ours.dtype == torch.bfloat16
        assert (ours != want).double().mean() < 0.01


# -- float64 never narrows ---------------------------------------------------------------------------------------------


@each_family
def test_a_change_of_1e12th_in_any_weight_moves_float64_logits_in_proportion(tmp_path: Path, variant: str) -> None:
    checkpoint(tmp_path, variant)
    text = some_tokens(9, 4)
    state = {name: tensor.double() for name, tensor in read_safetensors(tmp_path).items()}
    used = {"model.embed_tokens.weight": (text[2], 3)}  # a row of the table that this text reads
    rows = Rows(tmp_path, torch.float64, [text])

    def logits(name: str, delta: float) -> Tensor:
        changed = state[name].clone()
        changed[used.get(name, (1,) * changed.dim())] += delta
        rows.decoder.load(state | {name: changed}, version=1)
        rows.runner.prefill(0, [text])
        return rows.logits([DraftTree([text[-1]])])

    for name in state:
        if name.endswith("k_proj.bias"):
            continue  # softmax takes away most of what it adds
        coarse, fine = ((logits(name, d) - logits(name, 0.0)).norm().item() / d for d in (1e-5, 1e-12))
        assert math.isclose(coarse, fine, rel_tol=0.2, abs_tol=2e-2), name
        assert fine > 0, name
