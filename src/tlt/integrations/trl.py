"""tlt in TRL: `GRPOTrainer(..., rollout_func=Rollout())` decodes with tlt's engine. TRL does everything else.

A completion depends only on the weights, the prompt and the completion's seed. In training, the seed depends only on
the trainer's seed, the global step, the batch within this step, and the completion's index in the batch. So TRL gets
the same completions and ends with the same weights, with any drafter and any number of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm
from transformers import TrainerCallback

from tlt.cluster.drafter_training import DrafterTraining
from tlt.config import Config, EngineConfig, SpeculationConfig, section_of
from tlt.integrations import UnsupportedError, refuse_version
from tlt.integrations.decoding import decoding_worker, prompt_number, recipe_of, train_until
from tlt.integrations.trl_terms import (
    TESTED,
    ToolTurns,
    has_tools,
    prompts_of,
    refuse,
    refuse_impossible,
    to_sampling_params,
)
from tlt.integrations.trl_vllm import TrlTarget, prepare_vllm
from tlt.models.loading import decoder_for
from tlt.rl.lora import merged_state
from tlt.rl.parity import take_weights
from tlt.rl.sharded import Gathered
from tlt.sampling import request_seed
from tlt.types import Prompt, Request, Response, RolloutStats

EVALUATION = "trl eval"
"""`domain` of `sampling.request_seed` for evaluations, which gives them other seeds than training"""
_MERGED = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout", "bias", "init_lora_weights"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "ensure_weight_tying", "task_type", "base_model_name_or_path", "revision", "inference_mode"),
    *("auto_mapping", "corda_config", "eva_config", "lora_ga_config"),
}
"""options of PEFT's LoRA with which `merged_state` is the model with adapters, or that do not change the model"""


class Rollout:
    """Function for `rollout_func` of one GRPOTrainer. `speculation` and `engine` have the fields of the recipe sections
    with these names.

    The constructor raises ConfigError for an invalid field, and UnsupportedError if TRL is missing or too old. A call
    raises UnsupportedError for a second trainer, and for options of TRL that tlt does not support (`trl_terms.py`).
    """

    def __init__(
        self,
        speculation: SpeculationConfig | Mapping[str, Any] | None = None,
        engine: EngineConfig | Mapping[str, Any] | None = None,
    ) -> None:
        refuse_version("trl", "TRL", TESTED)
        self.speculation = section_of(SpeculationConfig, speculation, "speculation")
        self.engine = section_of(EngineConfig, engine, "engine")
        prepare_vllm(self.speculation, self.engine.vllm)
        self._process: _Process | None = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return a completion for each prompt, in TRL's format. TRL has already repeated the prompts for their groups.
        All processes call this once for each generation batch. The states of torch's global random generators, which
        shuffle TRL's data, are not changed."""
        with _copied_random_state(trainer):
            if self._process is None:
                refuse(trainer, self.engine)
                self._process = _Process(trainer, self.speculation, self.engine)
            if trainer is not self._process.trained.trainer:
                raise UnsupportedError("this Rollout decodes for another trainer: make a Rollout() for each trainer")
            return self._process.complete(prompts)


def _copied_random_state(trainer: Any) -> AbstractContextManager[None]:
    device = trainer.accelerator.device
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


