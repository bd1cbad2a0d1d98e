"""Writes trl.json, TRL's own losses, gradients and advantages in float64, for tests/rl/test_against_trl.py.

    python -m venv trl && trl/bin/pip install torch trl==1.16.0 && trl/bin/python tests/peers/record_trl.py

Nothing of tlt is imported. Each case is a GRPOConfig (RLOOConfig) as a user of TRL writes it, and TRL's trainer
computes the numbers. Log-probs and rewards are random, and both sides get the same."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

GROUP, LENGTHS, LONGEST = 4, [3, 5, 1, 4, 2, 6, 3, 5], 8
EOS = 256

_BIASED = {"use_bias_correction_kl": False}
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "dapo_higher": {"epsilon_high": 0.28},
    "dapo_delta": {"delta": 1.5},
    "dapo_kl": {"beta": 0.1},
    "dapo_masked": {"mask_truncated_completions": True},
    "dapo_importance": {},
    "dapo_one_step": {},
    "grpo": {"loss_type": "grpo"},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.1, "epsilon": 0.1, "epsilon_high": 0.3},
    "grpo_kl_biased": {"loss_type": "grpo", "beta": 0.1, **_BIASED},
    "gspo_kl_biased": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, **_BIASED},
    "grpo_delta": {"loss_type": "grpo", "delta": 1.5},
    "grpo_masked": {"loss_type": "grpo", "mask_truncated_completions": True},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dr_grpo_kl": {"loss_type": "dr_grpo", "beta": 0.1},
    "dr_grpo_masked": {"loss_type": "dr_grpo", "mask_truncated_completions": True},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "gspo_wide": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo_kl": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
    "gspo_delta": {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.05, "epsilon": 0.01},
}
MASKED = [1, 6]  # responses that are cut off, in the cases that mask these
ADVANTAGES: dict[str, dict[str, Any]] = {
    "group": {},
    "batch": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none"},
}


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<eos>", pad_token="<pad>")


def model(folder: str) -> Qwen3ForCausalLM:
    """Return a model from a folder, where TRL finds the reference too."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen3Config(vocab_size=258, num_key_value_heads=1, head_dim=8, eos_token_id=EOS, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return Qwen3ForCausalLM.from_pretrained(folder)


def trainer(kind: Any, config: Any, folder: str, **settings: Any) -> Any:
    """Return a real trainer, whose model generates responses of the lengths in `LENGTHS`."""
    rows = Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    arguments = config(
        output_dir=folder,
        per_device_train_batch_size=len(LENGTHS),
        num_generations=GROUP,
        max_completion_length=LONGEST,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **settings,
    )
    rewards = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
    made = kind(model(folder), reward_funcs=rewards, args=arguments, train_dataset=rows, processing_class=tokenizer())
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    answers = [[65] * (n - 1) + [EOS] for n in LENGTHS]
    made._generate_single_turn = lambda *_, **__: (answers, None) if kind is GRPOTrainer else answers
    return made


def padded(rows: list[list[float]]) -> torch.Tensor:
    """Return [B, T] of the ragged `rows`, filled with values that must not count."""
    return torch.tensor([[*row, *[-7.0] * (max(LENGTHS) - len(row))] for row in rows], dtype=torch.float64)


def ragged(rows: torch.Tensor) -> list[list[float]]:
    return [row[:n].tolist() for row, n in zip(rows, LENGTHS, strict=True)]


def loss_of(name: str, given: dict[str, Any], folder: str) -> dict[str, Any]:
    made = trainer(GRPOTrainer, GRPOConfig, folder, **LOSSES[name])
    policy = padded(given["old"] if name.endswith("one_step") else given["policy"]).requires_grad_()
    mask = torch.tensor([[int(t < n) for t in range(max(LENGTHS))] for n in LENGTHS])
    if made.mask_truncated_completions:
        mask[MASKED] = 0
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "advantages": torch.tensor(given["advantages"], dtype=torch.float64),
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": padded(given["reference"]),
    }
    if not name.endswith("one_step"):
        inputs["old_per_token_logps"] = padded(given["old"])
    if name.endswith("importance"):
        made.use_vllm, made.vllm_importance_sampling_correction = True, True
        apart = padded(given["old"]) - padded(given["rollout"])
        inputs["importance_sampling_ratio"] = torch.exp(apart).clamp(max=2.0)  # token_truncate
    made._get_per_token_logps_and_entropies = lambda *_, **__: (policy, torch.zeros_like(policy), None)
    loss = made._compute_loss(made.model, inputs)
    loss.backward()
    return {"config": LOSSES[name], "loss": loss.item(), "gradient": ragged(policy.grad)}


def advantages_of(kind: Any, config: Any, given: dict[str, Any], folder: str, **settings: Any) -> dict[str, Any]:
    made = trainer(kind, config, folder, **settings)
    passes = iter([given["old"], given["reference"]])
    made._get_per_token_logps_and_entropies = lambda *_, **__: (padded(next(passes)), None, None)
    rewards = torch.tensor(given["rewards"], dtype=torch.float64)[:, None]
    made._calculate_rewards = lambda *_: rewards
    made.reward_weights = made.reward_weights.double()
    rows = [{"prompt": "a"}] * GROUP + [{"prompt": "b"}] * GROUP
    return {"config": settings, "advantages": made._generate_and_score_completions(rows)["advantages"].tolist()}


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # TRL divides counts by counts in the default dtype
    shape = padded([[0.0] * n for n in LENGTHS]).shape
    old = -torch.rand(shape, dtype=torch.float64) * 3 - 0.01
    given: dict[str, Any] = {"old": ragged(old), "group": GROUP, "lengths": LENGTHS, "longest": LONGEST}
    for name, scale in (("policy", 0.4), ("reference", 0.5), ("rollout", 0.6)):
        given[name] = ragged(old + scale * torch.randn(shape, dtype=torch.float64))
    given["rewards"] = [1.0, 0.0, 0.25, 1.0, 0.5, 0.5, 0.5, 2.0]
    given["advantages"] = torch.randn(len(LENGTHS), dtype=torch.float64).tolist()
    found: dict[str, Any] = {"trl": trl.__version__, "torch": torch.__version__, "masked": MASKED, "given": given}
    with tempfile.TemporaryDirectory() as folder:
        found["losses"] = {name: loss_of(name, given, folder) for name in LOSSES}
        found["advantages"] = {
            name: advantages_of(GRPOTrainer, GRPOConfig, given, folder, **ADVANTAGES[name]) for name in ADVANTAGES
        }
        for name, settings in (("rloo", {"beta": 0.0}), ("rloo_kl", {"beta": 0.1})):
            found["advantages"][name] = advantages_of(RLOOTrainer, RLOOConfig, given, folder, **settings)
    Path(__file__).with_name("trl.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
