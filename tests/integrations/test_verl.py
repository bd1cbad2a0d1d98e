"""tlt with verl's own classes on a CPU (`make test-verl`): registration, launch, requests and weights.

verl's trainers need CUDA or an NPU, so no whole step is trained here. `test_verl_terms.py` needs no verl."""
# ruff: noqa: E402 -- skipped where verl is missing, before its classes are asked for

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import EOS, qwen3, tiny_model

verl = pytest.importorskip("verl")

import ray
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class

from tlt.config import EngineConfig, ModelConfig
from tlt.engine.engine import Engine
from tlt.integrations.decoding import prompt_number
from tlt.integrations.verl_terms import Seeds, UnsupportedError
from tlt.models.choose import make_target
from tlt.models.weights import read_safetensors
from tlt.types import Prompt, Request, SamplingParams

PROMPTS = [tuple(range(65, 70 + number)) for number in range(3)]
ASKED = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@ray.remote
class Worker:
    """Stand-in for a process of the trainer."""


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    return tiny_model(home / "model")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    paths = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield
    ray.shutdown()


def rollout_config(tmp: Path, drafter: str = "suffix", **changes: Any) -> RolloutConfig:
    custom = {"speculation": {"drafter": drafter}, "engine": {"kv_memory_mb": 1}, "folder": str(tmp)}
    plain = {"tensor_model_parallel_size": 1, "dtype": "float32", "prompt_length": 16, "response_length": 24}
    buckets = CheckpointEngineConfig(update_weights_bucket_megabytes=0)  # one for each tensor
    return RolloutConfig(name="tlt", custom=custom, seed=3, checkpoint_engine=buckets, **plain | changes)


_replicas = iter(range(100))


async def launched(folder: Path, config: RolloutConfig) -> Any:
    """Return (replica, adapter), as verl creates them in its hybrid mode."""
    model = HFModelConfig(path=str(folder))
    rank = next(_replicas)
    replica = get_rollout_replica_class("tlt")(replica_rank=rank, config=config, model_config=model, gpus_per_node=1)
    replica.workers, replica.rollout_mode = [Worker.remote()], RolloutMode.HYBRID
    await replica.launch_servers()
    adapter = get_rollout_class("tlt", "async")(config, model, None, replica_rank=rank)
    return replica, adapter


def expected(weights: Any, folder: Path, rank: int, step: int, prompts: list[tuple[int, ...]]) -> Counter[Any]:
    """Return (prompt, tokens) pairs of plain decoding in this process."""
    target = make_target(ModelConfig(path=str(folder), dtype="float32", device="cpu"))
    target.load(weights, 0)
    seeds = Seeds(3, rank)
    seeds.step(step)
    sampling = SamplingParams(0.8, max_new_tokens=24, stop_token_ids=(EOS,))
    requests = [
        Request(Prompt(prompt_number(p), "", p), index, step, seed, sampling)
        for p in prompts
        for index, seed in [seeds.next(prompt_number(p))]
    ]
    responses = Engine(target, EngineConfig(max_rows=1, kv_memory_mb=1)).generate(requests)
    return Counter((r.request.prompt.token_ids, tuple(r.token_ids)) for r in responses)


def pairs(prompts: list[tuple[int, ...]], outputs: list[Any]) -> Counter[Any]:
    return Counter((p, tuple(o.token_ids)) for p, o in zip(prompts, outputs, strict=True))


async def ask(replica: Any, prompts: list[tuple[int, ...]], **changes: Any) -> list[Any]:
    generate = replica.server_handle.generate.remote
    return await asyncio.gather(*(generate(list(p), ASKED | changes, f"id {i}") for i, p in enumerate(prompts)))


def test_a_servers_tokens_are_those_of_plain_decoding_before_and_after_an_update(folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        replica, adapter = await launched(folder, rollout_config(tmp_path))
        prompts = PROMPTS * 4
        outputs = await ask(replica, prompts)
        old = read_safetensors(folder)
        assert pairs(prompts, outputs) == expected(old, folder, replica.replica_rank, 0, prompts)
        for output in outputs:
            assert output.stop_reason == "completed"
            assert len(output.log_probs) == len(output.token_ids)
            extra = output.extra_fields
            assert extra["global_steps"] == 0
            assert 0 <= extra["spec_num_accepted_tokens"] <= extra["spec_num_draft_tokens"]
            assert extra["spec_num_verify_steps"] + extra["spec_num_accepted_tokens"] >= len(output.token_ids)

        await adapter.release()
        sizes = {"vocab_size": 257, "num_hidden_layers": 2, "eos_token_id": 256, "initializer_range": 0.5}
        new = qwen3(1, tie_word_embeddings=True, **sizes).float().state_dict()
        await adapter.update_weights(iter(new.items()), global_steps=5)
        await adapter.resume(["weights", "kv_cache"])
        outputs = await ask(replica, prompts[::-1])
        assert pairs(prompts[::-1], outputs) == expected(new, folder, replica.replica_rank, 5, prompts)
        assert all(output.extra_fields["global_steps"] == 5 for output in outputs)

    asyncio.run(run())


def test_a_server_serves_verls_own_client(folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        replica, _ = await launched(folder, rollout_config(tmp_path))
        balancer = ray.remote(GlobalRequestLoadBalancer).remote({replica.server_address: replica.server_handle})
        from omegaconf import OmegaConf

        config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "tlt"}}})
        client = LLMServerClient(config, balancer)
        calls = (client.generate(str(p), prompt_ids=list(p), sampling_params=dict(ASKED)) for p in PROMPTS)
        outputs = await asyncio.gather(*calls)
        assert pairs(PROMPTS, outputs) == expected(read_safetensors(folder), folder, replica.replica_rank, 0, PROMPTS)

    asyncio.run(run())


