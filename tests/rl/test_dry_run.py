"""Whether an update fits the memory, with made-up amounts of free memory."""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import save_weights, tiny_config, tiny_model
from torch.profiler import ProfilerActivity, profile

from tlt.config import Config, ConfigError
from tlt.rl import dry_run as module
from tlt.rl.batching import MicroBatch
from tlt.rl.dry_run import dry_run, memory_needed
from tlt.rl.logprobs import LogProbs, last_hidden
from tlt.rl.policy import Update
from tlt.rl.sharded import make_policy as policy_of
from tlt.run import train as run
from tlt.run.display import Display

MIB = 2**20
PROMPT = 100


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    save_weights(tiny_model(home / "model"), layers=4)
    return home


def config_of(home: Path, *, micro: int = 4096, new: int = 400, **train: Any) -> Config:
    settings = {"micro_batch_tokens": micro, **train}
    rollout = {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": new}
    return tiny_config(home, train=settings, rollout=rollout, model={"dtype": "float32"})


def refusal(monkeypatch: pytest.MonkeyPatch, free: float, config: Config, policy: Any = None) -> str:
    """Return the error, or an empty text if the update fits."""
    monkeypatch.setattr(module, "free_bytes", lambda device: free)
    try:
        dry_run(policy or policy_of(config), config, PROMPT)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_saved_memory_of_a_pass_equals_what_stays_allocated(home: Path) -> None:
    """Torch's allocator measures it. Gradient checkpointing does not hide it."""
    config, saves = config_of(home), config_of(home, gradient_checkpointing=True)
    policy, saving = policy_of(config), policy_of(saves)
    ids = torch.arange(64) % policy.model.config.vocab_size
    last_hidden(policy.model, ids, policy.autocast)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        hidden = last_hidden(policy.model, ids, policy.autocast)
    left = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    assert hidden.requires_grad
    assert module._saved_bytes(policy, 64) == pytest.approx(left, rel=0.05)
    needs = [memory_needed(policy, config, PROMPT), memory_needed(saving, saves, PROMPT)]
    assert needs[0].optimizer == needs[1].optimizer
    assert needs[0].activations / 4 < needs[1].activations < needs[0].activations / 2, "one of four layers"
    assert any(layer.training for layer in module.checkpointable_layers(saving.model)), "they are on again"


def test_logits_are_counted_with_their_gradient(home: Path) -> None:
    """Torch's allocator measures the peak of one chunk."""
    config = config_of(home)
    policy = policy_of(config)
    tokens, vocab = 2048, policy.model.config.vocab_size
    hidden, weight = torch.randn(tokens, 2, requires_grad=True), torch.randn(2, vocab)
    targets = torch.arange(tokens) % vocab
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        LogProbs.apply(hidden @ weight, targets, 1.0)[0].sum().backward()
    events: Any = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    peak = max(accumulate(changes))
    need = memory_needed(policy, config_of(home, micro=tokens), PROMPT)
    assert need.logits == pytest.approx(peak, rel=0.2)


def test_a_batch_smaller_than_a_micro_batch_needs_less(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 responses of up to 110 tokens are 7,040 tokens with any budget, and 1,760 in each of four optimizer steps."""
    for updates, tokens in ((1, 7040), (4, 1760)):
        budgets = (tokens, 10**6)
        configs = [config_of(home, micro=micro, new=10, updates_per_step=updates) for micro in budgets]
        needs = [refusal(monkeypatch, 0, config) for config in configs]
        assert f"with {tokens:,} tokens" in needs[0]
        assert needs[0].partition("free")[0] == needs[1].partition("free")[0]


def test_each_worker_of_a_machine_has_its_share(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker also keeps a copy of weights and moments during an update, because another may be lost."""
    config = config_of(home)
    two = config.model_copy(update={"cluster": config.cluster.model_copy(update={"workers": 2})})
    policy = policy_of(config)
    one_need, two_need = (memory_needed(policy, each, PROMPT) for each in (config, two))
    weights = sum(p.nbytes for p in policy.model.parameters())
    assert (one_need.optimizer, two_need.optimizer) == (3 * weights, 6 * weights)
    need = sum(two_need)
    assert not refusal(monkeypatch, 2 * need, two)
    assert "for each of 2 workers" in refusal(monkeypatch, 2 * need - 2, two)


@pytest.mark.parametrize(("micro", "new", "shape"), [(256, 28, (1, 256)), (100, 60, (1, 160)), (320, 60, (1, 320))])
def test_the_largest_micro_batch_leaves_nothing_behind(
    home: Path, monkeypatch: pytest.MonkeyPatch, micro: int, new: int, shape: tuple[int, int]
) -> None:
    config = config_of(home, micro=micro, new=new)
    policy, found = policy_of(config), list[tuple[int, ...]]()
    real, before, random = Update.add_gradient, policy.sha256(), torch.get_rng_state()

    def add(self: Update, micro: MicroBatch, *others: Any) -> None:
        real(self, micro, *others)
        found.append(tuple(micro.input_ids.shape))

    monkeypatch.setattr(Update, "add_gradient", add)
    assert module._measured(policy, config, PROMPT) < math.inf
    assert found == [shape]
    assert (policy.sha256(), policy.updated) == (before, 0.0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_a_device_that_runs_out_of_memory_keeps_no_gradient(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(home)
    policy = policy_of(config)

    def fail(*_: Any) -> None:
        for parameter in policy.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Update, "add_gradient", fail)
    assert module._measured(policy, config, PROMPT) == math.inf
    assert all(parameter.grad is None for parameter in policy.model.parameters())


@pytest.mark.parametrize("measured", [2**30, math.inf])
def test_a_pass_on_a_device_overrides_the_estimate(
    home: Path, monkeypatch: pytest.MonkeyPatch, measured: float
) -> None:
    monkeypatch.setattr(module, "memory_needed", lambda *_: module.Need(3 * 2**30, 2**29, 2**20))
    monkeypatch.setattr(module, "_measured", lambda *_: measured)
    said, has_room = (
        refusal(monkeypatch, 2**31, config_of(home), SimpleNamespace(device=torch.device("cuda"))),
        measured < 2**31,
    )
    assert has_room == (not said)
    assert has_room or "3.50 GiB (optimizer 3.00, activations 0.50, logits 0.00)" in said


def test_a_run_ends_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda device: 0)
    with pytest.raises(ConfigError, match="an update does not fit the memory of cpu"):
        run.train(tiny_config(tmp_path), display=Display())
    assert not (tmp_path / "run" / "config.json").exists()
