"""Updates with shared prompts against the same updates with a prompt per response, and against plain attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_batch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tlt.config import RolloutConfig, TrainConfig
from tlt.rl.batching import by_prompt, pack_shared, plan_shared, shared_tokens
from tlt.rl.lora import AdaptedPolicy
from tlt.rl.policy import Policy
from tlt.rl.shared_prefix import SharedRow, attend, share_prefixes
from tlt.types import TrainBatch

CPU = torch.device("cpu")
VOCAB = 31
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2},
    "granite": {"attention_multiplier": 0.3},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}


def build(family: str, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
    others: dict[str, Any] = {"initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes | heads | others | FAMILIES.get(family, {}) | changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            build(family).save_pretrained(made[family])
        return made[family]

    return folder


def widen_norms(model: Any) -> None:
    """Let norms work in float64. In float32 they round by more than the two updates may differ."""
    for norm in (m for m in model.modules() if type(m).__name__.endswith("RMSNorm")):
        one = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0
        eps = getattr(norm, "variance_epsilon", None) or norm.eps

        def forward(x: Tensor, norm: Any = norm, one: float = one, eps: float = eps) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (one + norm.weight)

        norm.forward = forward


def make_policy(folder: Path, shares: bool, lora: bool = False, **train: Any) -> Policy:
    fields = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "micro_batch_tokens": 40, "loss": "grpo"} | train
    if lora:
        fields["lora"] = {"rank": 4}
    kind = AdaptedPolicy if lora else Policy
    policy = kind(folder, torch.float64, CPU, TrainConfig(**fields), RolloutConfig(max_new_tokens=12), folder)
    assert policy.passes.packer.shares
    policy.passes.packer.shares = shares
    for model in filter(None, (policy.model, policy.reference)):
        widen_norms(model)
    return policy


def grouped_batch() -> TrainBatch:
    """Return groups of 4, 1, 4 and 2 responses of 0 to 9 tokens. One is empty, one masked, and one has no advantage."""
    batch = random_batch(VOCAB, seed=3, responses=11)
    prompts = [tuple((7 * k + j) % VOCAB for j in range(size)) for k, size in enumerate((9, 4, 16, 12))]
    batch.prompt_ids = [prompts[k] for k in (0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3)]
    batch.response_ids[2], batch.rollout_logprobs[2] = [], []
    batch.masked = {6}
    batch.advantages[9] = 0.0
    return batch


def updated(policy: Policy, batch: TrainBatch) -> tuple[dict[str, float], dict[str, Tensor], int]:
    """Return metrics, the first gradient that the optimizer gets, and the number of tokens that went through the
    policy."""
    gradients: dict[str, Tensor] = {}
    tokens, pack = list[int](), policy.passes.packer.pack

    def look(*_: Any) -> None:
        if not gradients:
            gradients.update({n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None})

    def count(batch: TrainBatch, layout: Any) -> Any:
        micro = pack(batch, layout)
        tokens.append(micro.input_ids.numel())
        return micro

    policy.optimizer.register_step_pre_hook(look)
    policy.passes.packer.pack = count  # type: ignore[method-assign]
    return policy.update(batch, 0), gradients, sum(tokens)


def assert_same(shared: dict[str, Tensor], apart: dict[str, Tensor]) -> None:
    assert shared.keys() == apart.keys()
    for name, gradient in apart.items():
        torch.testing.assert_close(shared[name], gradient, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_equal_those_of_a_prompt_per_response(folders: Callable[[str], Path], family: str) -> None:
    # with a window, rows that are packed with a mask would ignore it: a budget of 1 gives each response a row alone
    batch = grouped_batch()
    ours, theirs = make_policy(folders(family), True), make_policy(folders(family), False, micro_batch_tokens=1)
    (metrics, shared, fewer), (expected, apart, tokens) = updated(ours, batch), updated(theirs, batch)
    assert fewer < tokens
    for name in ("loss", "entropy"):
        assert metrics[name] == pytest.approx(expected[name], abs=1e-10)
    assert_same(shared, apart)


@pytest.mark.parametrize(
    "train",
    [
        {"micro_batch_tokens": 20},
        {"micro_batch_tokens": 10_000},
        {"kl_weight": 0.1, "loss": "dapo"},
        {"kl_weight": 0.1, "kl_in": "reward"},
        {"gradient_checkpointing": True},
        {"updates_per_step": 2, "loss": "gspo"},
        {"logits_mb": 1, "importance_cap": 2.0},
        {"lora": True},
    ],
    ids=str,
)
def test_every_objective_shares_prompts(folders: Callable[[str], Path], train: dict[str, Any]) -> None:
    batch = grouped_batch()
    batch.rewards = [[1.0, 0.0, 0.0, 2.0], [1.0, 0.0, 1.0, 0.5, 0.7], [1.0, 0.0]]
    (ours, shared, fewer), (theirs, apart, tokens) = (
        updated(make_policy(folders("qwen3"), shares, **train), batch) for shares in (True, False)
    )
    assert fewer < tokens
    for name, value in theirs.items():  # the mismatch is computed in float32
        assert ours[name] == pytest.approx(value, abs=1e-6 if "mismatch" in name else 1e-10), name
    assert_same(shared, apart)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_that_of_each_sequence_alone(kv_heads: int, window: int | None) -> None:
    groups = [(5, [3, 0, 4]), (2, [1, 6, 7]), (3, [])]
    row = SharedRow(groups, CPU)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)

    query, key, value = (numbers(1, heads, sum(row.sizes), 8) for heads in (4, kv_heads, kv_heads))
    found, _ = attend(torch.nn.Module(), query, key, value, None, shared_row=row, scaling=0.2, sliding_window=window)
    assert found.shape == (1, sum(row.sizes), 4, 8)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    total = torch.zeros((), dtype=torch.float64)
    for places, answered in sequences(groups):
        alone = plain_attention(query[:, :, places], key[:, :, places], value[:, :, places], window).transpose(1, 2)
        torch.testing.assert_close(found[:, places[answered:]], alone[:, answered:], rtol=0, atol=1e-14)
        total = total + (alone * weights[:, places])[:, answered:].sum()
    inputs = (query, key, value)
    ours, theirs = torch.autograd.grad((found * weights).sum(), inputs), torch.autograd.grad(total, inputs)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-13)


def sequences(groups: list[tuple[int, list[int]]]) -> Iterator[tuple[list[int], int]]:
    """Return the places of each sequence in the row, and how many of its tokens it shares with an earlier sequence:
    those of the prompt."""
    at = 0
    for prompt, responses in groups:
        before = list(range(at, at + prompt))
        yield before, 0
        at += prompt
        for own in responses:
            yield [*before, *range(at, at + own)], prompt
            at += own


def plain_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    apart = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    mask = (apart >= 0) & (apart < (window or 1000))
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.2)


@pytest.mark.parametrize(("prompt", "responses", "masks"), [(50, [10] * 8, [(10, 60)]), (10, [60] * 2, [])])
def test_no_mask_is_as_large_as_the_row(prompt: int, responses: list[int], masks: list[tuple[int, int]]) -> None:
    """Long responses need none."""
    row = SharedRow([(prompt, responses)], CPU)
    tensor = torch.randn(1, 2, 130, 4)
    attend(torch.nn.Module(), tensor, tensor, tensor, None, shared_row=row)
    assert [mask.shape for mask in row._masks.values()] == masks


# -- models that cannot share ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "value"), [("softcap", 30.0), ("s_aux", torch.zeros(4))])
def test_prompts_are_not_shared_if_their_attention_cannot_be_computed(
    setting: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("qwen3")
    inner = model.base_model.layers[1].self_attn
    before = inner.forward
    inner.forward = lambda **named: before(**named, **{setting: value})
    assert not share_prefixes(model)
    assert f"Qwen3ForCausalLM cannot share prompts, because its attention uses {setting}" in caplog.text
    assert model.config._attn_implementation == "sdpa"


def test_prompts_are_not_shared_with_unregistered_layers(caplog: pytest.LogCaptureFixture) -> None:
    model = build("lfm2", layer_types=["conv", "full_attention"])
    assert not share_prefixes(model)
    assert "it has layers of type conv" in caplog.text
    model = build("qwen3")
    model.base_model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    assert not share_prefixes(model)
    assert (
        "its 2 layers must each call transformers' attention registry once, and the number of calls was 1"
        in caplog.text
    )


def test_prompts_are_not_shared_if_the_model_computes_differently(caplog: pytest.LogCaptureFixture) -> None:
    model = build("qwen3")
    inner = model.base_model.rotary_emb
    before = inner.forward
    inner.forward = lambda x, position_ids: before(x, torch.arange(x.shape[1])[None])
    assert not share_prefixes(model)
    assert "differ from those of each sequence alone" in caplog.text


def test_sharing_is_chosen_if_it_saves_more_than_its_attention_calls_cost() -> None:
    assert shared_tokens(20, [30] * 8) == 20 + 8 * 30
    assert shared_tokens(2, [30] * 8) == 8 * 32, "14 tokens are saved, and 9 calls cost 18"
    assert shared_tokens(20, [30]) == 50


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=20), st.integers(1, 60))
def test_responses_have_one_place_after_their_prompt_within_the_budget(drawn: list[tuple[int, int]], most: int) -> None:
    prompts = [tuple([k] * (3 * k + 1)) for k, _ in drawn]
    responses = [[9] * own for _, own in drawn]
    layouts = plan_shared(by_prompt(range(len(drawn)), prompts), prompts, responses, most)
    placed = [i for layout in layouts for row in layout.rows for i in row]
    assert sorted(placed) == list(range(len(drawn)))
    for layout in layouts:
        assert layout.shared
        assert all(len({prompts[i] for i in row}) == 1 for row in layout.rows)
        assert len({prompts[row[0]] for row in layout.rows}) == len(layout.rows), "a prompt is there once"
        tokens = pack_shared(layout.rows, prompts, responses, CPU).input_ids.numel()
        assert tokens <= most or sum(map(len, layout.rows)) == 1
