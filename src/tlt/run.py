"""A training run in its folder: build the parts, start or resume, record every step, save checkpoints, sum up."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tlt import checkpoint
from tlt.build import (
    load_tokenizer,
    make_engine,
    make_target,
    sampling_params,
    starting_drafter,
    steps_ahead,
    torch_device,
    torch_dtype,
)
from tlt.checkpoint import Checkpoint
from tlt.cluster.budget import Budget
from tlt.cluster.local import LocalRollout
from tlt.config import Config, ConfigError
from tlt.data import (
    Cursor,
    DataError,
    encoder,
    fingerprint,
    load_held_out,
    load_prompts,
    make_cursor,
    refuse_foreign_tokens,
)
from tlt.display import Display
from tlt.draft.ahead import AheadStore
from tlt.evaluate import evaluate
from tlt.journal import Journal
from tlt.loop import Parts, Rollout, StepResult, Trainable, Watcher, coming, one_step
from tlt.metrics import MetricsWriter, summarize, timed, write_json
from tlt.models.families import decoder_options, read_config
from tlt.models.weights import read_safetensors
from tlt.resume import refuse_changes
from tlt.rewards import make_reward
from tlt.rl.agreement import check_agreement
from tlt.rl.groups import from_plain, to_plain
from tlt.rl.policy import Policy
from tlt.stopping import Stopped, stop_request
from tlt.trace import TraceFile, Tracer, seconds_by_state
from tlt.types import Prompt, Response


class Lasting(Trainable, Protocol):
    """A policy that goes into checkpoints."""

    def save(self, folder: Path) -> None: ...

    def load_optimizer(self, folder: Path) -> None: ...

    def sha256(self) -> str: ...


@dataclass
class Run:
    """All of a run that is under way."""

    config: Config
    display: Display
    tokenizer: Any
    parts: Parts
    policy: Lasting
    held_out: list[Prompt]
    first: int
    """steps done before"""
    trace: TraceFile
    journal: Journal | None
    """where speculation makes use of it"""

    @property
    def watcher(self) -> Watcher:
        return Noting(self.display, self.journal) if self.journal else self.display


class Noting:
    """Writes down each response as it is shown."""

    def __init__(self, watcher: Watcher, journal: Journal) -> None:
        self.watcher, self.journal = watcher, journal

    def phase(self, step: int, name: str, total: int) -> None:
        self.watcher.phase(step, name, total)

    def response(self, response: Response) -> None:
        self.journal.add(response)
        self.watcher.response(response)


def train(
    config: Config, resume: bool, display: Display, wrap: Callable[[Rollout], Rollout] | None = None
) -> dict[str, Any]:
    """Run or go on with a run; returns its summary. `wrap` puts another rollout in the place of the run's own. Raises a
    ValueError of one sentence for anything the user can mend, and Stopped where a signal asked the run to save and
    stop."""
    folder = _claim_folder(config, resume)
    found = checkpoint.latest(folder / "checkpoints") if resume else None
    with stop_request() as stop, ExitStack() as ending:
        run = _prepare(config, display, found, ending)
        if resume and run.journal:
            run.parts.rollout.remember(run.journal.take_up())
        run.parts.rollout = wrap(run.parts.rollout) if wrap else run.parts.rollout
        write_json(folder / "config.json", config.model_dump())
        writer = MetricsWriter(folder, run.first, found.state["metrics"] if found else None)
        _trace(run)
        with display.live(config, run.first, run.parts.rollout.now):
            for result in _steps(run):
                done = result.metrics.step + 1
                if stop or _save_is_due(config, done):
                    with timed("save", result.metrics.seconds, run.parts.tracer):
                        display.phase(result.metrics.step, "save", 0)
                        _save(run, done, asdict(result.metrics))
                    result.metrics.seconds["total"] += result.metrics.seconds["save"]
                result.metrics.workers = _trace(run)
                writer.write(result.metrics)
                display.step(result)
                if stop and done < config.train.steps:
                    writer.close()
                    raise Stopped(_how_to_go_on(config, done, stop.number), stop.number)
            with run.parts.tracer.span("eval"):
                evaluation = _evaluate(run, config.train.steps)
            _trace(run)
        writer.write_last_evaluation(config.train.steps, evaluation)
        writer.close()
        return summarize(folder, run.policy.sha256(), evaluation)


def make_parts(config: Config, tokenizer: Any, policy_folder: Path | None = None) -> tuple[Parts, Lasting]:
    """All that the loop needs, what is quickly checked first; the engine holds the policy's weights."""
    folder = policy_folder or config.model.path
    prompts = load_prompts(config.data, encoder(tokenizer, config.data.chat))
    reward = make_reward(config, prompts)
    refuse_foreign_tokens(prompts, decoder_options(read_config(config.model.path)).vocab_size)
    sampling = sampling_params(config.rollout, config.model.path, tokenizer)
    cursor = make_cursor(config.data, len(prompts), config.run.seed)
    rollout, policy = (_one_worker if config.cluster.workers == 1 else _many_workers)(config, folder)
    return Parts(prompts, cursor, rollout, reward, policy, sampling), policy