class _Process:
    """Engine, weights and drafter training in one process of a TRL trainer."""

    def __init__(self, trainer: Any, speculation: SpeculationConfig, engine: EngineConfig) -> None:
        config = _config(trainer, speculation, engine)
        self.trained = Trained(trainer)
        family = self.trained.model.config
        if trainer.args.use_vllm:
            self.target = TrlTarget(trainer, family)
            rows = config.engine.model_copy(update={"backend": "vllm", "max_rows": self.target.max_rows})
            config = config.model_copy(update={"engine": rows})
        else:
            self.target = decoder_for(family, self.trained.dtype, trainer.accelerator.device)
        self.counter, self.updates = _GenerationCounter(), 0
        self._take_weights()
        trainer.add_callback(_AfterEvaluation(self.counter))
        resumed = trainer.state.global_step > 0
        self.worker, self.rollout = decoding_worker(config, self.target, trainer.processing_class, resumed)
        self.training = self.rollout.coordinator.idle.training
        self.others = _Others(trainer.accelerator.num_processes)
        self.tools = ToolTurns(trainer, self._next_turn) if has_tools(trainer) else None

    def complete(self, prompts: Sequence[Any]) -> dict[str, Any]:
        began = time.perf_counter()
        self._sync()
        synced = time.perf_counter()
        requests = self._requests(prompts)
        responses, stats = self._decode(requests)
        if self.tools:
            self.tools.begin(requests, responses)
        decoded = time.perf_counter()
        self.others.wait(lambda is_over: train_until(is_over, self.rollout))
        waited = time.perf_counter()
        self._release()
        seconds = {"sync": synced - began, "rollout": decoded - synced, "wait": waited - decoded}
        for name, value in _metrics(stats, seconds, self.training).items():
            self.trained.trainer._log_metric(f"tlt/{name}", value)  # what TRL gives to reward functions as `log_metric`
        return _completions(requests, responses)

    def _decode(self, requests: Sequence[Request]) -> tuple[list[Response], RolloutStats]:
        """Decode the requests. Return the responses in the order of the requests, and the counters."""
        responses, stats = self.rollout.generate(requests, lambda response: None)
        by_seed = {response.request.seed: response for response in responses}
        return [by_seed[request.seed] for request in requests], stats

    def _next_turn(self, requests: Sequence[Request]) -> list[Response]:
        """Decode the turns that follow tool results. Other processes may have fewer turns, so this does not wait for
        them."""
        with _copied_random_state(self.trained.trainer):
            responses, _ = self._decode(requests)
        self._release()
        return responses

    def _release(self) -> None:
        self.rollout.release()
        if isinstance(self.target, TrlTarget):
            self.target.sleep()

    def _sync(self) -> None:
        if self._take_weights():
            self.worker.spot.target_moved()

    def _take_weights(self) -> bool:
        """Give the engine the policy's weights if they have changed. Return whether they have changed."""
        changed = self.trained.has_changed()
        if changed:
            take_weights(self.target, self.trained, self.updates)
            self.updates += 1
        return changed

    def _requests(self, prompts: Sequence[Any]) -> list[Request]:
        trainer = self.trained.trainer
        domain, step, time_ = self.counter.of(trainer)
        first, params = trainer.accelerator.process_index * len(prompts), to_sampling_params(trainer)
        requests = []
        for index, token_ids in enumerate(prompts_of(prompts, trainer), start=first):
            refuse_impossible(token_ids, params, self.target.longest)
            prompt = Prompt(prompt_number(token_ids), "", token_ids)
            when = prompt.prompt_id if step is None else step
            seed = request_seed(trainer.args.seed, domain, when, time_, index)
            requests.append(Request(prompt, index, self.counter.generations, seed, params))
        return requests


class _GenerationCounter:
    """Counter of the batches that TRL generates at each global step. A step or an evaluation may have several
    batches. The number of earlier batches gives each batch different seeds."""

    def __init__(self) -> None:
        self.generations = 0
        self._last: dict[str, tuple[int, int]] = {}

    def of(self, trainer: Any) -> tuple[str, int | None, int]:
        """Count a new batch. Return (domain, step, number of earlier batches at this step). In an evaluation, step is
        None, because all evaluations use the same seeds. So two evaluations differ by the weights alone."""
        self.generations += 1
        domain, step = ("trl" if trainer.model.training else EVALUATION), trainer.state.global_step
        before, count = self._last.get(domain, (-1, 0))
        count = count + 1 if before == step else 0
        self._last[domain] = step, count
        return domain, (step if trainer.model.training else None), count

    def evaluated(self) -> None:
        """Reset the count after an evaluation, because the next evaluation may be at the same step."""
        self._last.pop(EVALUATION, None)


class _AfterEvaluation(TrainerCallback):
    def __init__(self, counter: _GenerationCounter) -> None:
        self.counter = counter

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.counter.evaluated()


class _Others:
    """Barrier at which the trainer's processes wait for each other after decoding."""

    def __init__(self, processes: int) -> None:
        self.group: Any = dist.new_group(backend="gloo") if processes > 1 else None

    def wait(self, meanwhile: Callable[[Callable[[], bool]], None]) -> None:
        """Wait until all processes have called this. Until then run `meanwhile(is_over)`, where `is_over()` returns
        whether all processes have called."""
        if self.group:
            work = dist.barrier(self.group, async_op=True)
            assert work
            meanwhile(work.is_completed)
            work.wait()