def test_weights_restored_without_a_step_keep_the_step(folder: Path, tmp_path: Path) -> None:
    """verl restores them after a validation whose rewards needed the device. No seed may be used twice."""

    async def run() -> None:
        replica, adapter = await launched(folder, rollout_config(tmp_path))
        weights = read_safetensors(folder)
        await adapter.update_weights(iter(weights.items()), global_steps=4)
        outputs = await ask(replica, PROMPTS)
        await adapter.update_weights(iter(weights.items()))
        outputs += await ask(replica, PROMPTS)
        assert {output.extra_fields["global_steps"] for output in outputs} == {4}
        assert pairs(PROMPTS * 2, outputs) == expected(weights, folder, replica.replica_rank, 4, PROMPTS * 2)

    asyncio.run(run())


def test_aborted_requests_return_and_later_ones_wait_or_are_rejected(folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        replica, adapter = await launched(folder, rollout_config(tmp_path, response_length=400))
        asked = asyncio.create_task(ask(replica, PROMPTS * 4, max_tokens=400))
        await asyncio.sleep(0.2)
        await replica.abort_all_requests()
        outputs = await asked
        assert {output.stop_reason for output in outputs} <= {"aborted", "completed"}
        late = asyncio.create_task(ask(replica, PROMPTS[:1]))
        await asyncio.sleep(0.3)
        assert not late.done()
        await replica.abort_all_requests(reject_request=True)
        assert (await asyncio.wait_for(late, 30))[0].stop_reason == "aborted", "nobody waits where all are sent back"
        await replica.abort_all_requests()
        late = asyncio.create_task(ask(replica, PROMPTS[:1]))
        await adapter.update_weights(iter(read_safetensors(folder).items()), global_steps=1)
        await replica.resume_generation()
        assert (await late)[0].stop_reason == "completed"
        await replica.abort_all_requests(reject_request=True)
        (rejected,) = await ask(replica, PROMPTS[:1])
        assert (rejected.stop_reason, rejected.token_ids) == ("aborted", [])
        await replica.resume_generation()
        await replica.clear_kv_cache()
        await replica.release_kv_cache()
        await replica.resume_kv_cache()
        await replica.sleep()
        await replica.wake_up()
        assert (await ask(replica, PROMPTS[:1]))[0].stop_reason == "completed"

    asyncio.run(run())


def test_an_adaptive_replica_trains_its_drafter_in_idle_time_and_changes_no_token(folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        config = rollout_config(tmp_path, drafter="adaptive")
        replica, _ = await launched(folder, config)
        prompts = PROMPTS * 6
        found: Counter[Any] = Counter()
        for _ in range(3):
            outputs = await ask(replica, prompts)
            found += pairs(prompts, outputs)
            await asyncio.sleep(0.5)
        assert found == expected(read_safetensors(folder), folder, replica.replica_rank, 0, prompts * 3)
        trained = await replica.server_handle.__ray_call__.remote(
            lambda server: server.decoding.coordinator.idle.training.is_on
        )
        assert trained, "no failure has switched it off"
        await replica.sleep()
        credit = await replica.server_handle.__ray_call__.remote(
            lambda server: server.decoding.coordinator.idle.training.schedule.credit
        )
        assert credit > 0.0, "the schedule knows how long the rollout took"

    asyncio.run(run())


def test_unsupported_options_are_refused_before_the_launch(folder: Path, tmp_path: Path) -> None:
    config, model = rollout_config(tmp_path, tensor_model_parallel_size=2), HFModelConfig(path=str(folder))
    with pytest.raises(UnsupportedError, match="tensor_model_parallel_size"):
        get_rollout_replica_class("tlt")(replica_rank=0, config=config, model_config=model, gpus_per_node=2)


def test_adapters_and_deltas_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        adapter = get_rollout_class("tlt", "async")(rollout_config(tmp_path), None, None, replica_rank=0)
        with pytest.raises(UnsupportedError, match=r"lora\.merge"):
            await adapter.update_weights(iter(()), peft_config={"r": 1}, base_sync_done=True)
        with pytest.raises(UnsupportedError, match="delta_flush"):
            await adapter.update_weights(iter(()), wire_format="delta_flush")

    asyncio.run(run())


def test_a_missing_weight_is_an_error_and_the_old_weights_stay(folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        replica, adapter = await launched(folder, rollout_config(tmp_path))
        old = read_safetensors(folder)
        some = {name: torch.zeros_like(old[name]) for name in list(old)[:3]}
        with pytest.raises(Exception, match="the weights lack"):
            await adapter.update_weights(iter(some.items()), global_steps=1)
        outputs = await ask(replica, PROMPTS)
        assert pairs(PROMPTS, outputs) == expected(old, folder, replica.replica_rank, 0, PROMPTS)

    asyncio.run(run())
