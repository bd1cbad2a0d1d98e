"""The plugin that vLLM loads by itself. Requests for our noise get it or are refused, and all others are unchanged.
vLLM is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest

from tlt.vllm import plugin
from tlt.vllm.noise import Draw
from tlt.vllm.settings import EXTENSION, PROCESSOR

EXTRA = Draw(None, 5, 3, 1.0, 0, 1.0).as_extra()


class InputProcessor:
    """vllm.v1.engine.input_processor.InputProcessor, which receives a request's parameters when it arrives."""

    def __init__(self, v2: bool = False, processors: Any = None, extension: str = "") -> None:
        self.vllm_config = SimpleNamespace(
            use_v2_model_runner=v2,
            model_config=SimpleNamespace(logits_processors=processors),
            parallel_config=SimpleNamespace(worker_extension_cls=extension),
        )

    def _validate_params(self, params: Any, supported_tasks: Any) -> str:
        return f"theirs, of {params}"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM with the plugin: its request processor, its runner V1, and the platform."""

    class Processor(InputProcessor):
        pass

    class Runner(fake_vllm.RunnerV1):
        pass

    platform = SimpleNamespace(is_cpu=lambda: True)
    contents = {
        "vllm.platforms": {"current_platform": platform},
        "vllm.v1.engine.input_processor": {"InputProcessor": Processor},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": Runner},
    }
    fake_vllm.put_modules(monkeypatch, contents)
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr("tlt.vllm.worker_extension.require_vllm", lambda: None)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    return SimpleNamespace(Processor=Processor, Runner=Runner, platform=platform)


def params(temperature: float, extra: Any) -> Any:
    return SimpleNamespace(temperature=temperature, extra_args=extra, max_tokens=8)


@pytest.mark.parametrize("others", [params(0.7, None), params(0.7, {"theirs": 1}), SimpleNamespace(pooling=True)])
def test_other_requests_are_accepted_unchanged(others: Any, vllm: Any) -> None:
    plugin.register()
    for v2 in (False, True):
        assert vllm.Processor(v2)._validate_params(others, ()) == f"theirs, of {others}"


@pytest.mark.parametrize("arguments", [(), (True, ["theirs:Own", PROCESSOR])])
def test_our_requests_are_accepted_if_the_noise_is_added_and_they_are_valid(arguments: Any, vllm: Any) -> None:
    plugin.register()
    processor = vllm.Processor(*arguments)
    ours = params(0.0, EXTRA)
    assert processor._validate_params(ours, ()) == f"theirs, of {ours}"
    for faulty in (params(0.7, EXTRA), params(0.0, {"tlt": {"seed": 1}})):
        with pytest.raises(ValueError, match="extra_args"):
            processor._validate_params(faulty, ())


def test_our_requests_are_refused_if_nothing_adds_the_noise(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be decoded greedily. On a GPU the runner V1 adds the noise only if it was requested before the
    start."""
    vllm.platform.is_cpu = lambda: False
    plugin.register()
    for v2 in (False, True):
        with pytest.raises(ValueError, match=rf"--logits-processors {PROCESSOR}, or with VLLM_USE_V2_MODEL_RUNNER=0"):
            vllm.Processor(v2)._validate_params(params(0.0, EXTRA), ())
    assert vllm.Processor(extension=EXTENSION)._validate_params(params(0.0, EXTRA), ())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert vllm.Processor()._validate_params(params(0.0, EXTRA), ())


def test_an_untested_version_is_not_changed(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.33.0")
    plugin.register()
    assert vllm.Processor._validate_params is InputProcessor._validate_params
    assert vllm.Runner._sample is fake_vllm.RunnerV1._sample


def test_the_runner_v1_adds_the_noise_once_however_often_it_is_loaded(vllm: Any) -> None:
    from small import Target
    from test_shared_noise import SAMPLINGS, ours, requests

    plugin.register()
    plugin.register()
    target = Target().decoder
    asked = requests([SAMPLINGS["tempered"]])[:1]
    runner = vllm.Runner(target, 2)
    runner.add("0", asked[0], params(0.0, Draw(0, asked[0].seed, 3, 0.6, 0, 1.0).as_extra()))
    said = ours(target, asked)[asked[0].seed].token_ids
    for _ in said:
        runner.step({})
    assert runner.live["0"].tokens == said
