"""Updates of rows of sequences against the same updates one sequence at a time, and against plain attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tiny import random_batch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask

from tlt.config import RolloutConfig, TrainConfig
from tlt.models.hugging_face import load_model
from tlt.rl import shared_prefix as module
from tlt.rl.lora import AdaptedPolicy
from tlt.rl.policy import Policy
from tlt.rl.shared_prefix import LayerMask, SharedRow, at_once, attend, share_prefixes
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
    "starcoder2": {"sliding_window": 5},
    "phi3": {"sliding_window": 5},
    "olmo3": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2},
    "ministral": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"sliding_window": 5, "num_local_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # it cannot share
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
    policy.passes.packer.shares &= shares
    for model in filter(None, (policy.model, policy.reference)):
        widen_norms(model)
    return policy


def grouped_batch(longest: int = 9) -> TrainBatch:
    """Return groups of 4, 1, 4 and 2 responses of up to `longest` tokens. One is empty, one masked, and one has no
    advantage."""
    batch = random_batch(VOCAB, seed=3, longest=longest, responses=11)
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


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradient_equal_those_of_each_sequence_alone(
    folders: Callable[[str], Path], family: str, shares: bool
) -> None:
    batch, policy = grouped_batch(longest=40), make_policy(folders(family), shares, micro_batch_tokens=200)
    found = policy.logprobs(batch)
    _, gradients, _ = updated(policy, batch)
    model, loss = load_model(folders(family), torch.float64, CPU), torch.zeros((), dtype=torch.float64)
    for i, (prompt, response) in enumerate(zip(batch.prompt_ids, batch.response_ids, strict=True)):
        logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0]
        assert found[i] == pytest.approx(own.tolist(), abs=1e-5)  # norms work in float32
        if len(own) and i not in batch.masked:
            loss = loss - batch.advantages[i] * torch.exp(own - own.detach()).mean() / len(batch.response_ids)
    loss.backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize(
    "train",
    [
        {"micro_batch_tokens": 20},
        {"micro_batch_tokens": 10_000},
        {"kl_weight": 0.1, "loss": "dapo"},
        {"kl_weight": 0.1, "kl_in": "reward"},
        {"gradient_checkpointing": True},
        {"updates_per_step": 2, "loss": "gspo"},
        {"importance_cap": 2.0},
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


def layer_mask(tokens: int, field: str = "", size: int = 0) -> LayerMask:
    """Return what transformers gives a layer with this window or chunk in place of a mask, for a row of `tokens`."""
    makers = {"sliding_window": create_sliding_window_causal_mask, "attention_chunk_size": create_chunked_causal_mask}
    config = AutoConfig.for_model("llama", **({field: size} if field else {}))
    config._attn_implementation = "tlt_shared_prefix"
    ones = torch.ones(1, tokens, dtype=torch.long)
    mask: Any = makers.get(field, create_causal_mask)(config, torch.empty(1, tokens, 1), ones, None)
    return mask


@pytest.mark.parametrize(
    "local", [(), *(("sliding_window", size) for size in (1, 3, 100)), *(("attention_chunk_size", k) for k in (1, 4))]
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("attention", [attend, at_once], ids=["on CPUs", "on CUDA"])
def test_attention_equals_that_of_each_sequence_alone(attention: Any, kv_heads: int, local: tuple[Any, ...]) -> None:
    groups = [(5, [3, 0, 4]), (2, [1, 6, 7]), (3, [])]
    row, layer = SharedRow(groups), cast(Any, torch.nn.Module())
    layer.num_key_value_groups = 4 // kv_heads
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)

    query, key, value = (numbers(1, heads, sum(row.sizes), 8) for heads in (4, kv_heads, kv_heads))
    mask = layer_mask(sum(row.sizes), *local)
    found = attention(layer, query, key, value, mask, shared_row=row, scaling=0.2)
    found = found[0] if attention is attend else found
    assert row.layers == 1
    assert found.shape == (1, sum(row.sizes), 4, 8)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    total = torch.zeros((), dtype=torch.float64)
    for places, answered in sequences(groups):
        alone = plain_attention(query[:, :, places], key[:, :, places], value[:, :, places], *local).transpose(1, 2)
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


def plain_attention(query: Tensor, key: Tensor, value: Tensor, field: str = "", size: int = 1000) -> Tensor:
    new, old = torch.arange(query.shape[2])[:, None], torch.arange(query.shape[2])
    near = new // size == old // size if field == "attention_chunk_size" else new - old < size
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=(old <= new) & near, scale=0.2)


@pytest.mark.parametrize(("prompt", "responses", "masks"), [(50, [10] * 8, {(10, 60)}), (10, [60] * 2, set[Any]())])
def test_no_mask_is_as_large_as_the_row(prompt: int, responses: list[int], masks: set[tuple[int, int]]) -> None:
    """Long responses need none."""
    mask, made, tensor = layer_mask(130), set[Any](), torch.randn(1, 2, 130, 4)

    class Watched(LayerMask):
        def of_last(self, new: int, whole: int) -> Tensor | None:
            found = mask.of_last(new, whole)
            made.add(None if found is None else found.shape[2:])
            return found

    attend(torch.nn.Module(), tensor, tensor, tensor, Watched(), shared_row=SharedRow([(prompt, responses)]))
    assert made - {None} == masks


def test_a_device_computes_a_row_in_one_call_per_layer(folders: Callable[[str], Path], monkeypatch: Any) -> None:
    """A row as long as the limit is computed at once. Log-probs and gradients equal those of calls for each group."""
    batch, found = grouped_batch(), list[Any]()
    for limit in (0, 40):
        calls = list[int]()
        monkeypatch.setattr(module, "_has_slow_launches", lambda query: True)
        monkeypatch.setattr(module, "_AT_ONCE", limit)

        def counted(*arguments: Any, calls: list[int] = calls, **settings: Any) -> Any:
            calls.append(arguments[1].shape[2])
            return sdpa_attention_forward(*arguments, **settings)

        monkeypatch.setattr(module, "sdpa_attention_forward", counted)
        policy = make_policy(folders("gemma3_text"), shares=True)
        calls.clear()
        found.append((policy.logprobs(batch), updated(policy, batch)[1], len(calls)))
    (apart, gradients, many), (once, others, few) = found
    assert few < many / 2
    for own, other in zip(once, apart, strict=True):
        assert own == pytest.approx(other, abs=1e-12)
    assert_same(others, gradients)


# -- models that cannot share ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("softcap", 30.0, "`sdpa` attention does not support `softcap`"),
        ("position_bias", torch.zeros(1, 1, 4, 4), "the broadcast shape"),
        ("attention_mask", None, "its layers do not use the mask that transformers makes"),
    ],
)
def test_prompts_are_not_shared_if_their_attention_cannot_be_computed(
    setting: str, value: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("qwen3")
    inner = model.base_model.layers[1].self_attn
    before = inner.forward
    inner.forward = lambda **named: before(**named | {setting: value})
    assert not share_prefixes(model)
    assert "Qwen3ForCausalLM cannot share prompts, because" in caplog.text
    assert reason in caplog.text
    assert model.config._attn_implementation == "sdpa"


def test_prompts_are_not_shared_with_unregistered_layers(caplog: pytest.LogCaptureFixture) -> None:
    model = build("lfm2")
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