def _one_worker(config: Config, folder: str | Path) -> tuple[Rollout, Lasting]:
    target = make_target(config.model)
    target.load(read_safetensors(folder), version=0)
    tokenizer, layer = load_tokenizer(config.model.path), starting_drafter(config, target.options)
    budget = Budget(layer, target, config) if layer else None
    on_harvest = budget.harvest if budget else None
    store = AheadStore(config.speculation.look_ahead_tokens)
    engine = make_engine(config.engine, config.speculation, target, tokenizer, layer, on_harvest, Tracer(), store)
    device, dtype = torch_device(config.model), torch_dtype(config.model)
    policy = Policy(folder, dtype, device, config.train, config.rollout, reference=config.model.path)
    check_agreement(target, policy)
    return LocalRollout(engine, budget, steps_ahead(config.speculation)), policy


def _many_workers(config: Config, folder: str | Path) -> tuple[Rollout, Lasting]:
    from tlt.cluster.remote import join
    from tlt.cluster.workers import RayPool  # Ray is an extra

    return join(RayPool(config, folder), config)


# -- start and resume --------------------------------------------------------------------------------------------------


def _claim_folder(config: Config, resume: bool) -> Path:
    folder = Path(config.run.folder)
    used = (folder / "metrics.jsonl").is_file() or (folder / "checkpoints").is_dir()
    if used and not resume and not config.run.overwrite:
        raise ConfigError(
            f"{folder} already holds a run: go on with --resume, or give --run.overwrite true or another --run.folder"
        )
    if used and not resume:
        files = ("metrics.jsonl", "summary.json", "trace.json", "journal.bin")
        for name in (*files, *(log.name for log in folder.glob("worker_*.log"))):
            (folder / name).unlink(missing_ok=True)
        for name in ("checkpoints", "tensorboard", "drafter"):
            shutil.rmtree(folder / name, ignore_errors=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}): give another --run.folder") from None
    return folder


def _prepare(config: Config, display: Display, found: Checkpoint | None, ending: ExitStack) -> Run:
    if found:
        refuse_changes(found.state["config"], config, found.state["step"])
    display.note(f"loading {config.model.path}")
    tokenizer = load_tokenizer(config.model.path)
    parts, policy = make_parts(config, tokenizer, found.folder / "policy" if found else None)
    ending.callback(parts.rollout.close)
    encode = encoder(tokenizer, config.data.chat)
    held_out = load_held_out(config.data, config.eval, encode, parts.prompts) if config.eval.every else []
    run = Run(
        config,
        display,
        tokenizer,
        parts,
        policy,
        held_out,
        first=0,
        trace=TraceFile(Path(config.run.folder) / "trace.json"),
        journal=_journal(config),
    )
    if found:
        _restore(run, found)
    return run


