"""Which families of transformers tlt's engine decodes, each tried as a small random model in float64 and float32.

    python bench/families.py [NAME ...]        all causal language models of the installed transformers, or these

A family passes if greedy tokens are those of `generate`, if drafts change no token at temperature 1, if the log-probs
and the gradient of an update are those of transformers alone, one sequence at a time, with and without shared prompts,
and if all this holds after an update. Some sequences are longer than the sliding window. Two updates by LoRA must
change exactly the weights of linear layers and experts, and engine and policy must be one model after them. Others are
listed with the reason that a user would read.
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from tlt import Engine, Prompt, SamplingParams, make_requests
from tlt.config import EngineConfig, RolloutConfig, TrainConfig
from tlt.config.sections import LoraConfig
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.tuner import Fixed
from tlt.files import first_line
from tlt.models.decoder import Decoder
from tlt.models.families import is_fused, read_config
from tlt.models.hugging_face import empty_model, experts_in, load_model
from tlt.models.loading import decoder_for, folder_weights
from tlt.rl.logprobs import FixedLogprobs
from tlt.rl.lora import AdaptedPolicy, merged_state
from tlt.rl.measure import TokenMetrics
from tlt.rl.parallel import Alone
from tlt.rl.parity import take_weights
from tlt.rl.policy import Policy, ShardSum, Update
from tlt.types import TrainBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MORE: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "sliding_window": 70,  # shorter than the longest text
}
"""set where a family's config has the field"""
NEW = 24
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""largest difference of two log-probs, and of two gradients relative to the largest entry"""
LARGEST = 10_000_000


def policy_of(folder: Path, dtype: torch.dtype) -> Policy:
    return Policy(folder, dtype, DEVICE, TrainConfig(learning_rate=1e-2), RolloutConfig())


def greedy(model: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Decode with `generate` of transformers."""
    settings = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "eos_token_id": None}
    tokens = torch.tensor([prompt], device=DEVICE)
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    return tuple(found[0, len(prompt) :].tolist())


def update(policy: Policy, decoded: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Take an optimizer step on these responses, two to each prompt. Return "" if all is well, else what is wrong."""
    prompts, responses = [prompt for prompt, _ in decoded], [list(response) for _, response in decoded]
    batch = TrainBatch(prompts, responses, [1.0, -1.0] * (len(decoded) // 2), [[0.0] * len(r) for r in responses])
    packer = policy.passes.packer
    expected, gradient = alone(policy, batch)
    rounding = ROUNDING[policy.model.dtype]
    for shares in (False, True) if packer.shares else (False,):
        packer.shares, way = shares, "with shared prompts" if shares else "with a prompt per response"
        logprobs = expected.new_tensor([x for response in policy.logprobs(batch) for x in response])
        if not torch.allclose(logprobs, expected, atol=rounding):
            return f"log-probs {way} differ from those of single sequences"
        found, largest = gradient_of(policy, batch), max(map(torch.max, map(torch.abs, gradient.values())))
        if any((found[name] - own).abs().max() > rounding * largest for name, own in gradient.items()):
            return f"gradients {way} differ from those of single sequences"
    return "" if policy.update(batch, 0)["grad_norm"] > 0 else "the gradient is 0"


def alone(policy: Policy, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probs [tokens] and the gradient of transformers' own model, one sequence at a time."""
    model, logprobs = copy.deepcopy(policy.model), []
    model.set_attn_implementation("sdpa")
    for prompt, response, advantage in zip(batch.prompt_ids, batch.response_ids, batch.advantages, strict=True):
        logits = model(torch.tensor([[*prompt, *response]], device=DEVICE), use_cache=False).logits[0]
        distribution = logits[len(prompt) - 1 : -1].log_softmax(-1)
        own = distribution.gather(-1, torch.tensor(response, device=DEVICE)[:, None])[:, 0]
        (-advantage * torch.exp(own - own.detach()).sum()).backward()
        logprobs.append(own.detach().cpu())
    return torch.cat(logprobs), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradient_of(policy: Policy, batch: TrainBatch) -> dict[str, Tensor]:
    update, tokens = Update(policy, policy.passes, batch, 0, Alone()), TokenMetrics(DEVICE)
    for micro in policy.passes.micro_batches([policy.model], batch, range(len(batch.response_ids))):
        update.add_gradient(micro, FixedLogprobs({}, {}), ShardSum(), tokens)
    found = {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}
    policy.optimizer.zero_grad(set_to_none=True)
    return found


def small_config(name: str) -> Any:
    kind = CONFIG_MAPPING[name]
    known = kind().to_dict()
    if is_fused(kind()):  # it decodes as far as a window reaches
        known.pop("sliding_window", None)
    return kind(**SIZES | {field: value for field, value in MORE.items() if field in known})


def save_small(name: str, folder: Path) -> None:
    """Write a small random model of a family, with weights large enough for its tokens to depend on the context."""
    config = small_config(name)
    size = sum(weight.numel() for weight in empty_model(config).parameters())
    if size > LARGEST:
        raise ValueError(f"it has {size:,} weights with the sizes that are known here")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **experts_in(torch.float64))
    for weight in model.parameters():
        weight.data.mul_(2.0 if weight.dim() > 1 else 1.0)
    model.save_pretrained(folder)


