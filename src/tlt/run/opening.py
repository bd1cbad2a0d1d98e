"""Objects of a run, which are built when the run starts or resumes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tlt.build import for_machine, refuse_wrong_folders
from tlt.config import Config
from tlt.data.prompts import Cursor, DataError, fingerprints
from tlt.data.tokenizer import load_tokenizer
from tlt.environments.tools import with_tools
from tlt.loop import Parts
from tlt.models.weights import folder_sha256, num_weights
from tlt.rewards import sources_sha256
from tlt.rl.groups import from_plain
from tlt.run.about import about_folder
from tlt.run.display import Display
from tlt.run.folder import RunFolder
from tlt.run.mistakes import refuse_mistakes
from tlt.run.on_save import OnSave
from tlt.run.parts import SavablePolicy, make_parts
from tlt.run.record import RunProgress
from tlt.run.resume import Contents, allowed_changes, as_at_its_start, has_effect, sentence
from tlt.run.trackers import makers_of
from tlt.store import checkpoint
from tlt.store.checkpoint import Checkpoint
from tlt.store.hub import from_hub
from tlt.store.model_files import model_files
from tlt.trace import TraceFile
from tlt.types import Group
from tlt.wording import counted


@dataclass
class LastStep:
    """State of a run at the end of its last finished step. With the policy it is the content of a checkpoint."""

    done: int
    """number of steps that the run has finished"""
    saved: int
    """number of finished steps in the newest checkpoint; 0 if there is no checkpoint"""
    cursor: Cursor
    carried: list[Group]
    metrics: dict[str, Any]


@dataclass
class Run:
    """Objects of the current run, which the functions of train.py share."""

    config: Config
    folder: RunFolder
    display: Display
    model_files: Mapping[str, bytes]
    """file name -> content, for the tokenizer and generation defaults that are copied into checkpoints"""
    parts: Parts
    policy: SavablePolicy
    last_step: LastStep
    trace: TraceFile
    progress: RunProgress
    contents: Contents
    changes: list[dict[str, Any]]
    """changes of the recipe at resumes that may affect the result, see `resume.allowed_changes`"""
    on_save: OnSave | None
    """runner of run.on_save, the user's command after a save"""

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        return fingerprints(self.parts.prompts, self.config.data)

    def step_ended(self, done: int, metrics: dict[str, Any]) -> None:
        """Store the state of the run at the end of a step. `done` is the number of finished steps."""
        parts, saved = self.parts, self.last_step.saved
        self.last_step = LastStep(done, saved, replace(parts.cursor), list(parts.carried), metrics)


@contextmanager
def opened(config: Config, resume: bool, display: Display, force: Collection[str] = ()) -> Iterator[Run]:
    """Lock the folder of a run, and build its parts. Close both when the `with` block ends."""
    makers_of(config)  # raises if a tracker cannot be used
    config = with_tools(for_machine(config))
    with RunFolder(config.run, resume) as folder, ExitStack() as ending:
        found = checkpoint.latest(folder.path / "checkpoints") if resume else None
        state = found.state if found else None
        config = as_at_its_start(from_hub(config, state), state)
        yield _prepare(config, folder, display, found, ending, force)


def _prepare(
    config: Config,
    folder: RunFolder,
    display: Display,
    found: Checkpoint | None,
    ending: ExitStack,
    force: Collection[str] = (),
) -> Run:
    if on_save := OnSave(config.run.on_save) if config.run.on_save else None:
        ending.callback(on_save.close)
    refuse_mistakes(config)
    refuse_wrong_folders(config)
    has_ended = found is not None and found.state["step"] == config.train.steps
    if not config.train.lora.rank and not has_ended:  # adapters are small, and a run that has ended saves nothing
        itemsize = max(4, getattr(torch, config.model.dtype).itemsize)  # weights in bfloat16 are saved in float32
        checkpoint.refuse_full_disk(folder.path, num_weights(config.model.path), itemsize)
    display.note(about_folder(config))
    display.note(f"loading {config.model.hub or config.model.path}")
    tokenizer = load_tokenizer(config.model.path)
    contents = Contents(folder_sha256(config.model.path), sources_sha256(config.reward))
    changes = allowed_changes(found.state, config, contents, force) if found else []
    parts, policy = make_parts(config, tokenizer, found.folder / "policy" if found else None, display.note)
    changes = [change for change in changes if has_effect(change, parts.exactness)]
    for change in changes:
        display.note(sentence(change))
    ending.callback(parts.rollout.close)
    ending.callback(parts.reward.close)
    run = Run(
        config,
        folder,
        display,
        model_files(config.model.path, tokenizer),
        parts,
        policy,
        LastStep(0, 0, parts.cursor, parts.carried, {}),
        TraceFile(folder.path / "trace.json"),
        RunProgress(config, found.state["metrics"] if found else None),
        contents,
        changes,
        on_save,
    )
    if found:
        _restore(run, found, force)
    return run


def _restore(run: Run, found: Checkpoint, force: Collection[str]) -> None:
    parts, state = run.parts, found.state
    cursor = Cursor(**state["cursor"])
    prompts, columns = run.fingerprints["prompts"], run.fingerprints["columns"]
    same = state["prompts"] == prompts
    if not same or state["columns"] != columns:
        _refuse_other_prompts(run, state, same, force)
    if same:
        parts.cursor = cursor
        parts.carried = from_plain(state["carried"], parts.prompts, parts.sampling)
    else:
        parts.cursor.epoch = cursor.epoch + 1  # a new epoch, so that no request of the old prompts is repeated
        run.display.note("the prompts have changed (--force): starting a new epoch")
    run.policy.load_optimizer(found.folder)
    parts.rollout.load_state(state["rollout"])
    parts.rollout.load_history(found.folder)
    run.changes = [*state["changes"], *run.changes]
    done = run.policy.version = found.state["step"]
    run.step_ended(done, found.state["metrics"])
    run.last_step.saved = done
    for damaged in found.passed_over:
        run.display.note(f"skipped a damaged checkpoint: {damaged}")
    all_done = f"this run has ended after {counted(done, 'step')}: raise train.steps to continue"
    run.display.note(all_done if done == run.config.train.steps else f"resuming from step {done} ({found.folder})")


def _refuse_other_prompts(run: Run, state: dict[str, Any], same: bool, force: Collection[str]) -> None:
    """Raise DataError because the prompts differ from those of the checkpoint (`state`). If --force names their source,
    record the change instead. If `same`, the prompts are equal, and only data columns that the model does not see have
    changed."""
    key, source = run.config.data.source
    if key not in force:
        what = f"columns of {source}, which the reward may read," if same else f"prompts of {source}, or their tokens,"
        remedy = f"restore them, or set --force {key} to continue with these, or start a new run"
        raise DataError(f"the {what} are not those of the run to be resumed: {remedy}")
    if all(change["key"] != key for change in run.changes):  # the content of the file has changed, but not its name
        run.changes.append({"step": state["step"], "key": key, "before": source, "now": source, "effect": "forced"})
