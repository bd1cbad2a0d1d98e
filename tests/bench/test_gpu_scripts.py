"""The scripts for a machine with a GPU run on a CPU with tiny models, count rightly and survive cut-offs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_graph import fake_graphs

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import gpu_plan
import gpu_rounds
import rollout
import rows
import shapes
import update_cost
from measuring import Results, counts, device_counts

from tlt.cli import _parser
from tlt.commands.options import joined
from tlt.config import EngineConfig, load_config
from tlt.draft.strategy import Strategy
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.types import Prompt, Request, SamplingParams

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
DEVICE = ("device_ms", "launches", "host_to_device", "device_to_host", "device_to_device", "peak_mib")
"""figures of a device, which are null on a CPU"""


def cases_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8"))["cases"]


# -- gpu_rounds.py -----------------------------------------------------------------------------------------------------


def test_rounds_of_every_kind_are_measured_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "rounds.json"
    words = "--shape tiny tiny-gemma3 --batches 1 3 --contexts 40 --chains 0 2 --mixed --warm 1 --rounds 2 --device cpu"
    assert gpu_rounds.main([*words.split(), "--json", str(file)]) == 0
    found = {(case["shape"], case["batch"], case["chain"]): case for case in cases_of(file)}
    assert len(found) == 8
    for (_, batch, chain), case in found.items():
        assert case["ms"] > 0
        assert batch <= case["tokens_per_round"] <= batch * (chain + 1)
        assert case["captures"] == [0, 0]
        assert [case[name] for name in DEVICE] == [None] * len(DEVICE)
    for shape in ("tiny", "tiny-gemma3"):
        assert found[shape, 1, 0]["operations"] < found[shape, 1, 2]["operations"]


def test_the_floor_is_weights_and_keys_and_values() -> None:
    config = shapes.shape_config("tiny")
    target = shapes.random_target(config, torch.float32, CPU)
    # a layer: queries and output 2 * 32 * 32, keys and values 2 * 16 * 32, feed-forward 3 * 32 * 48, two norms
    weights = 2 * (2 * 1024 + 2 * 512 + 3 * 1536 + 64) + 96 * 32 + 32
    keys_and_values = 2 * 2 * 2 * 8  # of a token: both, layers, heads, head size
    assert gpu_rounds.floor_bytes(target, config, [10, 30], 0) == 4 * (weights + 40 * keys_and_values)
    # eagle1: the layer without its input norm, the fusion 64 * 32, the head
    drafter = 2 * 1024 + 2 * 512 + 3 * 1536 + 32 + 2048 + 96 * 32
    assert gpu_rounds.floor_bytes(target, config, [], 4) == 4 * (weights + 4 * drafter)
    found = gpu_rounds.over_floor({"ms": 6.0, "device_ms": None}, 10**6, 0.5)
    assert found == {"floor_mib": 10**6 / 2**20, "floor_ms": 2.0, "ms_over_floor": 3.0, "device_ms_over_floor": None}
    assert shapes.weights_read(shapes.shape_config("tiny", tie_word_embeddings=False)) == shapes.weights_read(config)
    config = shapes.shape_config("tiny-gemma3")  # a layer with a window of 80 tokens, and one without
    target = shapes.random_target(config, torch.float32, CPU)
    assert gpu_rounds.kv_bytes(target, config, 200) == (80 + 200) * 2 * 8 * 4


def test_captured_graphs_are_counted() -> None:
    config = shapes.shape_config("tiny")
    target = shapes.random_target(config, torch.float64, CPU)
    with fake_graphs() as captured:
        target.cuda_graphs = True
        case = gpu_rounds.Case(batch=2, context=20, chain=2, mixed=False)
        found = gpu_rounds.measure_rounds(target, config, case, warm=3, rounds=2, speed=None)
    assert sum(found["captures"]) == len(captured) + 1 == 3  # the pass, the chain, and the graph that keeps the pool


def test_the_memory_of_training_is_measured_by_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "memory.json"
    words = "--train --shapes tiny --batches 2 --contexts 12 --chains 0 --device cpu --json"
    assert gpu_rounds.main([*words.split(), str(file)]) == 0
    (case,) = cases_of(file)
    assert {name for name in case if name.endswith("_seconds")} == {
        f"{phase}_seconds" for phase in ("policy", "load", "rollout", "update")
    }

    def fails(self: Any, batch: Any, step: int) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(shapes.RandomPolicy, "update", fails)
    found = gpu_rounds.measure_training("tiny", torch.float32, CPU, gpu_rounds.Case(2, 12, 0, False), 1)
    assert found["skipped"] == "out of memory in the update"
    assert "rollout_seconds" in found


# -- measuring.py ------------------------------------------------------------------------------------------------------


def test_operations_and_tensors_from_numbers_are_counted() -> None:
    def work() -> None:
        x = torch.tensor([[1.0, 2.0]])
        (x + x).view(-1).transpose(0, 0).mul_(2)

    found = counts(work, CPU)
    assert (found["operations"], found["from_numbers"]) == (2, 1)
    assert found["launches"] is None


def event(name: str, micros: float, device: str = "CUDA", annotation: bool = False) -> Any:
    time_range = SimpleNamespace(elapsed_us=lambda: micros)
    kind = SimpleNamespace(name=device)
    return SimpleNamespace(name=name, device_type=kind, time_range=time_range, is_user_annotation=annotation)


def test_figures_of_a_device_are_read_from_a_profile() -> None:
    launches = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaGraphLaunch")
    events = [
        *(event(name, 50, "CPU") for name in (*launches, "cudaMemcpyAsync", "aten::mm", "cudaStreamSynchronize")),
        *(event("gemm", 100), event("gemm", 300), event("norm", 20)),
        *(event("Memcpy HtoD (Pageable -> Device)", 4), event("Memcpy DtoD (Device -> Device)", 4)),
        *(event("Memcpy HtoD (Pinned -> Device)", 4), event("Memcpy DtoH (Device -> Pageable)", 4)),
        event("Optimizer.step#AdamW.step", 436, annotation=True),
    ]
    found = device_counts(events, times=2)
    assert found["device_ms"] == pytest.approx(0.436 / 2)
    assert found["launches"] == 2
    assert [found[name] for name in ("host_to_device", "device_to_host", "device_to_device")] == [1, 0.5, 0.5]
    assert found["kernels"][0] == {"name": "gemm", "calls": 1, "ms": 0.2}


def test_results_are_written_after_each_case_and_measured_once(tmp_path: Path) -> None:
    file = tmp_path / "results.json"

    def raises(error: Exception) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            raise error

        return work

    results = Results(file, dtype="float32")
    results.measure({"batch": 1}, lambda: {"ms": 1.0})
    assert cases_of(file) == [{"batch": 1, "ms": 1.0}]
    results.measure({"batch": 2}, raises(torch.OutOfMemoryError()))
    assert not results.failed
    results.measure({"batch": 3}, raises(RuntimeError("broken")))
    assert results.failed
    assert [case.get("skipped", case.get("error")) for case in cases_of(file)] == [
        None,
        "out of memory",
        "RuntimeError: broken",
    ]
    later = Results(file, dtype="float32")
    for batch in (1, 2, 3):
        later.measure({"batch": batch}, lambda: {"ms": 7.0})
    assert [case.get("ms") for case in cases_of(file)] == [1.0, None, 7.0]
    assert not later.failed
    other = Results(file, dtype="bfloat16")
    other.measure({"batch": 1}, lambda: {"ms": 9.0})
    assert cases_of(file) == [{"batch": 1, "ms": 9.0}]


# -- update_cost.py ----------------------------------------------------------------------------------------------------


def test_an_update_is_measured_with_shared_prompts_and_apart(tmp_path: Path) -> None:
    file = tmp_path / "update.json"
    words = "--shape tiny --responses 8 --group 4 --tokens 8 --prompts 9 --repeats 1 --device cpu --json"
    assert update_cost.main([*words.split(), str(file)]) == 0
    shared, apart, free = cases_of(file)
    answers = sum(map(len, update_cost.make_batch(96, 8, 9, 8, 4).response_ids))
    assert shared["computed_tokens"] == 2 * 9 + answers
    assert apart["computed_tokens"] >= 8 * 9 + answers  # padded
    assert free["operations"] == shared["operations"] != apart["operations"] > 0
    assert shared["parameters"] == 18_592
    for case in (shared, apart, free):
        assert [case[name] for name in DEVICE] == [None] * len(DEVICE)


# -- rows.py -----------------------------------------------------------------------------------------------------------


def test_an_operation_that_depends_on_the_rows_is_found() -> None:
    x = torch.rand(8, 4)
    exact = rows.Operation("exact", 8, lambda m: x[:m] * 2)
    spoiled = rows.Operation("spoiled", 8, lambda m: torch.cat([x[: m - 1], x[m - 1 : m].nextafter(x.new_tensor(2.0))]))
    assert rows.compare(exact, [1, 2, 8, 9], False, CPU) == {"differ": {1: 0.0, 2: 0.0, 8: 0.0}}
    assert rows.compare(spoiled, [1, 2, 8], False, CPU) == {"differ": {1: 1.0, 2: 0.5, 8: 0.0}}
    assert rows.different_share(torch.tensor([0.0]), torch.tensor([-0.0])) == 1.0


def test_all_operations_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = "--shape tiny --rows 1 2 9 --context 20 --time --dtype float32 --device cpu --no-split-k --json"
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        assert rows.main([*words.split(), str(file)]) == 0
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before
    found = {case["operation"]: case for case in cases_of(file)}
    products = {"qkv", "out", "gate_up", "down", "F.linear", "head"}
    others = {"norm", "log_softmax", "attention, rows", "attention, draft", "engine, rows", "engine, draft"}
    assert found.keys() == products | others
    for name, case in found.items():
        assert case["differ"]["9"] == 0, "an operation that is not deterministic"
        assert ("ms" in case) == (not name.startswith("engine"))
    assert all(found[name]["differ"]["1"] == 0 for name in ("norm", "log_softmax"))


def test_known_responses_are_verified_as_drafts() -> None:
    target = shapes.random_target(shapes.shape_config("tiny"), torch.float64, CPU)
    request = Request(Prompt(0, "", (1, 2, 3)), 0, 0, 5, SamplingParams(max_new_tokens=6))
    plain, known = rows.decoded(Engine(target, EngineConfig()), [request])
    engine = Engine(target, EngineConfig(), [rows.Known(known)], Fixed(Strategy("known", 4)))
    drafted, _ = rows.decoded(engine, [request])
    torch.testing.assert_close(drafted, plain, rtol=1e-9, atol=1e-9)
    assert engine.stats.accepted == engine.stats.drafted == 4


# -- gpu_plan.py -------------------------------------------------------------------------------------------------------


def step(name: str, code: str, seconds: int = 30) -> gpu_plan.Step:
    return gpu_plan.Step(name, seconds, "", f'-c "{code}"')


def test_steps_go_on_after_a_failure_and_are_not_repeated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    note = f"from pathlib import Path; Path('{tmp_path}/ran').open('a').write('x')"
    good, slow = step("good", note), step("slow", "import time; print('begun', flush=True); time.sleep(60)", 1)
    bad = step("bad", "import sys; print('the reason'); sys.exit(3)")
    began = time.monotonic()
    assert gpu_plan.run_all([slow, bad, good], tmp_path, float("inf")) == ["slow", "bad"]
    assert time.monotonic() - began < 20
    done = json.loads((tmp_path / "steps.json").read_text())
    assert [done[name]["status"] for name in ("slow", "bad", "good")] == ["not finished after 1 s", 3, 0]
    assert (tmp_path / "slow.log").read_text() == "begun\n"
    assert "the reason" in capfd.readouterr().out
    mended = step("bad", note)
    assert gpu_plan.run_all([mended, good], tmp_path, float("inf")) == []
    assert gpu_plan.run_all([slow._replace(seconds=50), good], tmp_path, 40.0) == ["slow"]
    assert (tmp_path / "ran").read_text() == "xx"
    assert gpu_plan.run_all([step("good", note + "; 1")], tmp_path, float("inf")) == []  # another command
    assert (tmp_path / "ran").read_text() == "xxx"


class Parsed(Exception):
    """End of a script after its options."""


@pytest.mark.parametrize("sizes", [gpu_plan.Sizes(), gpu_plan.TINY], ids=["measured", "tiny"])
def test_every_command_of_the_plan_is_valid(sizes: gpu_plan.Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*arguments: Any) -> None:
        raise Parsed

    monkeypatch.chdir(ROOT)
    for module in (gpu_rounds, update_cost, rows):
        monkeypatch.setattr(module, "place", parsed)
    monkeypatch.setattr(rollout, "bench_rollout", parsed)
    scripts = {f"bench/{m.__name__}.py": m for m in (gpu_rounds, update_cost, rows, rollout)}
    steps = gpu_plan.plan(sizes)
    assert len({one.name for one in steps}) == len(steps)
    for one in steps:
        first, *words = one.command.split()
        if script := scripts.get(first):
            with pytest.raises(Parsed):
                script.main(words)
        elif words[0] == "tlt":
            arguments, overrides = _parser().parse_known_args(joined(words[1:]))
            load_config(arguments.recipe, overrides)
        else:
            assert first in ("-m", "bench/gpu_plan.py", "bench/real_model.py")


@pytest.mark.slow
def test_the_whole_plan_runs_with_tiny_models(tmp_path: Path) -> None:
    assert gpu_plan.main([str(tmp_path), "--tiny"]) == 0
    assert {file.stem for file in tmp_path.glob("*.log")} == {one.name for one in gpu_plan.STEPS}
    assert (tmp_path / "train" / "metrics.jsonl").is_file()
    assert not (tmp_path / "train" / "checkpoints").exists()
    assert all(cases_of(tmp_path / f"{name}.json") for name in ("rows", "rounds", "long", "update", "memory"))
