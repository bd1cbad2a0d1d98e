"""verl's vLLM server with tlt's noise, over a fake of verl's classes. Neither verl nor vLLM is needed.

If verl is installed, its signatures are compared with those of the fake.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import put_modules
from tiny import tiny_model

from tlt.integrations import UnsupportedError
from tlt.vllm.noise import Draw, NoiseTable
from tlt.vllm.settings import PROPOSER

SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
UTILS = "verl.workers.rollout.vllm_rollout.utils"
ADAPTER = "verl.workers.rollout.vllm_rollout.ServerAdapter"


class Engine:
    """vLLM's `AsyncLLM`."""

    def __init__(self) -> None:
        self.output_processor, self.calls = SimpleNamespace(request_states={}), list[tuple[Any, ...]]()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, *args))
        return [[-0.5] * args[1]] if method == "tlt_logprobs" else [None]

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.calls.append((mode, clear_cache))


class vLLMHttpServer:
    def __init__(self, config: Any, replica_rank: int = 0) -> None:
        self.config, self.replica_rank, self.global_steps = config, replica_rank, None
        self.asked: list[tuple[Any, dict[str, Any], str]] = []
        self._post_init("")

    def _post_init(self, cuda_visible_devices: str) -> None: ...

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        engine_kwargs["seen"] = True

    def _get_worker_extension_cls(self) -> str:
        return f"{UTILS}.vLLMColocateWorkerExtension"

    async def run_server(self, args: Any) -> None:
        self.engine = Engine()

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
        kv_transfer_params: Any = None,
    ) -> Any:
        self.asked.append((prompt_ids, dict(sampling_params), request_id))
        return SimpleNamespace(token_ids=[7, 8, 9], log_probs=None, stop_reason="completed")


class vLLMReplica:
    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        self.server_class: Any = vLLMHttpServer

    def _get_server_name_prefix(self) -> str:
        return "vllm_"


class vLLMColocateWorkerExtension:
    model_runner: Any