def try_family(name: str, dtypes: Sequence[torch.dtype] = tuple(ROUNDING)) -> str:
    """Return "" for a family that passes in these number formats, else what is wrong."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            save_small(name, folder)
        except Exception as error:  # a config may need fields that are not known here
            return f"no small model can be made ({first_line(error)[:200]})"
        try:
            return next(filter(None, (_compare(folder, d) or _adapt(folder, d) for d in dtypes)), "")
        except ValueError as error:
            return first_line(error)[:200]


def _compare(folder: Path, dtype: torch.dtype) -> str:
    target = decoder_for(read_config(folder), dtype, DEVICE)
    target.load(folder_weights(folder, dtype), 0)
    policy, drafted, at = policy_of(folder, dtype), Strategy("suffix", 6), str(dtype).removeprefix("torch.")
    for version in (0, 1):
        take_weights(target, policy, version)
        plain = decode(target, 0.0, PLAIN)
        if wrong := sum(tokens != greedy(policy.model, prompt) for prompt, tokens in plain):
            return f"{wrong} of {len(plain)} greedy responses differ from generate at version {version} in {at}"
        if any(decode(target, t, PLAIN) != decode(target, t, drafted) for t in (0.0, 1.0)):
            return f"drafts change tokens at version {version} in {at}"
        if wrong := update(policy, sorted(plain + decode(target, 1.0, PLAIN))):
            return f"{wrong} in {at}"
    return ""


def _adapt(folder: Path, dtype: torch.dtype) -> str:
    """Take two optimizer steps by LoRA with its default targets. The first changes only one half of each adapter."""
    lora = TrainConfig(learning_rate=1e-2, lora=LoraConfig(rank=2))
    policy = AdaptedPolicy(folder, dtype, DEVICE, lora, RolloutConfig(), reference=folder)
    before, target = merged_state(policy.model), decoder_for(read_config(folder), dtype, DEVICE)
    texts = torch.randint(3, VOCABULARY, (8, 30), generator=torch.Generator().manual_seed(0)).tolist()
    for _ in range(2):
        if wrong := update(policy, [(tuple(text[:5]), tuple(text[5:])) for text in texts]):
            return f"LoRA: {wrong}"
    take_weights(target, policy, 2)
    changed = {name for name, weight in merged_state(policy.model).items() if not torch.equal(weight, before[name])}
    if odd := changed ^ linear_weights(load_model(folder, dtype, DEVICE)):
        return f"LoRA trains {min(odd)}" if min(odd) in changed else f"LoRA does not train {min(odd)}"
    return ""


def linear_weights(model: Any) -> set[str]:
    """Return the names of the weights of linear layers except the head, and of experts."""
    layers = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D)}
    layers -= {id(model.get_output_embeddings().weight)}
    return {name for name, weight in model.named_parameters() if id(weight) in layers or weight.dim() == 3}


def decode(target: Decoder, temperature: float, strategy: Strategy) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return prompts with their responses."""
    engine = Engine(target, EngineConfig(), [SuffixDrafter()] if strategy != PLAIN else [], Fixed(strategy))
    sampling = SamplingParams(temperature=temperature, max_new_tokens=NEW)
    texts = [tuple((7 * i + 3 * j) % (VOCABULARY - 8) + 3 for j in range(5 + 24 * i)) for i in range(4)]
    requests = make_requests([Prompt(i, str(i), text) for i, text in enumerate(texts)], 1, sampling, seed=3)
    found = {response.request.prompt.token_ids: tuple(response.token_ids) for response in engine.generate(requests)}
    return sorted(found.items())


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    names = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    passed = 0
    for name in names:
        fault = try_family(name)
        passed += not fault
        print(f"{name:24} {fault or 'yes'}", flush=True)
    print(f"{passed} of {len(names)} families are decoded token for token")


if __name__ == "__main__":
    main()
