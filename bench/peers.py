"""Times GRPO steps of trainers that a user could pick, with the same model, tasks, batch, token bound, optimizer,
threads.

    .venv-trl/bin/python bench/peers.py [RECIPE] --json FILE [--only "NAME;NAME"] [--steps 3] [--tokens 512] [--runs 1]
        [--section.key value ...]

Each contender is a process of its own, and they run in turn. Results that are in the file already stay, so that
contenders can be run one at a time. A step is generation, rewards and update, in wall-clock time. TRL is in the
environment of `make trl`, which also needs `pip install -e '.[tasks]'`. Contenders with vLLM run in the environment of
`make vllm`. vLLM's build for CPUs does not run `TRL, vLLM`, because TRL cannot load weights into it.

TRL's own sampling draws other responses than tlt, and other lengths take other times. So `TRL, generate, tlt's tokens`
has transformers generate the very responses of `TRL with tlt, off`: each forward pass and each draw is done, and then
the drawn token is replaced. That contender and all of TRL with tlt do the same work, which the sha256 of the weights
shows. Where tlt decodes in TRL, `responses_sha256` is of the token ids of all responses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LEARNED = {"drafter": "adaptive"}  # with the drafter of the recipe
CONTENDERS: dict[str, dict[str, Any]] = {
    "TRL, generate": {},
    "TRL, continuous batching": {"decoder": "batching"},
    "TRL, generate, tlt's tokens": {"speculation": {"drafter": "off"}, "generated": True},
    "TRL with tlt, off": {"speculation": {"drafter": "off"}},
    "TRL with tlt, suffix": {"speculation": {"drafter": "suffix"}},
    "TRL with tlt, adaptive": {"speculation": LEARNED},
    "TRL, vLLM": {"decoder": "vllm"},
    "TRL with tlt in vLLM, off": {"decoder": "vllm", "speculation": {"drafter": "off"}},
    "TRL with tlt in vLLM, adaptive": {"decoder": "vllm", "speculation": LEARNED},
    "tlt, suffix": {"alone": {"drafter": "suffix"}},
    "tlt, adaptive": {"alone": LEARNED},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart.toml")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default=";".join(CONTENDERS), help="contenders, separated by semicolons")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=1, help="of each contender, all in turn")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments, overrides = parser.parse_known_args()
    if arguments.one:
        print(json.dumps(run(arguments.one, arguments.recipe, arguments.steps, arguments.tokens, overrides)))
        return
    from tlt.metrics import provenance, write_json

    names = arguments.only.split(";")
    found = json.loads(arguments.json.read_text()) if arguments.json.is_file() else {"contenders": {}}
    for name in names * arguments.runs:
        command = [sys.executable, __file__, arguments.recipe, "--json", str(arguments.json), "--one", name]
        command += ["--steps", str(arguments.steps), "--tokens", str(arguments.tokens), *overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        found["contenders"].setdefault(name, []).append(measured)
        settings = {"recipe": arguments.recipe, "tokens": arguments.tokens, "overrides": overrides}
        write_json(arguments.json, {**provenance(), **settings, "contenders": found["contenders"]})
        print(f"{name}: {', '.join(f'{s:.1f}' for s in measured['seconds'])} s a step, reward {measured['reward']}")


def run(name: str, recipe: str, steps: int, tokens: int, overrides: Sequence[str]) -> dict[str, Any]:
    from tlt.config import load_config

    bounds = {"rollout.max_new_tokens": tokens, "train.steps": steps, "run.trackers": "[]", "eval.every": 0}
    config = load_config(recipe, [f"--{name}={value}" for name, value in bounds.items()] + [*overrides])
    options = dict(CONTENDERS[name])
    for field in ("alone", "speculation"):
        if options.get(field) == LEARNED:
            options[field] = LEARNED | {"path": config.speculation.path}
    with tempfile.TemporaryDirectory() as folder:
        return alone(config, folder, options["alone"]) if "alone" in options else in_trl(config, folder, **options)


def alone(config: Any, folder: str, speculation: dict[str, Any]) -> dict[str, Any]:
    from rich.console import Console

    from tlt.config import SpeculationConfig, section_of
    from tlt.metrics import read_metrics
    from tlt.run.display import Display
    from tlt.run.train import train

    run_section = config.run.model_copy(update={"folder": f"{folder}/run", "save_every": 0})
    speculation_section = section_of(SpeculationConfig, speculation, "speculation")
    changed = config.model_copy(update={"run": run_section, "speculation": speculation_section})
    train(changed, display=Display(Console(quiet=True)))
    lines = read_metrics(Path(folder) / "run")
    steps = [line for line in lines if "rollout" in line.get("seconds", {})]
    return {
        "seconds": [line["seconds"]["total"] for line in steps],
        "rollout": [line["seconds"]["rollout"] for line in steps],
        "reward": [round(line["reward"], 3) for line in steps],
        "tokens": [line["tokens"] for line in steps],
        "accept_length": [round(line["accept_length"], 2) for line in steps],
    }


class Generate:
    """A `rollout_func` by transformers' `generate`, which is made to give the responses of a run with tlt."""

    def __init__(self, responses: list[dict[str, Any]]) -> None:
        self.responses = responses

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        import torch
        from transformers import LogitsProcessorList

        had, tokenizer = self.responses.pop(0), trainer.processing_class
        padded = tokenizer.pad({"input_ids": had["prompt_ids"]}, padding_side="left", return_tensors="pt")
        start, wanted = padded["input_ids"].shape[1], had["completion_ids"]
        rows = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row) for row in wanted], batch_first=True, padding_value=tokenizer.pad_token_id
        )

        def put(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            one = rows[:, ids.shape[1] - start, None]
            return torch.full_like(scores, -torch.inf).scatter_(1, one, scores.gather(1, one))

        with torch.no_grad(), torch.random.fork_rng():  # TRL shuffles by the global generator
            found = trainer.model.generate(
                **padded,
                generation_config=trainer.generation_config,
                logits_processor=LogitsProcessorList([put]),
            )
        assert torch.equal(found[:, start:], rows)
        return had


class Recorder:
    """A `rollout_func` that records the answers of another one."""

    def __init__(self, rollout: Any) -> None:
        self.rollout, self.answers = rollout, list[dict[str, Any]]()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        self.answers.append(self.rollout(prompts, trainer))
        return self.answers[-1]


def in_trl(
    config: Any,
    folder: str,
    decoder: str = "generate",
    speculation: dict[str, Any] | None = None,
    generated: bool = False,
) -> dict[str, Any]:
    from tlt.integrations.trl import Rollout
    from tlt.models.device import torch_dtype

    engine = {"max_rows": config.engine.max_rows, "vllm": {"dtype": str(torch_dtype(config.model)).split(".")[1]}}
    rollout = Recorder(Rollout(speculation, engine)) if speculation else None
    measured = trl_steps(config, folder, decoder, rollout)
    if generated:
        assert rollout
        expected, measured = measured, trl_steps(config, folder, decoder, Generate(rollout.answers))
        assert measured["policy_sha256"] == expected["policy_sha256"], "the same responses lead to the same weights"
    if rollout:
        said = [answer["completion_ids"] for answer in rollout.answers]
        measured["responses_sha256"] = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    return measured


def trl_steps(config: Any, folder: str, decoder: str, rollout: Any) -> dict[str, Any]:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from tlt.data.prompts import encoder, load_prompts
    from tlt.data.tokenizer import load_tokenizer
    from tlt.models.weights import sha256

    tokenizer = load_tokenizer(config.model.path)
    prompts = load_prompts(config.data, encoder(tokenizer, config.data))
    texts = [tokenizer.decode(prompt.token_ids) for prompt in prompts]  # with the chat template
    score, close = reward_of(config, prompts)
    steps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            steps.append(time.perf_counter() - self.began)

    trainer = GRPOTrainer(
        model=trl_model(config, tokenizer),
        reward_funcs=score,
        args=GRPOConfig(**grpo_settings(config, folder, decoder)),
        train_dataset=Dataset.from_list([{"prompt": text, "row": i} for i, text in enumerate(texts)]),
        callbacks=[Clock()],
        rollout_func=rollout,
    )
    trainer.train()
    close()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    size = config.rollout.prompts_per_step * config.rollout.group_size
    return {
        "seconds": steps,
        "rollout": [log.get("tlt/seconds/rollout") for log in logs],
        "reward": [round(log["reward"], 3) for log in logs],
        "tokens": [round(log["completions/mean_length"] * size) for log in logs],
        "accept_length": [round(log.get("tlt/accept_length", 1.0), 2) for log in logs],
        "policy_sha256": sha256(trainer.model.state_dict()),
    }


def trl_model(config: Any, tokenizer: Any) -> Any:
    """The recipe's model in the recipe's format. Tokens that contain a stop string end a response, because TRL knows
    no stop strings. Raises ValueError if a stop string is not one token."""
    from transformers import AutoModelForCausalLM

    from tlt.data.limits import stop_token_ids
    from tlt.models.device import torch_dtype

    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch_dtype(config.model))
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    ends = set(stop_token_ids(config.model.path, tokenizer))
    for stop in config.rollout.stop_strings:
        if stop not in texts.values():
            raise ValueError(f"rollout.stop_strings: {stop!r} is not one token, and TRL ends a response at a token")
        ends |= {token for token, text in texts.items() if stop in text}
    model.generation_config.eos_token_id = sorted(ends)
    return model


