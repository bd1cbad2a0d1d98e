"""Saving of drafters in the background: only trained tensors, in a separate thread, atomically.

Each save is a folder `drafter_<number>` that `speculation.path` accepts. In addition to the weights it has the file
`training.safetensors`, from which training continues. The folder is written under another name, flushed, and renamed.
"""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt.draft.drafter_folder import DrafterError
from tlt.draft.eagle import EagleLayer, EagleOptions, load_drafter, save_drafter
from tlt.files import flush, share
from tlt.models.families import DecoderOptions

log = logging.getLogger(__name__)


_KEPT = 2  # number of newest saves that stay in the folder
MEAN = "mean."
"""prefix of the names of the weights to publish, in a trainer state"""
TrainerState = dict[str, Tensor]
"""Copy of a drafter in training, in host memory: tensors by name. For each parameter there are `mean.*` (weights to
publish), `weight.*` (weights in training), `exp_avg.*` and `exp_avg_sq.*` (Adam's moments). It also has `steps`,
`reach` and `whitening` of `DrafterTrainer`. The tensors must not be changed."""


def weights_of(state: TrainerState) -> dict[str, Tensor]:
    """Return the weights to publish of a trainer state, by their names in `EagleLayer`."""
    return {name.removeprefix(MEAN): tensor for name, tensor in state.items() if name.startswith(MEAN)}


class Saved(NamedTuple):
    """A published drafter and the trainer state to continue from."""

    number: int
    layer: EagleLayer
    state: TrainerState


class DrafterSaver:
    """Writer of drafters into `folder`. Its thread runs, and keeps the process alive, while saves are waiting. Only the
    newest two saves stay in the folder."""

    def __init__(self, folder: Path, options: EagleOptions) -> None:
        self.folder, self.options = folder, options
        self._lock = threading.Lock()
        self._waiting: tuple[int, TrainerState, float | None] | None = None
        self._thread: threading.Thread | None = None

    def save(self, number: int, state: TrainerState, acceptance_rate: float | None = None) -> None:
        """Request a save, and return at once. If several saves wait, only the newest is written. A disk error is
        logged, and only this save is lost."""
        with self._lock:
            self._waiting = (number, state, acceptance_rate)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="drafter-saver")
                self._thread.start()

    def wait(self) -> None:
        """Wait until everything is written."""
        while thread := self._thread:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                job, self._waiting = self._waiting, None
                if job is None:
                    self._thread = None
                    return
            try:
                write(self.folder, self.options, *job)
            except Exception as error:  # the thread must not end here, because none would replace it
                log.warning("a drafter could not be saved in %s (%s); continuing without this save", self.folder, error)


def write(folder: Path, options: EagleOptions, number: int, state: TrainerState, acceptance_rate: float | None) -> None:
    """Save a drafter as `folder`/drafter_<number>, in the calling thread. Raises OSError or SafetensorError."""
    final, draft = folder / f"drafter_{number:08d}", folder / f".drafter_{number:08d}.partial"
    for left_over in folder.glob(".drafter_*.partial"):
        shutil.rmtree(left_over, ignore_errors=True)
    draft.mkdir(parents=True)
    with torch.device("meta"):  # its tensors come from the state
        layer = EagleLayer(options)
    layer.load_state_dict(weights_of(state), assign=True)
    layer.acceptance_rate = acceptance_rate
    save_drafter(layer, draft)
    rest = {name: tensor for name, tensor in state.items() if not name.startswith(MEAN)}
    save_file(rest, draft / "training.safetensors")
    share(draft)
    for path in (*draft.iterdir(), draft):
        flush(path)
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    flush(folder)
    for old in _folders(folder)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def load_latest(folder: Path, target: DecoderOptions) -> Saved | None:
    """Return the newest complete drafter that was saved in this folder; None if there is none."""
    found = _folders(folder)
    for path in reversed(found):
        try:
            layer = load_drafter(path, target)
            rest = load_file(path / "training.safetensors")
        except (DrafterError, OSError, SafetensorError) as error:
            log.warning("skipping the damaged drafter in %s (%s)", path, error)
            continue
        tensors = {MEAN + name: tensor.detach() for name, tensor in layer.state_dict().items()}
        return Saved(int(path.name.removeprefix("drafter_")), layer, tensors | rest)
    if found:
        log.warning("all drafters that the run saved in %s are damaged: continuing without them", folder)
    return None


def newest_number(folder: Path) -> int:
    """Return the highest number of the drafters in this folder; 0 if there is none."""
    return max((int(path.name.removeprefix("drafter_")) for path in _folders(folder)), default=0)


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"drafter_{'[0-9]' * 8}") if path.is_dir())
