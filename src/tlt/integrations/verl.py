"""verl's vLLM server with tlt's noise and drafts, for `actor_rollout_ref.rollout.name=tlt_vllm`.

verl starts vLLM, schedules requests, sends weights and puts vLLM to sleep. tlt gives each request a seed, samples with
its noise, and drafts. verl loads `verl_plugin.py`, which registers `NoisyReplica`.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from tlt.config import SpeculationConfig
from tlt.integrations import UnsupportedError
from tlt.integrations.decoding import prompt_number
from tlt.sampling import request_seed
from tlt.vllm.noise import Draw
from tlt.vllm.settings import OURS, TESTED, is_tested, speculative_arguments, vllm_version

_LENGTHS = {"max_tokens", "max_new_tokens"}
_PARAMETERS = _LENGTHS | {"temperature", "top_p", "top_k", "repetition_penalty", "logprobs"}


class NoisyServer(vLLMHttpServer):
    def _post_init(self, cuda_visible_devices: str) -> None:
        refuse(self.config)
        super()._post_init(cuda_visible_devices)
        self.seeds, self.keys = Seeds(self.config.seed, self.replica_rank), itertools.count()

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        if taken := [name for name in OURS if name in engine_kwargs]:
            raise UnsupportedError(f"remove rollout.engine_kwargs.vllm.{taken[0]}: tlt sets it itself")
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # V2 has no proposers
        engine_kwargs["speculative_config"] = speculative_arguments(SpeculationConfig())

    def _get_worker_extension_cls(self) -> str:
        return "tlt.integrations.verl_worker.NoisyWorkerExtension"

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        self.engine.pause_generation = partial(_pause, self.engine.pause_generation)
        await self.engine.collective_rpc("tlt_begin")
        await self.engine.collective_rpc("tlt_draft")

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the step of the weights. The drafters forget the last step, unless requests are active."""
        await super().set_global_steps(global_steps)
        if not self.engine.output_processor.request_states:
            await self.engine.collective_rpc("tlt_forget")

    async def generate(
        self, prompt_ids: Any, sampling_params: Mapping[str, Any], request_id: str, **others: Any
    ) -> TokenOutput:
        """Decode and return one response. Raises UnsupportedError for images, video or audio, and for a sampling
        parameter that tlt does not support."""
        if any(others.get(f"{kind}_data") for kind in ("image", "video", "audio")):
            raise UnsupportedError("tlt decodes text only: remove images, video and audio from the prompt")
        draw = self._draw(prompt_ids, sampling_params)
        params = {name: value for name, value in sampling_params.items() if name in _LENGTHS}
        params |= {"temperature": 0.0, "extra_args": draw.as_extra()}  # vLLM takes the argmax of scores with noise
        output = await super().generate(prompt_ids, params, request_id, **others)
        if draw.key is not None:
            found = await self.engine.collective_rpc("tlt_logprobs", args=(draw.key, len(output.token_ids)))
            output.log_probs = found[0]
        return output

    def _draw(self, prompt_ids: Any, asked: Mapping[str, Any]) -> Draw:
        """Return the seed and the sampling parameters of a request."""
        if unknown := asked.keys() - _PARAMETERS:
            raise UnsupportedError(f"tlt does not support verl's sampling parameter {min(unknown)!r}: remove it")
        if asked.get("repetition_penalty", 1.0) != 1.0:
            raise UnsupportedError("tlt does not support verl's repetition_penalty: set it to 1.0")
        number, step = prompt_number([int(token) for token in prompt_ids]), self.global_steps or 0
        index, seed = self.seeds.next(number, step)
        return Draw(
            next(self.keys) if asked.get("logprobs") else None,
            seed,
            len(prompt_ids),
            float(asked.get("temperature", 1.0)),
            max(0, int(asked.get("top_k", -1))),
            float(asked.get("top_p", 1.0)),
            prompt_id=number,
            index=index,
            epoch=step,
        )


class NoisyReplica(vLLMReplica):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        if not is_tested(vllm_version() or ""):
            raise UnsupportedError(f"tlt in verl needs vLLM {' or '.join(TESTED)}, not {vllm_version()}: docs/trl.md")
        super().__init__(*arguments, **options)
        self.server_class = ray.remote(NoisyServer)

    def _get_server_name_prefix(self) -> str:
        return "tlt_vllm_"  # verl's ServerAdapter looks for an actor with the rollout's name


async def _pause(pause: Any, wait_for_inflight_requests: bool = False, **options: Any) -> None:
    """Pause vLLM, which has replaced the argument `wait_for_inflight_requests` of verl 0.9 by `mode`."""
    await pause(mode="wait" if wait_for_inflight_requests else "abort", **options)


def refuse(rollout: Any) -> None:
    """Raise UnsupportedError if `actor_rollout_ref.rollout` sets an option that tlt does not support."""
    for asked, what, remedy in (
        (rollout.data_parallel_size != 1, "data_parallel_size", "set it to 1"),
        (rollout.pipeline_model_parallel_size != 1, "pipeline_model_parallel_size", "set it to 1"),
        (rollout.repetition_penalty != 1.0, "repetition_penalty", "set it to 1.0"),
        (rollout.logprobs_mode != "processed_logprobs", "logprobs_mode", "set it to processed_logprobs"),
        (rollout.enable_rollout_routing_replay, "enable_rollout_routing_replay", "set it to False"),
        (rollout.mtp and rollout.mtp.enable_rollout, "mtp.enable_rollout", "set it to False"),
    ):
        if asked:
            raise UnsupportedError(f"tlt does not support verl's rollout.{what}: {remedy}")


class Seeds:
    """Seeds of requests. They do not depend on verl's random request ids.

    A seed depends on the run's seed, the replica, the step of the weights, the prompt, and the number of earlier
    requests with that prompt at that step. verl does not send the number of the row, and its load balancer chooses the
    replica. So equal prompts get their seeds in order of arrival, and with several replicas a repeated run may give
    them other seeds.
    """

    def __init__(self, seed: int, replica: int) -> None:
        self._seed, self._domain = seed, f"verl {replica}"
        self._step, self._asked = 0, Counter[int]()

    def next(self, prompt: int, step: int) -> tuple[int, int]:
        """Return (number of earlier requests with this prompt at this step, seed of the new request)."""
        if step != self._step:
            self._step, self._asked = step, Counter()
        index = self._asked[prompt]
        self._asked[prompt] += 1
        return index, request_seed(self._seed, self._domain, prompt, step, index)
