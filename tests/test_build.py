"""Engines, targets and prompts of a recipe are the same in every command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config

from tlt.build import for_machine, open_target, open_workplace, starting_drafter, steps_ahead
from tlt.config import Config
from tlt.data.prompts import DataError
from tlt.data.tokenizer import load_tokenizer
from tlt.engine.choice import Adaptive
from tlt.engine.drafters import make_drafters
from tlt.engine.own_backend import make_tuner
from tlt.models.loading import make_target
from tlt.models.model_folder import ModelError
from tlt.run.about import about_model
from tlt.run.opening import make_parts


def test_a_benchmark_decodes_the_prompts_of_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no chat template"):
        open_workplace(tiny_config(tmp_path, data={"chat": True}))
    config = tiny_config(tmp_path, data={"template": "Q: {question}"})
    parts, _ = make_parts(config, load_tokenizer(config.model.path))
    assert open_workplace(config).prompts == parts.prompts
    assert open_workplace(config).sampling == parts.sampling


def by_vllm(home: Path, workers: int, train: Any = None, **speculation: Any) -> Config:
    named = {"speculation": {"drafter": "adaptive"} | speculation, "cluster": {"workers": workers}}
    engine = {"backend": "vllm"}
    return for_machine(tiny_config(home, model={"dtype": "float32"}, engine=engine, train=train or {}, **named))


@pytest.mark.parametrize(("workers", "cores", "steps"), [(2, 2, 4), (3, 2, 0), (1, 1, 4)])
def test_workers_that_share_cores_do_not_look_ahead(
    workers: int, cores: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    config = for_machine(tiny_config(tmp_path, cluster={"workers": workers}, speculation={"drafter": "adaptive"}))
    assert steps_ahead(config.speculation) == steps
    assert ("because workers share cores" in about_model(config)) == (steps == 0)


def test_the_tuner_knows_that_random_weights_are_never_right(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, cluster={"workers": 2}, speculation={"drafter": "adaptive"})
    target = make_target(config.model)
    drafters, _ = make_drafters(config.speculation, target, starting_drafter(config, target.options))
    tuner = make_tuner(config.speculation, target, drafters)
    assert isinstance(tuner, Adaptive)
    assert tuner.seen.priors == {"eagle": 0.0}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_vllm_refuses_an_untied_head_of_a_tied_config(tmp_path: Path, target: str) -> None:
    """The error comes before vLLM starts. Its weights would differ from the policy's after the first update."""
    config = by_vllm(tmp_path, 1, {"lora": {"rank": 2, "targets": ["q_proj", target]}}, drafter="off")
    with pytest.raises(
        ModelError, match=f"targets has {target}, but the model's head and embedding are tied.*backend = 'tlt'"
    ):
        open_target(config, None)
