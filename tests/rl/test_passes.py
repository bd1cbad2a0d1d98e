"""Passes of the update: their determinism, and that their log-probs have the bits of the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tiny import random_batch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tlt.config import ConfigError, EngineConfig, RolloutConfig, TrainConfig
from tlt.engine.engine import Engine
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options
from tlt.rl.batching import by_prompt, pack
from tlt.rl.logprobs import TransformersForward, token_logprobs
from tlt.rl.passes import EngineForward, can_follow, deterministic
from tlt.rl.policy import Policy
from tlt.types import Prompt, Request, Response, SamplingParams, TrainBatch


def settings() -> tuple[bool, bool, bool]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return enabled, warns, torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _settings_are_restored() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize(("mode", "warns"), [(False, False), (True, False), (True, True)])
def test_the_settings_of_the_process_are_restored(mode: bool, warns: bool, enabled: bool) -> None:
    torch.use_deterministic_algorithms(mode, warn_only=warns)
    before = settings()
    with pytest.raises(KeyError), deterministic(enabled):  # noqa: PT012
        # attention has a fixed order only if PyTorch may raise
        assert settings() == ((True, False, False) if enabled else before)
        raise KeyError
    assert settings() == before


def test_an_operation_without_a_fixed_order_names_the_remedy() -> None:
    said = "put_ does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'."
    with pytest.raises(ConfigError, match=r"put_ does not.*set train\.deterministic = false"), deterministic(True):
        raise RuntimeError(said)
    for enabled, other in ((False, said), (True, "the wrong shape")):
        with pytest.raises(RuntimeError, match=other[:9]) as raised, deterministic(enabled):
            raise RuntimeError(other)
        assert not isinstance(raised.value, ConfigError)


CPU = torch.device("cpu")
VOCAB = 61
TEMPERATURE = 0.7
SIZES = {
    **{"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.3},
    **{"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0},
}
FAMILIES: dict[str, Any] = {
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral, one key per query": MistralConfig(**SIZES | {"num_key_value_heads": 6}, sliding_window=None),
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES),
}
DTYPES = [torch.float32, torch.bfloat16]


def make_policy(folder: Path, family: str, dtype: torch.dtype, **train: Any) -> Policy:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(FAMILIES[family])
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return Policy(folder, dtype, CPU, TrainConfig(**train), RolloutConfig(temperature=TEMPERATURE))


def rollout(policy: Policy, dtype: torch.dtype, prompts: list[int], group: int, length: int) -> list[Response]:
    """Decode a group of responses for each prompt, given by its number of tokens. At most 5 are decoded at once."""
    decoder = Decoder(decoder_options(policy.model.config), dtype, CPU)
    decoder.load(policy.state_dict(), 0)
    texts = [Prompt(i, "", tuple((7 * i + 5 * k) % VOCAB for k in range(n))) for i, n in enumerate(prompts)]
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=length, stop_token_ids=(1,))
    requests = [Request(text, 0, k, 100 * i + k, sampling) for i, text in enumerate(texts) for k in range(group)]
    return sorted(Engine(decoder, EngineConfig(max_rows=5)).generate(requests), key=lambda r: r.request.seed)


def batch_of(responses: list[Response]) -> TrainBatch:
    prompts, tokens = [r.request.prompt.token_ids for r in responses], [list(r.token_ids) for r in responses]
    logprobs = [list(r.full_logprobs) for r in responses]
    return TrainBatch(prompts, tokens, [1.0] * len(tokens), logprobs, rewards=[[0.0]] * len(tokens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_the_update_are_those_of_the_rollout_to_the_bit(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    policy = make_policy(tmp_path, family, dtype)
    batch = batch_of(rollout(policy, dtype, [70, 3, 130], 3, 50))
    assert policy.passes.packer.shares
    assert policy.logprobs(batch) == batch.rollout_logprobs
    policy.passes.packer.shares = False
    assert policy.logprobs(batch) == batch.rollout_logprobs


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences_and_small_micro_batches_have_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    policy = make_policy(tmp_path, "qwen3", dtype, micro_batch_tokens=700)
    batch = batch_of(rollout(policy, dtype, [530], 2, 150))
    assert max(map(len, batch.response_ids)) > 40
    assert policy.logprobs(batch) == batch.rollout_logprobs


SILU = F.silu


def silu_by_parts(x: Tensor) -> Tensor:
    """Compute SiLU as PyTorch does, but let the last elements of a thread's part differ by more than a last bit."""
    out, threads = SILU(x), torch.get_num_threads()
    if threads > 1 and out.numel() > 32768:
        for part in out.view(-1).split(-(-out.numel() // threads)):
            part[len(part) - len(part) % 8 :] *= 1.01
    return out


def test_an_update_on_several_threads_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(tmp_path, "qwen3", torch.float32)
    batch = batch_of(rollout(policy, torch.float32, [331, 131], 6, 60))
    assert sum(map(len, batch.response_ids)) + 331 + 131 > 32768 / 80
    monkeypatch.setattr(F, "silu", silu_by_parts)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert policy.logprobs(batch) == batch.rollout_logprobs
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_transformers(tmp_path: Path, family: str, shares: bool, checkpointing: bool) -> None:
    policy = make_policy(tmp_path, family, torch.float32, gradient_checkpointing=checkpointing)
    given = random_batch(VOCAB, longest=40)
    prompts, responses = given.prompt_ids * 2, [*given.response_ids, *given.response_ids[::-1]]
    layout = by_prompt(range(12), prompts) if shares else [[i] for i in range(12)]
    micro = pack(layout, prompts, responses, CPU)
    found = []
    for forward in (policy.passes.forwards[id(policy.model)], TransformersForward(policy.model, autocast=False)):
        logprobs, _ = token_logprobs(forward, micro, TEMPERATURE)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        found.append({name: parameter.grad for name, parameter in policy.model.named_parameters()})
        policy.model.zero_grad()
    assert found[0].keys() == found[1].keys()
    for name, wanted in found[1].items():
        assert (found[0][name] - wanted).norm() < 1e-4 * wanted.norm(), name


def test_the_pass_follows_the_weights(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, "qwen3", torch.bfloat16, learning_rate=0.1)
    batch = batch_of(rollout(policy, torch.bfloat16, [9, 30], 2, 20))
    before = policy.logprobs(batch)
    policy.update(batch, 0)
    later = batch_of(rollout(policy, torch.bfloat16, [9, 30], 2, 20))
    assert policy.logprobs(batch) != before
    assert policy.logprobs(later) == later.rollout_logprobs


def test_the_mismatch_of_an_update_is_zero(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, "llama, biases", torch.bfloat16)
    metrics = policy.update(batch_of(rollout(policy, torch.bfloat16, [9, 30], 4, 20)), 0)
    assert metrics["mismatch_mean"] == metrics["mismatch_p999"] == 0.0


def test_adapters_and_float64_are_left_to_transformers(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, "qwen3", torch.float32)
    model = policy.model
    assert isinstance(policy.passes.forwards[id(model)], EngineForward)
    assert not can_follow(model, torch.float64)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert not can_follow(model, torch.float32)
