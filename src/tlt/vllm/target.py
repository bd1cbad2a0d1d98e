"""The target in vLLM: its weights, its version, and the vLLM engine that several `VllmEngine` may share."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tlt.config import EngineConfig, ModelConfig, SpeculationConfig
from tlt.models.device import torch_device, torch_dtype
from tlt.models.families import decoder_options, read_config
from tlt.models.hugging_face import as_in_files
from tlt.sampling import gumbel_noise
from tlt.vllm.drafting import Ends
from tlt.vllm.noise import Draw
from tlt.vllm.settings import (
    PROCESSOR,
    TESTED,
    VllmError,
    engine_arguments,
    require_vllm,
    set_environment,
    speculative_arguments,
    vllm_version,
)

_NEAR_TIE = 1e-3  # rounding may swap two scores that are this close


class VllmTarget:
    def __init__(
        self,
        llm: Any,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
        *,
        drafts: bool,
        sleeps: bool = False,
        parallel: bool = False,
    ) -> None:
        """Decode with a vLLM engine that has tlt's worker extension.

        `longest` is the maximum length of a prompt with its response, in tokens. `drafts`: whether vLLM has tlt's
        proposer. If `sleeps`, `release` frees the KV cache. `parallel`: whether vLLM's workers are other processes.
        """
        self.llm, self._config, self.dtype, self.device, self.longest = llm, config, dtype, device, longest
        self.options, self.ends = decoder_options(config), Ends(config, dtype, device)
        self.drafts, self.parallel, self._sleeps, self._asleep = drafts, parallel, sleeps, False
        self.version, self._keys = 0, itertools.count()
        llm.collective_rpc("tlt_begin")

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load all weights by their Hugging Face names and clear the prefix cache."""
        if self.drafts:
            self.ends.load(weights, version)
        given = dict(as_in_files(self._config, {name: tensor.detach() for name, tensor in weights.items()}))
        # files have a tied tensor once, but on a CPU vLLM's head is a copy that needs loading too
        if self.options.tied and (embedding := given.get("model.embed_tokens.weight")) is not None:
            given.setdefault("lm_head.weight", embedding)
        if self.parallel:  # weights are sent to other processes
            given = {name: tensor.cpu() for name, tensor in given.items()}
        self.llm.collective_rpc("tlt_load", args=(given,))
        self.llm.reset_prefix_cache(reset_running_requests=True)  # else vLLM keeps the cache while a request runs
        self.version = version

    @property
    def teacher(self) -> Ends:
        return self.ends

    def text_logits(self, tokens: Tensor, with_drafts: bool = False) -> Tensor:
        """Return logits [1, V], up to an additive constant, of the token that follows the token ids `tokens` [n]. All
        of them are prefilled.

        vLLM must have no running requests. Raises VllmError if vLLM's sample is not the one given by the shared noise.
        """
        text, drawn = tokens.tolist(), list[int]()
        draw = Draw(self.next_key(), 0, len(text), 1.0, 0, 1.0, ahead=True, show_distribution=True)
        self.add(text, draw, most_tokens=1)
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                drawn += output.outputs[0].token_ids
        self.llm.collective_rpc("tlt_take", args=({draw.key: (0, 1)},))
        logits = self.llm.collective_rpc("tlt_distribution")[0][None]
        noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), logits.shape[-1])
        noisy = logits.to("cpu", torch.float32).log_softmax(-1) + noise
        if len(drawn) != 1 or noisy.max() - noisy[0, drawn[0]] > _NEAR_TIE:
            raise VllmError(
                f"vLLM {vllm_version()} does not draw tokens with tlt's noise (token ids {drawn} instead of "
                f"[{noisy.argmax().item()}]): install vLLM {' or '.join(TESTED)}, or set engine.backend = 'tlt'"
            )
        return logits

    # -- requests ------------------------------------------------------------------------------------------------------

    def next_key(self) -> int:
        return next(self._keys)

    def add(self, tokens: list[int], draw: Draw, most_tokens: int, stops: tuple[int, ...] = ()) -> str:
        """Add a request that continues these tokens, and return its vLLM request id. The request ends after
        `most_tokens` new tokens, or at a token id in `stops`."""
        from vllm import SamplingParams  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        self.wake()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=most_tokens,
            stop_token_ids=list(stops),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=draw.as_extra(),
        )
        name = str(draw.key)
        self.llm.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    # -- memory --------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Free the KV cache until the next request.

        Do nothing while requests are running, because several engines may share a vLLM. vLLM can free the cache only
        after its scheduler has processed the end of all requests, so this runs two empty steps.
        """
        if self._sleeps and not self._asleep and not self.llm.has_unfinished_requests():
            for _ in range(2):  # one pass may still be queued
                self.llm.step()
            self.llm.sleep(level=0)
            self.llm.release_kv_cache_memory()
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self.llm.wake_up(["kv_cache"])
            self._asleep = False


def start_vllm(
    model: ModelConfig,
    engine: EngineConfig,
    speculation: SpeculationConfig,
    longest: int | None = None,
    sleeps: bool = False,
) -> VllmTarget:
    """Start vLLM with the weights in the model's folder.

    `longest` is the maximum length of a prompt with its response, in tokens (default: the model's limit). If `sleeps`
    is True, `release` frees the KV cache on a GPU. Only one vLLM per process may be started with `sleeps`. Raises
    ModelError, or VllmError if vLLM cannot start.
    """
    config, dtype, device = read_config(model.path), torch_dtype(model), torch_device(model)
    model = model.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    require_vllm()
    set_environment()
    most = decoder_options(config).max_positions
    longest, sleeps = min(longest or most, most), sleeps and device.type == "cuda"
    speculative = speculative_arguments(speculation)
    arguments = engine_arguments(model, engine, speculative, longest, sleeps)
    with _threads_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these warnings are about vLLM's use of torch
        llm = _start(arguments)
    parallel = engine.vllm.get("tensor_parallel_size", 1) != 1
    return VllmTarget(
        llm, config, dtype, device, longest, drafts=speculative is not None, sleeps=sleeps, parallel=parallel
    )


def _start(arguments: dict[str, Any]) -> Any:
    """Return vLLM's engine. Raises VllmError if it cannot start, for any reason."""
    try:
        from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
        from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found]

        given = EngineArgs(**arguments)
        if given.create_engine_config().use_v2_model_runner:
            others = arguments.get("logits_processors") or ()  # tlt's comes last: it needs the final logits
            given = EngineArgs(**arguments | {"logits_processors": [*others, PROCESSOR]})
        return LLMEngine.from_engine_args(given)
    except Exception as error:
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            raise VllmError(
                f"engine.vllm.{unknown[1]} is not an argument of vLLM's EngineArgs: correct or remove it"
            ) from error
        raise VllmError(f"vLLM cannot run {arguments['model']}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return the message of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    errors = getattr(error, "errors", None)  # a pydantic error has them
    found: Any = errors() if callable(errors) else None
    text = ": ".join([*map(str, found[0]["loc"]), found[0]["msg"]]) if found else str(error)
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Restore torch.set_num_threads and the number of threads after the `with` block, because vLLM replaces the
    function by one that does nothing."""
    before, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(before)
