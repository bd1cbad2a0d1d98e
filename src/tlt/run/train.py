"""Training run in its folder: builds the training loop, starts or resumes, logs and saves steps, writes the summary."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from tlt.build import refuse_wrong_folders, settled
from tlt.config import Config
from tlt.data.prompts import Cursor, DataError, fingerprints
from tlt.data.sampling_params import eval_sampling
from tlt.data.tokenizer import load_tokenizer
from tlt.environments.tools import with_tools
from tlt.loop import Parts, Rollout, StepResult, coming, one_step
from tlt.metrics import peak_memory, summarize, timed, useful_share, write_json
from tlt.models.weights import folder_sha256, num_weights
from tlt.rewards import sources_sha256
from tlt.rl.groups import from_plain, to_plain
from tlt.run.about import about_folder
from tlt.run.display import Display
from tlt.run.evaluate import evaluate
from tlt.run.folder import RunFolder
from tlt.run.mistakes import refuse_mistakes
from tlt.run.model_card import model_card
from tlt.run.on_save import OnSave
from tlt.run.parts import Lasting, make_parts
from tlt.run.record import Record, RunProgress
from tlt.run.resume import Contents, allowed_changes, as_at_its_start, changes_environment, has_effect, sentence
from tlt.run.trackers import makers_of
from tlt.stopping import GivenUp, Stopped, StopRequest, stop_request
from tlt.store import checkpoint
from tlt.store.checkpoint import Checkpoint
from tlt.store.hub import from_hub
from tlt.store.model_files import model_files, write_files
from tlt.trace import TraceFile, seconds_by_state
from tlt.types import Group
from tlt.wording import counted


@dataclass
class Standing:
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
    """Objects of the current run, which the functions of this module share."""

    config: Config
    folder: RunFolder
    display: Display
    model_files: Mapping[str, bytes]
    """file name -> content, for the tokenizer and generation defaults that are copied into checkpoints"""
    parts: Parts
    policy: Lasting
    standing: Standing
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

    def stand(self, done: int, metrics: dict[str, Any]) -> None:
        """Store the state of the run at the end of a step. `done` is the number of finished steps."""
        parts, saved = self.parts, self.standing.saved
        self.standing = Standing(done, saved, replace(parts.cursor), list(parts.carried), metrics)


def train(
    config: Config,
    resume: bool = False,
    display: Display | None = None,
    wrap: Callable[[Rollout], Rollout] | None = None,
    force: Collection[str] = (),
) -> dict[str, Any]:
    """Start or resume a run, and return its summary (the content of summary.json). `wrap` may replace the rollout, for
    example in tests. `force` names configuration fields that a resumed run may change although this changes the result.
    Raises a ValueError of one sentence for errors that the user can fix, and Stopped after a signal."""
    makers_of(config)  # raises if a tracker cannot be used
    config = with_tools(settled(config))
    with stop_request(config.run.stop_within) as stop:
        try:
            with RunFolder(config.run, resume) as folder, ExitStack() as ending:
                found = checkpoint.latest(folder.path / "checkpoints") if resume else None
                state = found.state if found else None
                config = as_at_its_start(from_hub(config, state), state)
                run = _prepare(config, folder, display or Display(), found, ending, force)
                run.parts.rollout = wrap(run.parts.rollout) if wrap else run.parts.rollout
                stop.is_updating, stop.begun = lambda: run.policy.version != run.standing.done, True
                stop.acknowledge = run.display.stopping
                return _saved_whatever_happens(run, resume, stop)
        except GivenUp:
            raise Stopped(f"stopped by {stop.name} before the first step: nothing was changed", stop.number) from None


def _saved_whatever_happens(run: Run, resume: bool, stop: StopRequest) -> dict[str, Any]:
    """Run all steps and return the summary. Save a checkpoint if a signal or an error ends the run early."""
    config, folder = run.config, run.folder
    try:
        if not resume:
            folder.delete_previous_run()
        run.parts.turns.keep(folder.path, resume and not changes_environment(run.changes))
        write_json(folder.path / "config.json", config.model_dump())
        record = Record(config, folder.path, run.standing.done, run.standing.metrics)
        _trace(run)
        with run.display.live(config, run.standing.done, run.parts.rollout.now, lambda: run.policy.updated):
            evaluation = _run_steps(run, record, stop)
        record.write_last_evaluation(config.train.steps, evaluation)
        record.close()
        exactness = run.parts.exactness.facts
        summary = summarize(folder.path, run.policy.sha256(), evaluation, exactness, run.changes)
        record.page.write()
        stop.run_ends()
        return summary
    except GivenUp:
        stop.run_ends()
        took = f"the current step did not end within {config.run.stop_within:g} s (run.stop_within) and was abandoned"
        raise Stopped(f"stopped by {stop.name}; {took}; {_rescue(run)}", stop.number) from None
    except Exception as error:
        stop.run_ends()
        error.add_note(_rescue(run))
        raise
    except KeyboardInterrupt as error:  # a second signal, after which nothing is saved
        error.add_note(_saved_before(run))
        raise


# -- start and resume --------------------------------------------------------------------------------------------------


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
        Standing(0, 0, parts.cursor, parts.carried, {}),
        TraceFile(folder.path / "trace.json"),
        RunProgress(config.train.steps, found.state["metrics"] if found else None),
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
    run.changes = [*state["changes"], *run.changes]
    done = run.policy.version = found.state["step"]
    run.stand(done, found.state["metrics"])
    run.standing.saved = done
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
        what = f"the prompts of {source} are not those of the run to be resumed"
        if same:
            what = f"the columns of {source}, which the reward may read, are not those of the run to be resumed"
        elif state.get("texts") == run.fingerprints["texts"]:
            what = (
                "the prompts have the same texts as in the run to be resumed but other tokens, because the tokenizer, "
                "its chat template, data.chat or the version of transformers has changed"
            )
        raise DataError(f"{what}: restore them, or set --force {key} to continue with these, or start a new run")
    if all(change["key"] != key for change in run.changes):  # the content of the file has changed, but not its name
        run.changes.append({"step": state["step"], "key": key, "before": source, "now": source, "effect": "forced"})


# -- steps -------------------------------------------------------------------------------------------------------------


def _run_steps(run: Run, record: Record, stop: StopRequest) -> dict[str, float]:
    """Run all remaining steps. Log each step, and save a checkpoint if one is due. Return the metrics of the evaluation
    after the last step. Raises Stopped after a signal."""
    config = run.config
    for result in _steps(run, record, stop):
        done = result.metrics.step + 1
        run.stand(done, asdict(result.metrics))
        stop.step_has_ended()
        if saves := bool(stop) or _save_is_due(config, done):
            with timed("save", result.metrics.seconds, run.parts.tracer), stop.unhurried():
                run.display.phase(result.metrics.step, "save", 0)
                _save(run)
            result.metrics.seconds["total"] += result.metrics.seconds["save"]
        result.metrics.energy = run.parts.tracer.step_energy()
        run.parts.tracer.mark("step ends", step=result.metrics.step)
        result.metrics.workers = workers = _trace(run)
        result.metrics.useful_share = useful_share([(workers, result.metrics.rollout)])
        result.metrics.memory = {"driver": peak_memory(), **run.parts.rollout.peak_memory()}
        record.write(result)
        if saves:
            record.page.write_if_quick()
        run.display.step(result)
        if stop and done < config.train.steps:
            raise _stopped(run, record, stop)
    run.parts.turns.step = config.train.steps
    with run.parts.tracer.span("eval"):
        evaluation = _evaluate(run, config.train.steps, stop)
    _trace(run)
    return evaluation


def _stopped(run: Run, record: Record, stop: StopRequest) -> Stopped:
    """Save the last step if it is not saved yet, and return the exception that ends the run after a signal."""
    stop.run_ends()
    done = run.standing.done
    record.close()
    if not done:
        return Stopped(f"stopped by {stop.name} before the first step: nothing is saved", stop.number)
    if run.standing.saved < done:
        _save(run)
    saved = f"stopped by {stop.name} and saved after step {done} of {run.config.train.steps} in {run.config.run.folder}"
    return Stopped(f"{saved}: continue with the same command and --resume", stop.number)


def _steps(run: Run, record: Record, stop: StopRequest) -> Iterator[StepResult]:
    """Run the remaining steps, each preceded by an evaluation if one is due. Yield the result of each step. Raises
    Stopped after a signal during an evaluation."""
    config = run.config
    for step in range(run.standing.done, config.train.steps):
        run.parts.turns.step = step
        seconds: dict[str, float] = {}
        evaluation: dict[str, float] = {}
        if config.eval.every and step % config.eval.every == 0:
            with timed("eval", seconds, run.parts.tracer):
                evaluation = _evaluate(run, step, stop)
            if stop:
                raise _stopped(run, record, stop)
        result = one_step(run.parts, config, run.display, step)
        run.progress.add(result)
        if evaluation:
            result.metrics.eval = evaluation
            result.metrics.seconds["eval"] = seconds["eval"]
            result.metrics.seconds["total"] += seconds["eval"]
        yield result


def _evaluate(run: Run, step: int, stop: StopRequest) -> dict[str, float]:
    parts = run.parts
    if not parts.held_out:
        return {}
    evaluation = evaluate(
        run.config,
        parts.held_out,
        parts.rollout,
        parts.reward,
        eval_sampling(run.config, parts.sampling),
        run.display,
        min(step, run.config.train.steps - 1),
        coming(parts, run.config, step),
    )
    run.display.evaluation(step, evaluation)
    worth = evaluation.get(f"mean@{run.config.eval.samples}")
    if worth is not None:
        with stop.unhurried():
            checkpoint.offer_best(run.folder.path / "best", step, evaluation, worth, partial(_write_policy, run, step))
    return evaluation


def _trace(run: Run) -> list[dict[str, float]]:
    """Write the time spans since the last call to trace.json. Return for each worker its seconds in each state."""
    workers = run.parts.rollout.trace()
    named = {f"worker {index}": spans for index, spans in enumerate(workers)}
    run.trace.write({"driver": run.parts.tracer.drain(), **named})
    return [seconds_by_state(spans) for spans in workers]


def _save_is_due(config: Config, done: int) -> bool:
    every = config.run.save_every
    return done == config.train.steps or (every > 0 and done % every == 0)


def _write_policy(run: Run, steps: int, folder: Path) -> None:
    run.policy.save(folder)
    write_files(run.model_files, folder / "policy")
    (folder / "policy" / "README.md").write_text(model_card(run.config, steps), encoding="utf-8")


def _save(run: Run) -> None:
    """Save the state after the last finished step as a checkpoint. A run that is resumed from it has the same result as
    a run that was never stopped."""
    parts, standing = run.parts, run.standing
    state = {
        "step": standing.done,
        "config": run.config.model_dump(mode="json"),
        "model": run.contents.model,
        "reward": run.contents.reward,
        "changes": run.changes,
        **run.fingerprints,
        "cursor": asdict(standing.cursor),
        "carried": to_plain(standing.carried),
        "rollout": parts.rollout.state(),
        "metrics": standing.metrics,
    }
    root, write = run.folder.path / "checkpoints", partial(_write_policy, run, standing.done)
    saved = checkpoint.save(root, standing.done, state, write, run.config.run.keep)
    run.folder.point_to(saved)
    if run.on_save:
        run.on_save.saved(saved)
    standing.saved = standing.done
    parts.turns.saved(standing.done)


def _rescue(run: Run) -> str:
    """Save a checkpoint after an error, if the state is intact. Return a sentence on how to continue the run."""
    standing, failed = run.standing, ""
    if run.policy.version == standing.done > standing.saved:
        try:
            _save(run)
        except Exception as error:
            failed = f"the newest steps cannot be saved ({error}); "
    return failed + _saved_before(run)


def _saved_before(run: Run) -> str:
    """Return a sentence on the newest checkpoint and how to continue from it, or a sentence that nothing is saved."""
    if run.standing.saved:
        return f"saved after step {run.standing.saved} in {run.folder.path}: continue with --resume"
    return "nothing is saved yet"