def grpo_settings(config: Any, folder: str, decoder: str) -> dict[str, Any]:
    """Settings for one generation of the recipe's size, and one optimizer step on it. `decoder`: generate, batching or
    vllm."""
    rollout, train = config.rollout, config.train
    size, parts = rollout.prompts_per_step * rollout.group_size, 4
    settings: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": size // parts,
        "gradient_accumulation_steps": parts,
        "num_generations": rollout.group_size,
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_steps": train.steps,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta2": train.adam_beta2,
        "loss_type": "grpo",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    if decoder == "batching":  # the default cache would take most of the memory
        settings["use_transformers_continuous_batching"] = True
        cache = {"num_blocks": 4 * size, "max_batch_tokens": 2048}
        settings["transformers_continuous_batching_config"] = cache
    if decoder == "vllm":
        longest = config.data.max_prompt_tokens + rollout.max_new_tokens
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": longest}
        settings["vllm_importance_sampling_correction"] = False  # its weights differ in the last bits of log-probs
    return settings


def reward_of(config: Any, prompts: Any) -> tuple[Callable[..., list[float | None]], Callable[[], None]]:
    """The recipe's own reward as a function for TRL, and a function that closes it."""
    from tlt.rewards import make_reward
    from tlt.types import Request, Response, SamplingParams

    reward = make_reward(config, prompts)

    def score(completions: list[str], row: list[int], **columns: Any) -> list[float | None]:
        said = [
            Response(Request(prompts[n], i, 0, i, SamplingParams()), [], [], [], "stop", text)
            for i, (n, text) in enumerate(zip(row, completions, strict=True))
        ]
        reward(said)
        return [response.reward for response in said]

    return score, reward.close


if __name__ == "__main__":
    main()