def _journal(config: Config) -> Journal | None:
    """Of what a checkpoint that is gone back to would say once more."""
    if not steps_ahead(config.speculation) or not config.run.save_every:
        return None
    return Journal(Path(config.run.folder) / "journal.bin", config.speculation.look_ahead_tokens)


def _restore(run: Run, found: Checkpoint) -> None:
    if found.state["prompts"] != fingerprint(run.parts.prompts):
        source = run.config.data.path or "reasoning-gym"
        raise DataError(f"the prompts of {source} are not those this run began with: restore them, or start a new run")
    run.policy.load_optimizer(found.folder)
    run.parts.cursor = Cursor(**found.state["cursor"])
    run.parts.carried = from_plain(found.state["carried"], run.parts.prompts, run.parts.sampling)
    run.parts.rollout.load_state(found.state["rollout"])
    run.first = found.state["step"]
    for damaged in found.passed_over:
        run.display.note(f"passed over: {damaged}")
    run.display.note(f"going on from step {run.first} ({found.folder})")


# -- under way ---------------------------------------------------------------------------------------------------------


def _steps(run: Run) -> Iterator[StepResult]:
    """From the first to the configured last one, each with the evaluation that is due before it."""
    config = run.config
    for step in range(run.first, config.train.steps):
        seconds: dict[str, float] = {}
        evaluation: dict[str, float] = {}
        if config.eval.every and step % config.eval.every == 0:
            with timed("eval", seconds, run.parts.tracer):
                evaluation = _evaluate(run, step)
        result = one_step(run.parts, config, run.watcher, step)
        if evaluation:
            result.metrics.eval = evaluation
            result.metrics.seconds["eval"] = seconds["eval"]
            result.metrics.seconds["total"] += seconds["eval"]
        yield result


def _evaluate(run: Run, step: int) -> dict[str, float]:
    if not run.held_out:
        return {}
    parts = run.parts
    evaluation = evaluate(
        run.config,
        run.held_out,
        parts.rollout,
        parts.reward,
        parts.sampling,
        run.watcher,
        min(step, run.config.train.steps - 1),
        coming(parts, run.config, step),
    )
    run.display.evaluation(step, evaluation)
    return evaluation


def _trace(run: Run) -> list[dict[str, float]]:
    """Write down what was done since the last time; each worker's seconds by state."""
    workers = run.parts.rollout.trace()
    named = {f"worker {index}": spans for index, spans in enumerate(workers)}
    run.trace.write({"driver": run.parts.tracer.drain(), **named})
    return [seconds_by_state(spans) for spans in workers]


def _save_is_due(config: Config, done: int) -> bool:
    every = config.run.save_every
    return done == config.train.steps or (every > 0 and done % every == 0)


def _save(run: Run, done: int, metrics: dict[str, Any]) -> None:
    """A checkpoint: what a resumed run needs to end as one that was never stopped."""
    config, parts = run.config, run.parts

    def write(folder: Path) -> None:
        run.policy.save(folder)
        run.tokenizer.save_pretrained(folder / "policy")

    state = {
        "step": done,
        "config": config.model_dump(mode="json"),
        "prompts": fingerprint(parts.prompts),
        "cursor": asdict(parts.cursor),
        "carried": to_plain(parts.carried),
        "rollout": parts.rollout.state(),
        "metrics": metrics,
    }
    checkpoint.save(Path(config.run.folder) / "checkpoints", done, state, write, config.run.keep)
    if run.journal:
        run.journal.clear()


def _how_to_go_on(config: Config, done: int, number: int) -> str:
    name = signal.Signals(number).name
    return (
        f"stopped by {name} and saved after step {done} of {config.train.steps} in {config.run.folder}: "
        "give the same command with --resume to go on"
    )
