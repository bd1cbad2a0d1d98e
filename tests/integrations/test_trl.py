"""tlt inside the installed TRL: `make test-trl`. With any drafter, TRL ends with the same completions and weights."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: make test-trl")

import peft
from integrations.real_trl import PROMPTS, Result, make, run
from transformers import AutoModelForCausalLM

from tlt.cluster.remote import ClusterRollout
from tlt.config import EngineConfig
from tlt.draft.eagle import EagleLayer, eagle_options, save_drafter
from tlt.engine.engine import Engine
from tlt.integrations.trl import Rollout
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options
from tlt.rl.lora import merged_state
from tlt.types import Request

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
HARD = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 3}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Return a folder with a model and a drafter for it."""
    make(home)
    config = AutoModelForCausalLM.from_pretrained(home / "model").config
    torch.manual_seed(3)
    save_drafter(EagleLayer(eagle_options(decoder_options(config), "eagle1", 32)), home / "drafter")
    return home


def modes(folder: Path) -> dict[str, dict[str, Any]]:
    path = str(folder / "drafter")
    return {
        "off": {"drafter": "off"},
        "suffix": {"drafter": "suffix"},
        "learned": {"drafter": "eagle", "path": path},
        "adaptive": {"drafter": "adaptive", "path": path},
        "trained": {
            "drafter": "adaptive",
            "path": path,  # a random one would wait for more harvest than there is here
            "training": {"extra": 1.0, "micro_batch_tokens": 32, "unroll": 2},
        },
    }


@pytest.fixture(scope="module")
def plain(home: Path) -> Result:
    return run(home, Rollout(speculation={"drafter": "off"}), **HARD, **EVALUATED)


def clock(turn: float) -> SimpleNamespace:
    """Return a clock that goes on by `turn` seconds at each call."""
    turns = itertools.count()
    return SimpleNamespace(monotonic=lambda: next(turns) * turn)


@pytest.mark.parametrize("mode", ["suffix", "learned", "adaptive", "trained"])
def test_completions_and_final_weights_do_not_depend_on_the_drafter(home: Path, plain: Result, mode: str) -> None:
    """The run has accumulation, several generations per global step, two iterations over each, and evaluations."""
    # a rollout takes 30 turns and training ends after turns, not seconds, so that a busy machine trains as much
    with (
        patch("tlt.spot.schedule.Schedule._spend"),
        patch("tlt.cluster.idle.time", clock(0.001)),
        patch("tlt.cluster.coordinator.time", clock(0.03)),
    ):
        found = run(home, Rollout(speculation=modes(home)[mode]), **HARD, **EVALUATED)
    assert found.completions == plain.completions
    assert found.sha256 == plain.sha256
    if mode == "learned":
        assert any(log.get("tlt/accept_length", 1.0) > 1.0 for log in found.logs), "it did speculate"
    if mode == "trained":
        assert sum(log.get("tlt/drafter_tokens", 0) for log in found.logs) > 0


def test_the_run_trained_and_evaluated(plain: Result, home: Path) -> None:
    untrained = make(home, Rollout(speculation={"drafter": "off"}))
    before = dict(untrained.model.named_parameters())
    assert all(not torch.equal(p, before[name]) for name, p in plain.trainer.model.named_parameters())
    assert sum("eval_reward" in log for log in plain.logs) == 3
    assert all({"tlt/accept_length", "tlt/seconds/rollout", "tlt/seen_ahead"} <= log.keys() for log in plain.logs[:1])
    assert any("eval_tlt/accept_length" in log for log in plain.logs)


