"""`use_vllm` of TRL in a fake of TRL and of vLLM. Neither is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch
from test_trl_contract import PROMPTS, FakeTrainer
from tiny import tiny_model

from tlt.config import SpeculationConfig
from tlt.integrations import UnsupportedError, trl_vllm
from tlt.integrations.trl import Rollout
from tlt.vllm.settings import EXTENSION, PROPOSER

COLOCATED = {
    **{"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 1},
    "vllm_enable_sleep_mode": False,
}


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.16.0")
    monkeypatch.setattr("tlt.integrations.trl_vllm.vllm_version", lambda: None)
    fake_vllm.install(monkeypatch)


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    return tiny_model(home / "model")


def trainer_of(folder: Path, extension: str = EXTENSION, **changes: Any) -> Any:
    trainer: Any = FakeTrainer(folder, **COLOCATED | changes)
    speculative = {"num_speculative_tokens": 32}
    arguments = {"model": str(folder), "dtype": "float64", "max_num_seqs": 4, "max_model_len": 512}
    llm: Any = fake_vllm.LLM(arguments | {"speculative_config": speculative})
    llm.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_extension_cls=extension),
        model_config=SimpleNamespace(dtype=torch.float64, max_model_len=512),
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    trainer.vllm_generation = SimpleNamespace(llm=SimpleNamespace(llm_engine=llm), _llm_weights_sleeping=False)
    return trainer


def move(trainer: Any) -> None:
    trainer.state.global_step += 1
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.01)


def test_completions_are_those_of_our_engine_at_every_step(folder: Path) -> None:
    by_vllm, ours = trainer_of(folder), FakeTrainer(folder)
    first, second = Rollout({"drafter": "suffix"}), Rollout({"drafter": "off"})
    for _ in range(2):
        found, expected = first(PROMPTS, by_vllm), second(PROMPTS, ours)
        assert found["completion_ids"] == expected["completion_ids"]
        for mine, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
        move(by_vllm)
        move(ours)
    assert by_vllm.logged["tlt/accept_length"][-1] >= 1
    assert by_vllm.vllm_generation.llm.llm_engine.runner.live == {}


def test_trls_sleep_mode_gets_the_memory_between_rollouts(folder: Path) -> None:
    trainer, synced = trainer_of(folder, vllm_enable_sleep_mode=True), list[bool]()
    generation, llm = trainer.vllm_generation, trainer.vllm_generation.llm.llm_engine

    def sync_weights() -> None:
        synced.append(True)
        generation._llm_weights_sleeping = False

    generation.sync_weights, generation._llm_weights_sleeping, llm.asleep = sync_weights, True, True
    mine = Rollout({"drafter": "off"})
    mine(PROMPTS, trainer)
    assert (synced, llm.asleep, generation._llm_weights_sleeping) == ([True], True, True)
    mine(PROMPTS, trainer)  # in the same global step, in which TRL syncs once
    assert (synced, llm.asleep) == ([True, True], True)
    assert mine._process
    mine._process._next_turn(mine._process._requests(PROMPTS))  # after the results of tools
    assert (synced, llm.asleep) == ([True, True, True], True)


def test_on_a_gpu_trl_loads_the_weights_and_tlt_the_ends_for_its_drafter(folder: Path) -> None:
    trainer = trainer_of(folder)
    target = trl_vllm.TrlTarget(trainer, trainer.model.config)
    target.load(trainer.model.state_dict(), 0)
    before, runner = target.ends.embedding.clone(), trainer.vllm_generation.llm.llm_engine.runner
    known = runner.target.version
    target.device = torch.device("cuda")
    target.load({name: 2 * tensor for name, tensor in trainer.model.state_dict().items()}, 1)
    assert (target.version, target.ends.version, runner.target.version) == (1, 1, known)
    assert torch.equal(target.ends.embedding, 2 * before)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vllm_mode": "server"}, "vllm_mode = 'server', because TRL's client sends one seed .*: set it to 'colocate'"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size above 1, .*: set it to 1"),
        ({"extension": ""}, r"started without tlt: make Rollout\(\) before the trainer"),
    ],
)
def test_a_vllm_whose_requests_cannot_be_our_own_is_refused(folder: Path, changes: Any, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        Rollout()(PROMPTS, trainer_of(folder, **changes))


def test_arguments_of_vllm_that_tlt_sets_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"remove engine\.vllm\.worker_extension_cls: tlt sets it itself"):
        Rollout(engine={"vllm": {"worker_extension_cls": "mine"}})


def test_the_next_vllm_of_trl_has_our_proposer(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given, loaded = ModuleType("vllm_generation"), list[dict[str, Any]](), list[Any]()
    model = SimpleNamespace(load_weights=loaded.append)
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(device_config=SimpleNamespace(device_type="cpu")),
        model_executor=SimpleNamespace(driver_worker=runner),
    )

    def start(**arguments: Any) -> Any:
        given.append(arguments)
        return SimpleNamespace(llm_engine=engine)

    vars(module)["LLM"] = start
    monkeypatch.setitem(sys.modules, trl_vllm._MODULE, module)
    monkeypatch.setattr("tlt.integrations.trl_vllm.vllm_version", lambda: "0.32.0")
    monkeypatch.setattr("os.environ", {})
    for drafter in ("off", "suffix"):
        trl_vllm.prepare_vllm(SpeculationConfig(drafter=drafter), {"dtype": "float32"})  # the last `Rollout` counts
    for _ in range(2):
        vars(module)["LLM"](model="folder", dtype="auto")
    ours, theirs = given
    assert (ours["worker_extension_cls"], ours["speculative_config"]["model"]) == (EXTENSION, PROPOSER)
    assert (ours["model"], ours["dtype"]) == ("folder", "float32")
    assert theirs == {"model": "folder", "dtype": "auto"}, "a trainer without tlt has its own"
    model.load_weights([("name", torch.zeros(1))])
    model.load_weights(whole := iter(()))
    assert loaded == [whole], "vLLM's CPU build cannot load weights one by one"
