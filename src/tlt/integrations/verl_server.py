"""Rollout server for verl in a Ray actor. verl calls `generate` for each request, and the other methods around its
updates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from verl.workers.rollout.replica import TokenOutput

from tlt.cluster.local_pool import local_worker
from tlt.cluster.remote import ClusterRollout
from tlt.config import Config, EngineConfig, SpeculationConfig, section_of
from tlt.data.sampling_params import stop_token_ids
from tlt.data.tokenizer import load_tokenizer
from tlt.draft.strategy import LEARNED
from tlt.engine.asynchronous import ABORTED, AsyncEngine
from tlt.engine.protocol import RolloutEngine
from tlt.integrations.decoding import decoding_worker, prompt_number, recipe_of, train_until
from tlt.integrations.verl_terms import Seeds, refuse, to_sampling_params
from tlt.models.choose import decoder_for, folder_weights
from tlt.models.families import read_config
from tlt.types import Prompt, Request, Response, RolloutStats


class Server:
    """Server with the interface that verl requires. `rollout` is verl's rollout configuration, `folder` is the model's
    folder, and `replica` is the number of the replica. The server begins with the weights in the folder. Methods that
    change the engine wait until the current round ends."""

    def __init__(self, rollout: Any, folder: str, replica: int) -> None:
        refuse(rollout)
        self.rollout, self.replica = rollout, replica
        self.seeds, self.step = Seeds(rollout.seed, replica), 0
        self.admits, self.rejects = asyncio.Event(), False
        self.admits.set()
        self.received: dict[str, Tensor] = {}
        tokenizer = load_tokenizer(folder)
        self.stops = stop_token_ids(folder, tokenizer)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        target = decoder_for(read_config(folder), getattr(torch, rollout.dtype), torch.device(device))
        target.load(folder_weights(folder, target.dtype), 0)
        self.longest = target.options.max_positions
        worker, self.decoding = decoding_worker(_config(rollout, folder, replica), target, tokenizer)
        self.awake = True
        self.engine = AsyncEngine(worker.engine, self._use_idle_time)

    # -- decoding ------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> TokenOutput:
        """Decode and return one response. Raises ValueError for a prompt that is too long, and for unsupported inputs
        or sampling parameters."""
        if image_data or video_data or audio_data:
            raise ValueError("tlt decodes text only: remove images, video and audio from the prompt")
        while not self.admits.is_set():
            if self.rejects:
                return TokenOutput(token_ids=[], stop_reason=ABORTED, extra_fields={"global_steps": self.step})
            await self.admits.wait()
        tokens = tuple(int(token) for token in prompt_ids)
        params = to_sampling_params(sampling_params, self.rollout, len(tokens), self.stops, self.longest)
        number = prompt_number(tokens)
        index, seed = self.seeds.next(number)
        response = await self.engine.generate(Request(Prompt(number, "", tokens), index, self.step, seed, params))
        return self._output(response, bool(sampling_params.get("logprobs")))

    def _output(self, response: Response, with_logprobs: bool) -> TokenOutput:
        drawn_from = self.rollout.logprobs_mode == "processed_logprobs"
        logprobs = response.logprobs if drawn_from else response.full_logprobs
        return TokenOutput(
            token_ids=response.token_ids,
            log_probs=logprobs if with_logprobs else None,
            stop_reason=ABORTED if response.finish_reason == ABORTED else "completed",
            extra_fields={
                "global_steps": response.request.epoch,
                "spec_num_draft_tokens": response.decoded.drafted,
                "spec_num_accepted_tokens": response.decoded.accepted,
                "spec_num_verify_steps": response.decoded.row_passes,
            },
        )

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End active requests with their tokens so far. New and waiting requests wait for `resume_generation`. If
        `reject_request` is True, new and waiting requests are returned as aborted instead."""
        self.rejects = reject_request
        self.admits.set()  # waiting callers check `rejects` again
        self.admits.clear()
        seeds = await self.engine.interrupt()
        return {"aborted_count": len(seeds), "request_ids": []}

    async def resume_generation(self) -> None:
        self.rejects = False
        self.admits.set()

    # -- around an update ----------------------------------------------------------------------------------------------

    async def take_weights(self, bucket: Mapping[str, Tensor]) -> None:
        """Store a part of the new weights (name -> tensor in host memory) until `load_weights`."""
        self.received |= bucket

    async def load_weights(self, step: int | None) -> None:
        """Load the received weights of this step. `step` is None if verl restores the weights of the current step after
        a sleep. If weights are missing, keep the old ones and raise ModelError. Raises RuntimeError if requests are
        active."""
        weights, self.received = self.received, {}
        await self.engine.between_rounds(lambda engine: self._load(engine, weights))
        if step is not None:  # None: verl restores the same weights after a sleep
            await self.set_global_steps(step)

    def _load(self, engine: RolloutEngine, weights: Mapping[str, Tensor]) -> None:
        if engine.busy:
            raise RuntimeError("weights cannot be loaded while requests are active: wait for them or abort them first")
        engine.target.load(weights, engine.target.version + 1)
        _end_rollout(self.decoding, engine.stats)
        engine.start(())
        local_worker(self.decoding.supervisor.pool).spot.target_moved()

    async def set_global_steps(self, step: int) -> None:
        self.step = step
        self.seeds.step(step)

    async def sleep(self) -> None:
        """Free the KV cache and keep the weights."""
        self.awake = False
        await self.clear_kv_cache()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.awake = True

    async def clear_kv_cache(self) -> None:
        await self.engine.between_rounds(partial(_release, self.decoding))

    release_kv_cache = clear_kv_cache

    async def resume_kv_cache(self) -> None:
        """Do nothing, because the next request allocates the cache."""

    async def start_profile(self, **_: Any) -> None:
        """Do nothing, because the trainer records traces."""

    async def stop_profile(self) -> None:
        """Do nothing, like `start_profile`."""

    def _use_idle_time(self, engine: RolloutEngine, is_over: Any) -> None:
        """Train the drafter while this replica has nothing to decode, until `is_over()` returns True."""
        if self.awake:
            train_until(is_over, self.decoding)


def _release(decoding: ClusterRollout, engine: RolloutEngine) -> None:
    if not engine.busy:
        _end_rollout(decoding, engine.stats)
        engine.release()
        engine.start(())


def _end_rollout(decoding: ClusterRollout, stats: RolloutStats) -> None:
    """Tell the schedule that the rollout has ended. `stats` are empty if this was done before: verl may free the cache
    before it sends new weights."""
    if stats.rounds:
        training = decoding.coordinator.idle.training
        training.rollout_ended(sum(stats.seconds.values()), stats.acceptance_rate.get(LEARNED))


def _config(rollout: Any, folder: str, replica: int) -> Config:
    """Return the recipe of a replica. `rollout.custom` may contain the recipe's sections `engine` and `speculation`,
    and `folder`, where replicas save their drafters (default: runs/verl)."""
    custom: Any = OmegaConf.to_container(OmegaConf.create(dict(rollout.custom or {})))
    engine = section_of(EngineConfig, custom.get("engine"), "engine")
    speculation = section_of(SpeculationConfig, custom.get("speculation"), "speculation")
    home = Path(custom.get("folder", "runs/verl")) / str(replica)
    workers = 2  # more than one, because the drafter is trained in idle time, which a single worker does not have
    return recipe_of(folder, str(home), rollout.seed, workers, speculation, engine)
