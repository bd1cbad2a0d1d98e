"""Versions of vLLM, and the arguments with which it is started. vLLM is not needed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch
from tiny import tiny_config
from transformers import GPT2Config

from tlt.build import open_target
from tlt.config import EngineConfig, ModelConfig
from tlt.models import device
from tlt.vllm import settings, target
from tlt.vllm.settings import PROCESSOR, VllmError, engine_arguments, is_tested, require_vllm, set_environment

OWN = ["their:Own"]


def test_the_longest_prompt_with_its_response_fits(started: list[fake_vllm.LLM], tmp_path: Path) -> None:
    config = tiny_config(tmp_path, data={"max_prompt_tokens": 9}, rollout={"max_new_tokens": 30})
    open_target(fake_vllm.by_vllm(config), None)
    assert started[-1].longest == 39


@pytest.mark.parametrize(("dtype", "expected"), [("float64", torch.float64), ("auto", torch.float32)])
def test_vllm_has_the_dtype_of_the_recipe_and_at_most_the_positions_of_the_model(
    dtype: str,
    expected: torch.dtype,
    started: list[fake_vllm.LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: False)
    config = tiny_config(tmp_path, model={"dtype": dtype, "device": "cpu"})
    made = target.start_vllm(config.model, config.engine, config.speculation, 10**6)
    assert (started[-1].arguments["dtype"], made.dtype) == (str(expected).removeprefix("torch."), expected)
    assert started[-1].longest == made.options.max_positions


def with_arguments(monkeypatch: pytest.MonkeyPatch, arguments: Any) -> None:
    """Let vLLM's engine be its arguments, which are of this type."""
    contents = {
        "vllm.engine.arg_utils": {"EngineArgs": arguments},
        "vllm.v1.engine.llm_engine": {"LLMEngine": SimpleNamespace(from_engine_args=lambda given: given)},
    }
    fake_vllm.put_modules(monkeypatch, contents)


@pytest.mark.parametrize(
    ("v2", "given", "expected"),
    [(True, [], [PROCESSOR]), (True, OWN, [*OWN, PROCESSOR]), (False, OWN, OWN), (False, [], None)],
)
def test_the_noise_of_runner_v2_comes_last(v2: bool, given: Any, expected: Any, monkeypatch: Any) -> None:
    class EngineArgs(SimpleNamespace):
        def create_engine_config(self) -> Any:
            return SimpleNamespace(use_v2_model_runner=v2)

    with_arguments(monkeypatch, EngineArgs)
    engine = EngineConfig(vllm={"logits_processors": given} if given else {})
    started = target._start(engine_arguments(ModelConfig(path="folder"), engine, None, 100, False))
    assert getattr(started, "logits_processors", None) == expected


def test_an_unknown_argument_of_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_the_model(model: str) -> None: ...

    with_arguments(monkeypatch, only_the_model)
    with pytest.raises(VllmError, match=r"engine\.vllm\.enforce_eagre"):
        target._start({"model": "folder", "enforce_eagre": True})


def test_a_tied_embedding_may_have_another_name() -> None:
    """GPT-2 calls it transformer.wte.weight."""
    loaded: list[Any] = []
    llm = SimpleNamespace(
        collective_rpc=lambda name, args: loaded.append(args[0].keys()), reset_prefix_cache=lambda **_: None
    )
    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=9)
    stub: Any = SimpleNamespace(
        options=SimpleNamespace(tied=True), _config=config, parallel=False, drafts=False, llm=llm
    )
    target.VllmTarget.load(stub, {"transformer.wte.weight": torch.zeros(9, 8)}, 3)
    assert (loaded, stub.version) == ([{"transformer.wte.weight"}], 3)


def test_numba_does_not_change_the_threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environment := {})
    set_environment()
    assert environment["NUMBA_NUM_THREADS"] == str(torch.get_num_threads())
    environment["NUMBA_NUM_THREADS"] = "7"
    set_environment()
    assert environment["NUMBA_NUM_THREADS"] == "7", "what the user has set stays"


def test_a_missing_vllm_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "vllm_version", lambda: None)
    with pytest.raises(VllmError, match=r"needs vLLM 0\.31 or 0\.32: pip install 'tlt-rl\[vllm\]'"):
        require_vllm()


def test_an_untested_version_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for found in ("0.31.0", "0.32", "0.32.0", "0.32.1+cpu", "0.30.0", "0.33.0", "0.320.1", "1.0", "unknown"):
        monkeypatch.setattr(settings, "vllm_version", lambda found=found: found)
        require_vllm()
        assert (f"tlt is not tested with vLLM {found} (tested: 0.31 or 0.32)" in caplog.text) != is_tested(found)
    assert caplog.text.count("is not tested") == 5
