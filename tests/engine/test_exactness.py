"""The check at start: decoders are exact in each number format, and a planted fault is found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import load_script, qwen3
from torch import Tensor

from tlt.attention import slots
from tlt.attention.key_counts import BLOCK
from tlt.engine.exactness import ATTENTION, OTHER, PRODUCTS, Exactness, check_exactness
from tlt.models import packed
from tlt.models.decoder import Decoder, RMSNorm
from tlt.models.families import read_config
from tlt.models.loading import decoder_for, folder_weights
from tlt.models.product import Product

families = load_script(Path(__file__).parents[2] / "bench" / "families.py")
Patch = pytest.MonkeyPatch
ATTEND = F.scaled_dot_product_attention
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def decoder_in(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    target = decoder_for(read_config(folder), dtype, torch.device("cpu"))
    target.load(folder_weights(folder, dtype), 0)
    return target


def save(folder: Path, **changes: Any) -> Path:
    """Save a Qwen3 with room for two blocks of keys, and with 3 queries per key-value head, which need padding."""
    sizes = {"hidden_size": 64, "num_attention_heads": 6, "head_dim": 32, "vocab_size": 257}
    sizes["max_position_embeddings"] = 1024
    qwen3(**sizes | changes, initializer_range=0.3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


@each_dtype
def test_the_fused_decoder_is_exact_and_the_check_changes_no_state(folder: Path, dtype: torch.dtype) -> None:
    random = torch.get_rng_state()
    assert check_exactness(decoder_in(folder, dtype)).facts == {
        "exact": True,
        "exactness": "exact: drafts and other responses change no bit of a response's tokens and log-probs",
    }
    assert torch.equal(torch.get_rng_state(), random)


@each_dtype
@pytest.mark.parametrize("name", ["olmo2", "gemma3_text"])
def test_the_generic_decoder_is_exact(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    families.save_small(name, tmp_path)
    assert check_exactness(decoder_in(tmp_path, dtype)).exact


@pytest.mark.parametrize("positions", [3, 5, 20])
def test_a_model_with_few_positions_is_decoded_within_them(tmp_path: Path, positions: int) -> None:
    target, longest = decoder_in(save(tmp_path, max_position_embeddings=positions)), 0
    forward = target.forward

    def watched(tokens: Tensor, places: Tensor, *rest: Any) -> Tensor:
        nonlocal longest
        longest = max(longest, int(places.max()) + 1)
        return forward(tokens, places, *rest)

    target.forward = watched
    assert check_exactness(target).exact
    assert longest == positions


class ByAnotherKernel(Product):
    """Planted bug: the sum over the inputs of a single row begins at their other end."""

    def __init__(self, product: Product) -> None:
        super().__init__(product.weight)
        self.reversed = product.weight.flip(1).t().contiguous()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if len(x) > 1:
            return super().__call__(x, residual)
        return x.flip(1) @ self.reversed + (0 if residual is None else residual)


def one_product(target: Decoder, patch: Patch) -> None:
    patch.setattr(target.layers[1], "down", ByAnotherKernel(target.layers[1].down))


def the_head(target: Decoder, patch: Patch) -> None:
    patch.setattr(target, "to_logits", ByAnotherKernel(target.to_logits))


def by_shape(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Tensor:
    """Compute attention as kernels of some libraries do: the order of the keys in a sum depends on the numbers of keys
    and of queries. It is one order for all multiples of 64 and of 4."""
    if key.shape[2] % 64 or query.shape[2] % 4:
        key, value, attn_mask = key.flip(2), value.flip(2), attn_mask.flip(-1)
    return ATTEND(query, key, value, attn_mask=attn_mask)


def masks(target: Decoder, patch: Patch) -> None:
    patch.setattr(F, "scaled_dot_product_attention", by_shape)
    patch.setattr(slots, "rounded_up", lambda tokens, counts: tokens)


def queries(target: Decoder, patch: Patch) -> None:
    patch.setattr(F, "scaled_dot_product_attention", by_shape)
    patch.setattr(slots, "full_queries", lambda head_dim, dtype: 1)


def test_attention_is_exact_if_only_its_kernel_depends_on_shapes(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", by_shape)
    assert check_exactness(decoder_in(folder)).exact


def second_block(target: Decoder, patch: Patch) -> None:
    """Let the bits depend on the number of queries, but only if there is more than one block of keys."""

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Tensor:
        if key.shape[2] > BLOCK and query.shape[2] > 4:
            key, value, attn_mask = key.flip(2), value.flip(2), attn_mask.flip(-1)
        return ATTEND(query, key, value, attn_mask=attn_mask)

    patch.setattr(F, "scaled_dot_product_attention", attention)


def a_norm(target: Decoder, patch: Patch) -> None:
    norm = RMSNorm.__call__
    patch.setattr(RMSNorm, "__call__", lambda self, x: norm(self, x) * (1 + 1e-6 * (len(x) == 1)))


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        *((one_product, PRODUCTS), (the_head, PRODUCTS), (a_norm, OTHER)),
        *((masks, ATTENTION), (queries, ATTENTION), (second_block, ATTENTION)),
    ],
)
def test_a_planted_fault_is_found_and_named(
    folder: Path, monkeypatch: Patch, plant: Callable[[Decoder, Patch], None], name: str
) -> None:
    target = decoder_in(folder)
    plant(target, monkeypatch)
    found = check_exactness(target)
    assert (found.exact, found.operations) == (False, (name,))
    assert found.meaning.startswith(f"not exact: the last bits of {name} depend on")


def test_a_mixture_of_experts_is_exact_unless_its_routers_call_functions_of_pytorch(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    families.save_small("mixtral", tmp_path)
    assert check_exactness(decoder_in(tmp_path)).exact
    monkeypatch.setattr(packed, "_INTERCEPTED", frozenset())
    assert check_exactness(decoder_in(tmp_path)).operations == (OTHER,)


def test_another_engine_is_not_checked() -> None:
    target: Any = SimpleNamespace(dtype=torch.float32)
    assert check_exactness(target).exact is None
    assert "vLLM" in check_exactness(target).meaning


def test_several_workers_are_exact_if_each_is() -> None:
    exact, one, two = Exactness(True), Exactness(True, (PRODUCTS,)), Exactness(True, (PRODUCTS, ATTENTION))
    assert Exactness.of_all([exact, exact]).exact
    assert Exactness.of_all([exact, one, two]) == Exactness(True, (ATTENTION, PRODUCTS))
    assert Exactness.of_all([exact, Exactness()]).exact is None
    assert f"{ATTENTION} and {PRODUCTS} depend" in Exactness.of_all([one, two]).meaning