def _config(trainer: Any, speculation: SpeculationConfig, engine: EngineConfig) -> Config:
    args, processes = trainer.args, trainer.accelerator.num_processes
    folder = f"{args.output_dir}/tlt/{trainer.accelerator.process_index}"
    model, new = trainer.model.name_or_path or "-", args.max_completion_length
    return recipe_of(model, folder, args.seed, processes, new, speculation, engine)


def _completions(requests: Sequence[Request], responses: Sequence[Response]) -> dict[str, Any]:
    """Return completions as TRL expects them: in the order of the prompts, with the end token, and with log-probs
    comparable to TRL's own."""
    return {
        "prompt_ids": [list(request.prompt.token_ids) for request in requests],
        "completion_ids": [list(response.token_ids) for response in responses],
        "logprobs": [list(response.full_logprobs) for response in responses],  # TRL appends log-probs of tool results
    }


def _metrics(stats: RolloutStats, seconds: Mapping[str, float], training: DrafterTraining) -> dict[str, float]:
    found = {f"seconds/{name}": value for name, value in seconds.items()}
    found |= {
        "accept_length": stats.accept_length,
        "tokens_per_second": stats.tokens / max(seconds["rollout"], 1e-9),
        "seen_ahead": stats.seen_ahead / max(1, stats.tokens),
    }
    if training.is_on:
        tokens = stats.drafter_tokens + training.take_tokens()
        found |= {"drafter_version": float(training.version), "drafter_tokens": float(tokens)}
    return found


# -- the policy that TRL trains ----------------------------------------------------------------------------------------


class Trained:
    """Policy of a TRL trainer: plain, replicated by DDP, sharded by FSDP2, or with LoRA adapters, which are merged into
    copies of the weights. All processes must call its methods together, because they may gather shards."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._known: tuple[int, list[float]] | None = None
        self.dtype = torch.bfloat16 if trainer.args.bf16 else self.model.dtype
        if self._has_adapters:
            self._refuse_adapters()

    @property
    def model(self) -> Any:
        wrapped = self.trainer.model_wrapped
        return self.trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)

    @property
    def _has_adapters(self) -> bool:
        return hasattr(self.model, "peft_config")

    def _refuse_adapters(self) -> None:
        for name, peft in self.model.peft_config.items():
            kind = str(getattr(peft.peft_type, "value", peft.peft_type))
            usual, options = type(peft)(), {field.name for field in fields(peft)} - _MERGED
            changed = sorted(what for what in options if getattr(peft, what) != getattr(usual, what))
            if beyond := changed if kind == "LORA" else [kind]:
                raise UnsupportedError(
                    f"tlt in TRL does not support the adapter {name!r} with {beyond[0]}: use plain LoRA"
                )
        if any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            raise UnsupportedError("tlt in TRL does not support LoRA adapters sharded by FSDP2: train with DDP")

    def has_changed(self) -> bool:
        """Return whether the global step or a weight has changed since the last call. Weights are compared by the norm
        of each parameter in float64, because fused AdamW does not change a parameter's version counter."""
        with torch.no_grad():
            norms = [_whole(vector_norm(parameter, dtype=torch.float64)) for parameter in self.model.parameters()]
        now = self.trainer.state.global_step, torch.stack(norms).tolist()
        before, self._known = self._known, now
        return now != before

    def state_dict(self) -> Mapping[str, Tensor]:
        if self._has_adapters:
            return merged_state(self.model.get_base_model())
        return Gathered(self.model.state_dict(), _whole)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [N, V] at each token of one sequence [N]."""
        with _without_dropout(self.model), self.trainer.accelerator.autocast():
            return self.model(input_ids=tokens[None].to(self.trainer.accelerator.device), use_cache=False).logits[0]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _without_dropout(model: Any) -> Iterator[None]:
    """Switch dropout off for the `with` block. Modules are restored one by one, because `model.train()` would also
    switch on modules that the user switched off."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