FAKES = {SERVER: [vLLMHttpServer, vLLMReplica], UTILS: [vLLMColocateWorkerExtension]}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Install the fakes, load the plugin, and return verl's two registries in one."""
    found: dict[Any, Any] = {}
    register = SimpleNamespace(register=found.__setitem__)
    replica = {"TokenOutput": object, "RolloutReplicaRegistry": register}
    contents: dict[str, dict[str, Any]] = {name: {c.__name__: c for c in classes} for name, classes in FAKES.items()}
    contents |= {"verl.workers.rollout.replica": replica, "verl.workers.rollout.base": {"_ROLLOUT_REGISTRY": found}}
    contents |= {"ray": {"remote": lambda owner: ("actor of", owner)}}
    put_modules(monkeypatch, contents)
    for name in ("verl", "verl_worker", "verl_plugin"):
        monkeypatch.delitem(sys.modules, f"tlt.integrations.{name}", raising=False)
    monkeypatch.setattr("tlt.vllm.settings.vllm_version", lambda: "0.32.0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    importlib.import_module("tlt.integrations.verl_plugin")
    return found


def rollout(**changes: Any) -> SimpleNamespace:
    plain = {
        **dict.fromkeys(("data_parallel_size", "pipeline_model_parallel_size", "repetition_penalty"), 1),
        **{"logprobs_mode": "processed_logprobs", "enable_rollout_routing_replay": False, "mtp": None, "seed": 42},
    }
    return SimpleNamespace(**plain | changes)


def server(replica: int = 0, **changes: Any) -> Any:
    from tlt.integrations.verl import NoisyServer

    made: Any = NoisyServer(rollout(**changes), replica)
    asyncio.run(made.run_server(None))
    return made


def ask(server: Any, prompt: list[int], **changes: Any) -> Any:
    params = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": False} | changes
    return asyncio.run(server.generate(prompt_ids=prompt, sampling_params=params, request_id="r", image_data=None))


def draws(server: Any) -> list[Draw]:
    return [Draw.of_params(SimpleNamespace(**params)) or pytest.fail("no Draw") for _, params, _ in server.asked]


def test_verl_finds_the_replica_the_server_and_its_actor_by_name(registry: dict[Any, Any]) -> None:
    from tlt.integrations.verl import NoisyServer

    assert registry["tlt_vllm", "async"] == ADAPTER
    replica = registry["tlt_vllm"]()(0, rollout(), None)
    assert replica.server_class == ("actor of", NoisyServer)
    assert replica._get_server_name_prefix() == "tlt_vllm_", "ServerAdapter adds an underscore to rollout.name"


def test_an_untested_vllm_is_refused(registry: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It could ignore the noise, and decode greedily."""
    replica = registry["tlt_vllm"]()
    monkeypatch.setattr("tlt.integrations.verl.vllm_version", lambda: "0.24.0")
    with pytest.raises(UnsupportedError, match=r"0\.31 or 0\.32, not 0\.24\.0"):
        replica(0, rollout(), None)


def test_vllm_is_started_with_the_proposer_on_model_runner_v1(
    registry: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, given = server(), dict[str, Any](seed=1)
    made._preprocess_engine_kwargs(given)
    assert given["seen"], "verl's own settings stay"
    assert given["speculative_config"]["model"] == PROPOSER
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert made.engine.calls == [("tlt_begin",), ("tlt_draft",)]
    with pytest.raises(UnsupportedError, match=r"engine_kwargs\.vllm\.speculative_config"):
        made._preprocess_engine_kwargs({"speculative_config": {}})
    for waits, mode in ((False, "abort"), (True, "wait")):
        asyncio.run(made.engine.pause_generation(wait_for_inflight_requests=waits, clear_cache=False))
        assert made.engine.calls[-1] == (mode, False)


def test_a_request_has_its_own_seed_and_vllm_decodes_greedily(registry: dict[Any, Any]) -> None:
    made = server()
    output = ask(made, [3, 4, 5], max_tokens=9)
    (prompt, params, name), (draw,) = made.asked[0], draws(made)
    assert (prompt, name, output.log_probs) == ([3, 4, 5], "r", None)
    assert params.keys() == {"temperature", "extra_args", "max_tokens"}
    assert (draw.key, draw.prompt_tokens, draw.temperature, draw.top_k, draw.top_p) == (None, 3, 0.7, 0, 0.9)
    ask(made, [3, 4, 5], top_k=5)
    ask(made, [3, 4, 6])
    first, second, other = draws(made)
    assert second.top_k == 5
    assert (first.index, second.index, other.index) == (0, 1, 0)
    assert first.prompt_id == second.prompt_id != other.prompt_id
    assert len({draw.seed for draw in draws(made)}) == 3


def test_log_probs_are_those_of_the_noise_and_not_vllms(registry: dict[Any, Any]) -> None:
    made = server()
    assert ask(made, [3], logprobs=True).log_probs == [-0.5, -0.5, -0.5]
    ask(made, [3], logprobs=True)
    keys = [draw.key for draw in draws(made)]
    assert made.engine.calls[2:] == [("tlt_logprobs", keys[0], 3), ("tlt_logprobs", keys[1], 3)]
    assert len(set(keys)) == 2
    assert all("logprobs" not in params for _, params, _ in made.asked)


def test_drafters_forget_the_last_step_unless_a_request_is_active(registry: dict[Any, Any]) -> None:
    made = server()
    asyncio.run(made.set_global_steps(1))
    assert made.global_steps == 1
    assert made.engine.calls[2:] == [("tlt_forget",)]
    made.engine.output_processor.request_states["r"] = object()
    asyncio.run(made.set_global_steps(2))
    assert made.engine.calls[2:] == [("tlt_forget",)]


def test_seeds_do_not_depend_on_the_order_of_prompts_and_are_never_repeated(registry: dict[Any, Any]) -> None:
    def drawn(order: list[int], replica: int = 0, step: int = 3) -> list[tuple[int, int, int]]:
        made = server(replica)
        made.global_steps = step
        for prompt in order:
            ask(made, [prompt])
        return sorted((draw.prompt_id, draw.index, draw.seed) for draw in draws(made))

    one = drawn([5, 5, 9, 5, 9])
    assert one == drawn([9, 5, 9, 5, 5])
    found = [*one, *drawn([5, 5, 9], replica=1), *drawn([5, 5, 9], step=4)]
    assert len({seed for _, _, seed in found}) == len(found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("data_parallel_size", 2), ("pipeline_model_parallel_size", 2), ("repetition_penalty", 1.1)),
        *(("logprobs_mode", "raw_logprobs"), ("enable_rollout_routing_replay", True)),
        ("mtp", SimpleNamespace(enable_rollout=True)),
    ],
)
def test_unsupported_options_are_refused_by_name(registry: dict[Any, Any], name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"rollout\.{name}"):
        server(**{name: value})


def test_unsupported_requests_are_refused_by_name(registry: dict[Any, Any]) -> None:
    made = server()
    for name, value in (("min_p", 0.1), ("repetition_penalty", 1.2), ("stop", ["x"])):
        with pytest.raises(UnsupportedError, match=name):
            ask(made, [3], **{name: value})
    with pytest.raises(UnsupportedError, match="text only"):
        asyncio.run(made.generate([3], {}, "r", image_data=[object()]))
    assert not made.asked


def test_the_worker_extension_drafts_and_returns_log_probs(registry: dict[Any, Any], home: Path) -> None:
    """The class that the server names is both verl's and tlt's."""
    module, _, name = server()._get_worker_extension_cls().rpartition(".")
    worker = getattr(importlib.import_module(module), name)()
    assert isinstance(worker, vLLMColocateWorkerExtension)
    settings = SimpleNamespace(model=str(tiny_model(home / "verl")), dtype=torch.float64)
    config, drafter = SimpleNamespace(model_config=settings), SimpleNamespace(drafting=None)
    worker.model_runner = SimpleNamespace(
        vllm_config=config, device=torch.device("cpu"), max_num_reqs=4, drafter=drafter
    )
    worker.rank, worker._tlt_table = 0, NoiseTable(2, torch.device("cpu"))
    worker.tlt_draft()
    assert list(drafter.drafting.drafters.usable) == ["suffix"]
    drafting, before = drafter.drafting, drafter.drafting.rollout
    worker.tlt_forget()
    assert drafter.drafting is drafting, "with what the tuner has measured"
    assert drafting.rollout is not before
    worker._tlt_table.add(1, Draw(6, 9, 2, 1.0, 0, 1.0), 8)
    logits = torch.randn(1, 16)
    expected = logits.log_softmax(-1)[0]
    token = worker._tlt_table.apply(logits, torch.tensor([1]), torch.tensor([1])).argmax().item()
    assert worker.tlt_logprobs(6, 1) == pytest.approx([expected[token].item()])


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="compares the fake with an installed verl")
def test_the_fake_has_verls_signatures() -> None:
    def arguments(source: Path, owner: str) -> dict[str, list[str]]:
        (found,) = (n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef) and n.name == owner)
        functions = [n for n in found.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        return {n.name: [argument.arg for argument in n.args.args] for n in functions}

    spec = importlib.util.find_spec("verl")
    assert spec
    assert spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))).parent
    for module, classes in FAKES.items():
        for made in classes:
            theirs = arguments(root / f"{module.replace('.', '/')}.py", made.__name__)
            ours = arguments(Path(__file__), made.__name__)
            if made is vLLMHttpServer:
                del ours["__init__"]  # its arguments are not tlt's concern
            assert ours.items() <= theirs.items()
