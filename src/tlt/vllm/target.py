"""The target in vLLM: its weights, its version, and the one vLLM engine that all who decode with it share."""

from __future__ import annotations

import itertools
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt.config import EngineConfig, ModelConfig, SpeculationConfig
from tlt.draft.eagle import EagleLayer, checkpoint_tensors, load_drafter
from tlt.draft.formats import method, write_drafter
from tlt.files import read_json
from tlt.models.families import DecoderOptions, read_config
from tlt.models.hugging_face import as_in_files
from tlt.sampling import gumbel_noise
from tlt.vllm.noise import Draw
from tlt.vllm.settings import PROCESSOR, engine_arguments, set_environment, speculative_arguments
from tlt.vllm.versions import TESTED, VllmError, require_vllm, vllm_version

_NEAR_TIE = 1e-3  # two noisy scores that rounding may swap


class VllmTarget:
    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        speculation: SpeculationConfig,
        options: DecoderOptions,
        device: torch.device,
        longest: int,
        sleeps: bool = False,
    ) -> None:
        """`longest`: tokens that a prompt and its response may have together. With `sleeps` it can give memory back on
        a GPU, which one vLLM in a process can. Raises VllmError."""
        require_vllm()
        set_environment()
        self.options, self.dtype, self.device = options, getattr(torch, model.dtype), device
        self.version = 0
        self.longest = min(longest, options.max_positions)
        self.looks_ahead = speculation.drafter == "adaptive"
        self.parallel = engine.vllm.get("tensor_parallel_size", 1) != 1
        self._keys, self._config = itertools.count(), read_config(model.path)
        self._sleeps, self._asleep = sleeps and device.type == "cuda", False
        self._folder = tempfile.TemporaryDirectory(prefix="tlt-drafter-")  # of the learned drafter, where there is one

        def export() -> tuple[str, str]:
            layer = load_drafter(str(speculation.path), options)
            write_drafter(layer, read_json(Path(model.path) / "config.json"), self._folder.name, "vllm")
            return method(layer.options), self._folder.name

        speculative = speculative_arguments(speculation, export)
        arguments = engine_arguments(model, engine, speculative, self.longest, self._sleeps)
        with _threads_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what vLLM and torch have to say to each other
            self.llm: Any = _start(arguments)
        self.llm.collective_rpc("tlt_begin")

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take all weights by their Hugging Face names. What was kept of prompts is forgotten."""
        given = dict(as_in_files(self._config, {name: tensor.detach() for name, tensor in weights.items()}))
        if self.options.tied:  # files hold it once; on a CPU vLLM's head is a copy, which would stay the old one
            given.setdefault("lm_head.weight", given["model.embed_tokens.weight"])
        if self.parallel:  # they go to other processes
            given = {name: tensor.cpu() for name, tensor in given.items()}
        self.llm.collective_rpc("tlt_load", args=(given,))
        self.llm.reset_prefix_cache(reset_running_requests=True)  # else it is kept as long as there is a live row
        self.version = version

    def load_drafter(self, layer: EagleLayer) -> None:
        """The learned drafter takes these weights, amid a rollout if need be: no token depends on them. What it has
        of live rows stays that of the one before."""
        self.llm.collective_rpc("tlt_load_drafter", args=(checkpoint_tensors(layer),))

    def text_logits(self, tokens: Tensor) -> Tensor:
        """[1, V] logits, up to a constant, of the token behind this text [n]; vLLM has no requests under way. Raises
        VllmError if the token that vLLM draws there is not the one under the shared noise."""
        text, drawn = tokens.tolist(), list[int]()
        self.add(text, Draw(self.next_key(), 0, len(text), 1.0, 0, 1.0, show_law=True), most_tokens=1)
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                drawn += output.outputs[0].token_ids
        self.llm.collective_rpc("tlt_forget")
        logits = self.llm.collective_rpc("tlt_law")[0][None]
        noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), logits.shape[-1])
        noisy = logits.to("cpu", torch.float32).log_softmax(-1) + noise
        if len(drawn) != 1 or noisy.max() - noisy[0, drawn[0]] > _NEAR_TIE:
            raise VllmError(
                f"vLLM {vllm_version()} does not draw tokens with tlt's noise ({drawn} instead of "
                f"{noisy.argmax().item()}): install vLLM {' or '.join(TESTED)}, or leave engine.backend = 'tlt'"
            )
        return logits

    # -- requests ------------------------------------------------------------------------------------------------------

    def next_key(self) -> int:
        return next(self._keys)

    def add(
        self,
        tokens: list[int],
        draw: Draw,
        most_tokens: int,
        stops: tuple[int, ...] = (),
        chains: Sequence[bytes] = (),
    ) -> str:
        """A request that goes on behind these tokens; the name that its output bears. `chains`: what is known of it,
        for our proposer."""
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
            extra_args=draw.as_extra(chains),
        )
        name = str(draw.key)
        self.llm.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    # -- memory --------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give back the cache's memory, up to the next request, unless there are some under way: several engines may
        share a vLLM. It can do so once its scheduler has heard of the end of all requests."""
        if self._sleeps and not self._asleep and not self.llm.has_unfinished_requests():
            for _ in range(2):  # one pass may be queued still
                self.llm.step()
            self.llm.sleep(level=0)
            self.llm.release_kv_cache_memory()
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self.llm.wake_up(["kv_cache"])
            self._asleep = False


def _start(arguments: dict[str, Any]) -> Any:
    """Raises VllmError, whatever it is that vLLM cannot do."""
    try:
        from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
        from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found]

        given = EngineArgs(**arguments)
        if given.create_engine_config().use_v2_model_runner:
            others = arguments.get("logits_processors") or ()  # ours comes last: what it is given is the law
            given = EngineArgs(**arguments | {"logits_processors": [*others, PROCESSOR]})
        return LLMEngine.from_engine_args(given)
    except Exception as error:
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            raise VllmError(
                f"engine.vllm.{unknown[1]}: vLLM has no such engine argument, see its EngineArgs"
            ) from error
        raise VllmError(f"vLLM cannot run {arguments['model']}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The innermost cause's words."""
    while error.__cause__ is not None:
        error = error.__cause__
    errors = getattr(error, "errors", None)  # pydantic's
    found: Any = errors() if callable(errors) else None
    text = ": ".join([*map(str, found[0]["loc"]), found[0]["msg"]]) if found else str(error)
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def _threads_kept() -> Iterator[None]:
    """vLLM puts a function that does nothing in the place of torch.set_num_threads, for the whole process."""
    before, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(before)
