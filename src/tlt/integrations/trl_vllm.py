"""vLLM of a TRL trainer with `use_vllm`. TRL starts it and gives it weights, and tlt decodes with it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from tlt.config import SpeculationConfig
from tlt.integrations import UnsupportedError
from tlt.vllm.settings import EXTENSION, OURS, set_environment, speculative_arguments, vllm_version
from tlt.vllm.target import VllmTarget

_MODULE = "trl.generation.vllm_generation"


def prepare_vllm(speculation: SpeculationConfig, asked: Mapping[str, Any]) -> None:
    """Give the next vLLM that TRL starts tlt's proposer and worker extension, and the arguments `asked`. TRL passes no
    arguments on to vLLM, so its name `LLM` is replaced until then. Do nothing if vLLM is not installed. Raises
    UnsupportedError for an argument that tlt sets."""
    if taken := [name for name in OURS if name in asked]:
        raise UnsupportedError(f"remove engine.vllm.{taken[0]}: tlt sets it itself")
    module = importlib.import_module(_MODULE) if vllm_version() else None
    if (original := getattr(module, "LLM", None)) is None:
        return
    original = vars(original).get("original", original)  # of a `Rollout` before this one

    def with_tlt(**arguments: Any) -> Any:
        vars(module)["LLM"] = original
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # V2 has no proposers
        set_environment()
        speculative = speculative_arguments(speculation)
        ours = {"speculative_config": speculative, "worker_extension_cls": EXTENSION}
        llm = original(**arguments | dict(asked) | ours)
        if llm.llm_engine.vllm_config.device_config.device_type == "cpu":
            _defer_loading(llm.llm_engine.model_executor.driver_worker.model_runner.model)
        return llm

    vars(with_tlt)["original"] = original
    vars(module)["LLM"] = with_tlt


def _defer_loading(model: Any) -> None:
    """Let TRL's loading, of a list of one weight, do nothing. On CPUs vLLM packs its weights, so it would fail.
    `TrlTarget.load` loads all weights at once."""
    load = model.load_weights
    model.load_weights = lambda weights: set() if isinstance(weights, list) else load(weights)


def refuse_vllm(args: Any) -> None:
    """Raise UnsupportedError for options of vLLM with which requests cannot have seeds and drafts of their own."""
    if args.vllm_mode != "colocate":
        raise UnsupportedError(
            f"tlt in TRL does not support vllm_mode = {args.vllm_mode!r}, because TRL's client sends one seed for all "
            "prompts: set it to 'colocate'"
        )
    if args.vllm_tensor_parallel_size > 1:
        raise UnsupportedError(
            "tlt in TRL does not support vllm_tensor_parallel_size above 1, because each process would choose its own "
            "drafts: set it to 1"
        )


class TrlTarget(VllmTarget):
    """Target whose weights TRL has loaded. TRL's sleep mode is honoured."""

    def __init__(self, trainer: Any, config: Any) -> None:
        """Attach tlt to the trainer's vLLM. Raises UnsupportedError if it was started without tlt."""
        self.generation: Any = getattr(trainer, "vllm_generation", None)
        llm = getattr(self.generation, "llm", None)
        engine = getattr(llm, "llm_engine", None)
        vllm = getattr(engine, "vllm_config", None)
        if vllm is None or vllm.parallel_config.worker_extension_cls != EXTENSION:
            raise UnsupportedError(
                f"tlt cannot draft in this trainer's vLLM, which was started without tlt: make Rollout() before the "
                f"trainer, and use a TRL that makes its vLLM by {_MODULE}.LLM (trl 1.16)"
            )
        model, device = vllm.model_config, trainer.accelerator.device
        drafts = vllm.speculative_config is not None
        super().__init__(engine, config, model.dtype, device, model.max_model_len, drafts=drafts)
        self.max_rows = vllm.scheduler_config.max_num_seqs
        self._sleeps = self._asleep = trainer.args.vllm_enable_sleep_mode

    def load(self, weights: Any, version: int) -> None:
        """Take the weights that TRL has given vLLM. On CPUs, load them."""
        if self.device.type == "cpu":
            return super().load(weights, version)
        if self.drafts:
            self.ends.load(weights, version)
        self.version = version

    def wake(self) -> None:
        if self.generation._llm_weights_sleeping:  # TRL loads weights only once in a global step
            self.generation.sync_weights()
        super().wake()

    def release(self) -> None:
        """Do nothing, because the worker also calls this before a rollout. See `sleep`."""

    def sleep(self) -> None:
        """Put vLLM to sleep until the next rollout, if TRL's sleep mode is on. Its weights are dropped."""
        if self._sleeps and not self._asleep:
            self.llm.sleep(level=2)
            self.generation._llm_weights_sleeping = self._asleep = True