def test_every_completion_is_decoded_with_the_present_weights(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused AdamW does not change version counters of parameters, so an engine must not rely on them."""
    mine, checked, requests = Rollout(speculation={"drafter": "suffix"}), list[int](), list[Request]()
    generate = ClusterRollout.generate

    def watched(decoding: ClusterRollout, asked: Sequence[Request], on_response: Any) -> Any:
        requests[:] = asked
        return generate(decoding, asked, on_response)

    def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
        found = mine(prompts, trainer)
        target = Decoder(decoder_options(trainer.model.config), torch.float64, torch.device("cpu"))
        target.load(trainer.model.state_dict(), 0)
        again = {r.request.seed: r for r in Engine(target, EngineConfig()).generate(requests)}
        assert [again[request.seed].token_ids for request in requests] == found["completion_ids"]
        for prompt, tokens, logprobs in zip(*found.values(), strict=True):
            with torch.no_grad():
                logits = trainer.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            own = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert logprobs == pytest.approx(own.tolist(), abs=1e-4), "they are comparable with the trainer's"
        checked.append(len(requests))
        return found

    monkeypatch.setattr(ClusterRollout, "generate", watched)
    run(home, rollout, **HARD)
    assert len(checked) == 3


@pytest.mark.parametrize("messages", [False, True])
def test_prompts_are_tokenized_as_trl_does(home: Path, messages: bool) -> None:
    prompts: list[Any] = [row["prompt"] for row in PROMPTS]
    if messages:
        prompts = [[{"role": "system", "content": "short"}, {"role": "user", "content": text}] for text in prompts]
    mine = Rollout(speculation={"drafter": "suffix"})
    trainer = make(home, mine, [{"prompt": prompt} for prompt in prompts])
    assert mine(prompts, trainer)["prompt_ids"] == trainer._tokenize_prompts(prompts)[0]
    trainer.train()


def test_lora_adapters_are_merged(home: Path) -> None:
    shape = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    found = [run(home, Rollout(speculation=modes(home)[mode]), peft=shape, **HARD) for mode in ("off", "suffix")]
    assert found[0].completions == found[1].completions
    assert found[0].sha256 == found[1].sha256
    adapted = found[0].trainer.model
    merged = merged_state(adapted.get_base_model())
    whole = adapted.merge_and_unload().state_dict()
    assert merged.keys() == whole.keys()
    assert all(torch.allclose(merged[key], whole[key], rtol=0, atol=1e-12) for key in whole)


def test_the_example_is_a_trl_script_except_for_two_lines(home: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "trl_grpo.py"
    assert sum("Rollout" in line for line in script.read_text(encoding="utf-8").splitlines()) == 2
    command = [sys.executable, str(script), str(home / "model"), "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tlt/accept_length" in done.stdout


def two_processes(folder: Path, what: str) -> list[dict[str, Any]]:
    """Run `two_trl.py` in two processes of one group, as torchrun starts them. Return the results of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent / "two_trl.py"
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, str(script), what, str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [{**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    started = [subprocess.Popen(command, env=environment, text=True, **pipes) for environment in ranks]
    outputs = [process.communicate(timeout=200) for process in started]
    assert all(process.returncode == 0 for process in started), outputs[0][1][-3000:] + outputs[1][1][-3000:]
    return [json.loads(said.splitlines()[-1]) for said, _ in outputs]


def test_two_processes_end_the_same_with_any_drafter(home: Path) -> None:
    """Groups of four, of which each process has two."""
    first, second = two_processes(home, "modes")
    assert len({first[mode]["sha256"] for mode in first} | {second[mode]["sha256"] for mode in second}) == 1
    for rank in (first, second):
        assert len({json.dumps(rank[mode]["completions"]) for mode in rank}) == 1
    assert first["adaptive"]["drafter_tokens"] + second["adaptive"]["drafter_tokens"] > 0, "idle time was trained in"


def test_a_run_with_fsdp2_ends_like_one_with_ddp(home: Path) -> None:
    for said in two_processes(home, "sharded"):
        assert said["plain"] == said["adaptive"], "whatever drafts"
        assert said["plain"]["completions"] == said["ddp"]["completions"]
        assert said["plain"]["weights"] == pytest.approx(said["ddp"]["weights"], rel=1e-9)
