"""Objects of a run, which are built when the run starts or resumes: prompts, reward, policy, rollout workers, and the
folder with its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from tlt.build import for_machine
from tlt.cluster.remote import join, local_rollout
from tlt.cluster.run_worker import RunWorker
from tlt.config import Config
from tlt.data.limits import refuse_misfits, sampling_params
from tlt.data.prompts import Cursor, DataError, encoder, fingerprints, load_held_out, load_prompts, make_cursor
from tlt.data.tokenizer import load_tokenizer, model_files
from tlt.draft.eagle import load_drafter
from tlt.energy import Meter, MeteredTracer
from tlt.engine.exactness import Exactness
from tlt.environments import Turns, make_turns
from tlt.environments.tools import with_tools
from tlt.gain import BusyWarning
from tlt.loop import Parts, Rollout, Trainable
from tlt.models.families import decoder_options, read_config
from tlt.models.weights import folder_sha256, num_weights
from tlt.progress import working
from tlt.rewards import Reward, make_reward, refuse_special_tokens, refuse_unanswered, sources_sha256
from tlt.rl.groups import from_plain
from tlt.run.about import about_adapters, about_folder, about_memory, about_model, about_prompts
from tlt.run.display import Display
from tlt.run.folder import OnSave, RunFolder
from tlt.run.mistakes import named, refuse_mistakes
from tlt.run.record import RunProgress
from tlt.run.resume import Contents, allowed_changes, as_at_its_start, has_effect, sentence
from tlt.run.trackers import makers_of
from tlt.store import checkpoint
from tlt.store.checkpoint import Checkpoint
from tlt.store.hub import from_hub
from tlt.trace import TraceFile
from tlt.types import Group, Prompt, SamplingParams
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
    busy: BusyWarning = field(default_factory=BusyWarning)

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
    _refuse_wrong_folders(config)
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


def _refuse_wrong_folders(config: Config) -> None:
    """Raise ModelError or DrafterError, with the name of the field, if model.path or speculation.path cannot be used.
    This check takes less than a second and is made before workers start."""
    with named("model.path"):
        options = decoder_options(read_config(config.model.path))
    with named("speculation.path"):
        if config.speculation.path:
            load_drafter(config.speculation.path, options)


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


# -- parts of the training loop ----------------------------------------------------------------------------------------


class SavablePolicy(Trainable, Protocol):
    """Interface of a policy that can be saved to a checkpoint and restored."""

    version: int | None
    """number of steps that updated the policy, including those before a resume; None during an update once a weight has
    changed"""

    @property
    def updated(self) -> float:
        """Finished share of the current update, 0 to 1. Other threads may read it at any time."""
        ...

    def save(self, folder: Path) -> None: ...

    def load_optimizer(self, folder: Path) -> None: ...

    def sha256(self) -> str: ...


class Inputs(NamedTuple):
    """Parts of a run that need no weights."""

    prompts: list[Prompt]
    held_out: list[Prompt]
    reward: Reward
    turns: Turns
    sampling: SamplingParams


def read_inputs(config: Config, tokenizer: Any, note: Callable[[str], None] = lambda text: None) -> Inputs:
    """Read the prompts and make the reward, with all checks that need no weights. `note` logs a line. Raises a
    ValueError of one sentence for errors that the user can fix."""
    encode = encoder(tokenizer, config.data)
    prompts = load_prompts(config.data, encode)
    held_out = load_held_out(config.data, config.eval, encode, prompts)
    note(about_prompts(config, prompts, tokenizer))
    refuse_special_tokens(config, tokenizer)
    refuse_misfits(config, prompts)
    refuse_misfits(config, held_out, held_out=True)
    refuse_unanswered(config, held_out)
    log = Path(config.run.folder) / "reward.log"
    reward = make_reward(config, prompts, log)
    turns = make_turns(config, tokenizer, log)
    sampling = sampling_params(config.rollout, config.model.path, tokenizer)
    sampling = replace(sampling, continues=config.reward.environment is not None)
    note(about_model(config))
    if config.train.lora.rank:
        note(about_adapters(config))
    note(about_memory(config))
    return Inputs(prompts, held_out, reward, turns, sampling)


def make_parts(
    config: Config, tokenizer: Any, policy_folder: Path | None = None, note: Callable[[str], None] = lambda text: None
) -> tuple[Parts, SavablePolicy]:
    """Build and return the parts of the training loop and the policy. Quick checks come first. The engine gets the
    policy's weights. `policy_folder` is the policy of a checkpoint (default: model.path). `note` logs a line."""
    folder = policy_folder or config.model.path
    prompts, held_out, reward, turns, sampling = read_inputs(config, tokenizer, note)
    cursor = make_cursor(config.data, prompts, config.run.seed)
    with working("start the policy and its workers"):
        rollout, policy, exactness = _start(config, folder, turns, max(len(prompt.token_ids) for prompt in prompts))
    note(exactness.meaning)
    parts = Parts(prompts, cursor, rollout, reward, policy, sampling, turns=turns, held_out=held_out)
    parts.tracer, parts.exactness = MeteredTracer(None if config.cluster.address else Meter()), exactness
    return parts, policy


def _start(
    config: Config, folder: str | Path, turns: Turns, longest_prompt: int
) -> tuple[Rollout, SavablePolicy, Exactness]:
    if config.cluster.workers > 1:
        return _many_workers(config, folder, turns, longest_prompt)
    worker = RunWorker.of_run(config, 0, folder)
    exactness = worker.check_at_start(longest_prompt)
    return local_rollout(worker, config, turns), worker.policy, exactness


def _many_workers(
    config: Config, folder: str | Path, turns: Turns, longest_prompt: int
) -> tuple[Rollout, SavablePolicy, Exactness]:
    from tlt.cluster.workers import RayPool  # Ray is an extra

    return join(RayPool(config, folder), config, turns, longest_prompt)
