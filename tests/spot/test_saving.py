"""Saving the drafter in the background, complete or not at all. Training continues from a save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from twin import Model, make_layer, make_model

from tlt.config import DrafterTrainConfig
from tlt.draft.eagle import EagleLayer, load_drafter
from tlt.spot import saving
from tlt.spot.saving import DrafterSaver, Saved, TrainerState, load_latest, weights_of, write
from tlt.spot.spot import SpotTrainer

CONFIG = DrafterTrainConfig(unroll=2)


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(dtype=torch.float32)


def state(model: Model, seed: int = 0) -> TrainerState:
    """Return a state after some training, in which no two tensors are equal."""
    spot = SpotTrainer(make_layer(model.decoder, "eagle3", 8), model.decoder, CONFIG)
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.rand(t.shape, generator=generator) for n, t in (spot.state() or {}).items() if n != "steps"}
    return tensors | {"steps": torch.tensor(12.0, dtype=torch.float64)}


def wait_until(holds: Callable[[], bool]) -> None:
    late = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < late
        time.sleep(0.001)


def loaded(model: Model, folder: Path) -> Saved:
    found = load_latest(folder, model.decoder.options)
    assert found is not None
    return found


def same(one: TrainerState, other: TrainerState) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def options(model: Model) -> Any:
    return make_layer(model.decoder, "eagle3", 8).options


def test_a_saved_drafter_is_loaded_unchanged(model: Model, tmp_path: Path) -> None:
    saver, states = DrafterSaver(tmp_path, options(model)), [state(model, seed) for seed in range(2)]
    saver.save(7, states[0], acceptance_rate=0.75)
    saver.wait()
    found = loaded(model, tmp_path)
    assert found.number == 7
    assert found.layer.acceptance_rate == 0.75
    assert same(found.state, states[0])
    assert not list(tmp_path.glob(".*"))
    layer = load_drafter(tmp_path / "drafter_00000007", model.decoder.options)
    assert torch.equal(layer.fc.weight, weights_of(states[0])["fc.weight"]), "a drafter's folder as any other"


def test_only_trained_tensors_are_saved(model: Model, tmp_path: Path) -> None:
    """The target's embedding and head are not in it."""
    write(tmp_path, options(model), 1, state(model), None)
    size = sum(path.stat().st_size for path in (tmp_path / "drafter_00000001").iterdir())
    layer = EagleLayer(options(model))
    trained = 4 * (4 * sum(p.numel() for p in layer.parameters()) + layer.fc.in_features**2)  # and the whitening
    assert trained < size < trained + 12_000


def test_the_newest_two_saves_are_kept(model: Model, tmp_path: Path) -> None:
    for number in (3, 9, 12, 15):
        write(tmp_path, options(model), number, state(model), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter_00000012", "drafter_00000015"]


class Killed(BaseException):
    """End of the process, without any clean-up."""


def kill_at(patch: pytest.MonkeyPatch, moment: int) -> None:
    """Let the process end at this write to the disk: before it, or when the file is partly written."""
    touches = count()

    def deadly(module: Any, name: str, half: bool = False) -> None:
        real = getattr(module, name)

        def touch(*arguments: Any, **more: Any) -> Any:
            if next(touches) == moment:
                if half:
                    real(*arguments, **more)
                    path = arguments[1] / "model.safetensors" if arguments[1].is_dir() else arguments[1]
                    path.write_bytes(path.read_bytes()[:100])
                raise Killed
            return real(*arguments, **more)

        patch.setattr(module, name, touch)

    for name in ("save_drafter", "save_file"):
        deadly(saving, name, half=True)
    for module, name in ((saving, "flush"), (saving.shutil, "rmtree"), (Path, "mkdir"), (Path, "rename")):
        deadly(module, name)


def test_a_kill_leaves_a_whole_save(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends at each write to the disk. The next save works."""
    old, new = state(model, 1), state(model, 2)
    for moment in count():
        folder = tmp_path / str(moment)
        write(folder, options(model), 1, old, None)
        try:
            with monkeypatch.context() as patch:
                kill_at(patch, moment)
                write(folder, options(model), 2, new, None)
            break
        except Killed:
            found = loaded(model, folder)
        assert same(found.state, new if found.number == 2 else old)
        write(folder, options(model), 3, new, None)
        assert loaded(model, folder).number == 3
        assert not list(folder.glob(".*"))
    assert moment > 9
    assert same(loaded(model, folder).state, new), "nothing was left to kill"


def test_the_caller_does_not_wait_for_the_disk(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, written = threading.Event(), []

    def slow(folder: Path, options: Any, number: int, *rest: Any, **more: Any) -> None:
        gate.wait(10)
        written.append(number)

    monkeypatch.setattr(saving, "write", slow)
    saver = DrafterSaver(tmp_path, options(model))
    saver.save(1, state(model))
    wait_until(lambda: not saver._waiting)
    for number in (2, 3, 4):
        saver.save(number, state(model))
    assert written == []
    gate.set()
    saver.wait()
    assert written == [1, 4]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("No space left in memory")])
def test_a_failing_disk_only_costs_the_save(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def full(*arguments: Any) -> None:
        raise error

    saver = DrafterSaver(tmp_path, options(model))
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_drafter", full)
        saver.save(1, state(model))
        wait_until(lambda: bool(caplog.records))
    saver.save(2, state(model))
    saver.wait()
    assert "No space left" in caplog.text
    assert loaded(model, tmp_path).number == 2


def test_a_damaged_save_is_written_again(model: Model, tmp_path: Path) -> None:
    """A run that resumes from the previous save gives the next one the same number."""
    assert load_latest(tmp_path / "nowhere", model.decoder.options) is None
    for number in (1, 2):
        write(tmp_path, options(model), number, state(model), None)
    (tmp_path / "drafter_00000002" / "model.safetensors").write_bytes(b"")
    assert loaded(model, tmp_path).number == 1
    want = state(model, seed=1)
    write(tmp_path, options(model), 2, want, None)
    assert same(loaded(model, tmp_path).state, want)
