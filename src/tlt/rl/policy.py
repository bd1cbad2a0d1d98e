"""The policy that is trained: a Hugging Face model, its optimizer, and one update on a rollout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tlt.config import TrainConfig
from tlt.rl.batching import MicroBatch, pack, plan
from tlt.rl.losses import LossInputs, clipped_policy_loss
from tlt.types import TrainBatch


class Policy:
    """Masters are float32 (float64 if asked); dtype bfloat16 means autocast over them."""

    def __init__(
        self, folder: str | Path, dtype: torch.dtype, device: torch.device, config: TrainConfig, temperature: float
    ) -> None:
        self.config, self.device, self.temperature = config, device, temperature
        self.autocast = dtype == torch.bfloat16
        masters = torch.float32 if self.autocast else dtype
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=masters, local_files_only=True, attn_implementation="sdpa", use_safetensors=True
        )
        self.model.to(device)
        self.model.eval()  # no dropout: old and new log-probs must come from the same function
        self.model.config.use_cache = False
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.95)
        )

    # -- update -------------------------------------------------------------------------------------------------------

    def update(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """One rollout's optimizer steps. Micro-batches are formed from the order of prompts; returns scalar metrics."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * min(1.0, (step + 1) / max(1, self.config.warmup_steps))
        count = len(batch.response_ids)
        parts = self.config.updates_per_step
        old = self._old_logprobs(batch) if parts > 1 else None
        borders = [round(count * k / parts) for k in range(parts + 1)]
        reports = [self._optimizer_step(batch, range(lo, hi), old) for lo, hi in pairwise(borders) if hi > lo]
        metrics = {
            key: sum(r[key] for r in reports) / len(reports) for key in ("loss", "entropy", "clipped", "grad_norm")
        }
        gaps = torch.cat([r["gaps"] for r in reports])
        metrics["mismatch_mean"] = gaps.mean().item()
        metrics["mismatch_p999"] = gaps.kthvalue(math.ceil(0.999 * len(gaps))).values.item()
        return metrics

    def _optimizer_step(self, batch: TrainBatch, members: range, old: list[Tensor] | None) -> dict[str, Any]:
        totals = {"loss": 0.0, "entropy": 0.0, "clipped": 0.0}
        gaps: list[Tensor] = []
        for micro in self._micro_batches(batch, members):
            logprobs, entropy = self._logprobs(micro)
            lengths = [len(batch.response_ids[i]) for i in micro.sequences]
            # with one optimizer step on a rollout the policy is still the old one: its log-probs need no second pass
            old_logprobs = logprobs.detach() if old is None else torch.cat([old[i] for i in micro.sequences])
            repeats = torch.tensor(lengths, device=self.device)
            advantages = self._spread([batch.advantages[i] for i in micro.sequences], repeats, logprobs)
            weights = self._spread([1 / (n * len(members)) for n in lengths], repeats, logprobs)
            out = clipped_policy_loss(
                LossInputs(logprobs, old_logprobs, advantages, weights), self.config.clip_low, self.config.clip_high
            )
            out.loss.backward()
            totals["loss"] += out.loss.item()
            totals["clipped"] += out.clipped.item()
            totals["entropy"] += (entropy * weights).sum().item()
            by_rollout = [x for i in micro.sequences for x in batch.rollout_logprobs[i]]
            rollout = torch.tensor(by_rollout, dtype=old_logprobs.dtype, device=self.device)
            gaps.append((old_logprobs - rollout).abs().float())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**totals, "grad_norm": float(norm), "gaps": torch.cat(gaps)}

    @torch.no_grad()
    def _old_logprobs(self, batch: TrainBatch) -> list[Tensor]:
        """[response] -> [its tokens], before the first gradient step."""
        found: dict[int, Tensor] = {}
        for micro in self._micro_batches(batch, range(len(batch.response_ids))):
            logprobs, _ = self._logprobs(micro)
            found |= zip(
                micro.sequences, logprobs.split([len(batch.response_ids[i]) for i in micro.sequences]), strict=True
            )
        return [found[i] for i in range(len(found))]

    def _micro_batches(self, batch: TrainBatch, members: range) -> Iterator[MicroBatch]:
        lengths = [len(batch.prompt_ids[i]) + len(batch.response_ids[i]) for i in members]
        for rows in plan(lengths, self.config.micro_batch_tokens):
            yield pack([[members[i] for i in row] for row in rows], batch.prompt_ids, batch.response_ids, self.device)

    def _logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob under softmax(logits / temperature), and entropy (no gradient), of each response token [T]."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            hidden = self.model.base_model(
                input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=micro.mask
            ).last_hidden_state
            logits = self.model.get_output_embeddings()(hidden[micro.predicts])
        wide = logits if logits.dtype == torch.float64 else logits.float()
        log_p = torch.log_softmax(wide / self.temperature, dim=-1)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, micro.targets[:, None]).squeeze(-1), entropy

    def _spread(self, values: list[float], repeats: Tensor, like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=self.device).repeat_interleave(repeats)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def save(self, folder: Path) -> None:
        """`policy/`, which transformers can load, and the optimizer's state as safetensors."""
        self.model.save_pretrained(folder / "policy")
        save_file(self.optimizer_state(), folder / "optimizer.safetensors")

    def optimizer_state(self) -> dict[str, Tensor]:
        """name of the parameter + name of the moment -> tensor; empty before the first update."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        return {
            f"{names[id(p)]}/{key}": value.detach().contiguous()
            for p, moments in self.optimizer.state.items()
            for key, value in moments.items()
        }

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for key, value in state.items():
            name, _, moment = key.rpartition("/")
            place = torch.device("cpu") if moment == "step" else self.device
            self.optimizer.state[parameters[name]][moment] = value.to(place, copy=True)

    def load_optimizer(self, folder: Path) -> None:
        self.load_optimizer_state(load_file(folder / "optimizer.safetensors"))
