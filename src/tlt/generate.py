"""`tlt generate`: answer prompts with a model folder, through the same engine that training uses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tlt.build import detokenizer, load_tokenizer, make_engine, make_target, sampling_params, vllm_target
from tlt.checkpoint import latest
from tlt.config import EngineConfig, ModelConfig, RolloutConfig, SpeculationConfig
from tlt.data import DataError
from tlt.engine.protocol import RolloutEngine
from tlt.files import is_text
from tlt.models.weights import read_safetensors
from tlt.sampling import request_seed
from tlt.types import Prompt, Request


def generate(
    model: ModelConfig,
    rollout: RolloutConfig,
    speculation: SpeculationConfig,
    prompts: Sequence[str],
    samples: int,
    seed: int,
    backend: EngineConfig,
) -> None:
    """Print `samples` responses to each prompt, each as it finishes, and the speed at the end."""
    console = Console(highlight=False)
    model = model.model_copy(update={"path": str(policy_in(model.path))})
    tokenizer = load_tokenizer(model.path)
    params = sampling_params(rollout, model.path, tokenizer)
    asked = [_prompt(i, text, tokenizer) for i, text in enumerate(prompts)]
    longest = max(len(prompt.token_ids) for prompt in asked) + params.max_new_tokens
    engine = _engine(model, backend, speculation, tokenizer, longest)
    requests = [
        Request(prompt, index, 0, request_seed(seed, "generate", prompt.prompt_id, 0, index), params)
        for prompt in asked
        for index in range(samples)
    ]
    start = time.perf_counter()
    for response in engine.generate(requests):
        console.rule(f"prompt {response.request.prompt.prompt_id}, response {response.request.index}", align="left")
        console.print(response.text, markup=False)
    seconds = time.perf_counter() - start
    stats = engine.stats
    speed = f"{stats.tokens} tokens in {seconds:.1f} s ({stats.tokens / seconds:,.0f} tokens/s)"
    console.rule(style="dim")
    console.print(f"{speed}, accept length {stats.accept_length:.2f}", style="dim")


def _engine(
    model: ModelConfig, config: EngineConfig, speculation: SpeculationConfig, tokenizer: Any, longest: int
) -> RolloutEngine:
    if config.backend == "vllm":
        from tlt.vllm.engine import VllmEngine

        return VllmEngine(vllm_target(model, config, speculation, longest), config, detokenizer(tokenizer))
    target = make_target(model)
    target.load(read_safetensors(model.path), version=0)
    return make_engine(config, speculation, target, tokenizer)


def policy_in(folder: str | Path) -> Path:
    """The model folder itself, or that of the newest whole checkpoint of a run's folder. Raises CheckpointError."""
    path = Path(folder)
    if (path / "checkpoints").is_dir():
        return latest(path / "checkpoints").folder / "policy"
    return path / "policy" if (path / "policy" / "config.json").is_file() else path


def _prompt(number: int, text: str, tokenizer: Any) -> Prompt:
    """Raises DataError."""
    if not is_text(text):
        raise DataError(f"--prompt holds what is no text in UTF-8: {text[:80]!a}")
    token_ids = tuple(tokenizer(text)["input_ids"])
    if not token_ids:
        raise DataError(f"--prompt {text!r} is empty: it needs at least one token")
    return Prompt(number, text, token_ids)
