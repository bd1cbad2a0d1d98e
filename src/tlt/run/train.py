"""Training run in its folder: trains, evaluates, logs and saves steps, and writes the summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tlt.config import Config
from tlt.data.limits import eval_sampling
from tlt.data.tokenizer import load_tokenizer, write_files
from tlt.environments import Turns, make_turns
from tlt.loop import Rollout, StepResult, Watcher, call_each, coming, one_step
from tlt.metrics import peak_memory, summarize, timed, useful_share, write_json
from tlt.report import write_report_or_warn
from tlt.rewards import Reward, RewardError, make_reward
from tlt.rewards.answers import is_blank, right_answers
from tlt.rl.groups import to_plain
from tlt.run.about import model_card
from tlt.run.display import Display
from tlt.run.opening import Run, opened
from tlt.run.record import Record
from tlt.run.resume import changes_environment
from tlt.sampling import make_requests
from tlt.stopping import GivenUp, Stopped, StopRequest, stop_request
from tlt.store import checkpoint
from tlt.trace import seconds_by_state
from tlt.types import Prompt, Request, Response, SamplingParams
from tlt.wording import counted


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
    with stop_request(config.run.stop_within) as stop:
        try:
            with opened(config, resume, display or Display(), force) as run:
                run.parts.rollout = wrap(run.parts.rollout) if wrap else run.parts.rollout
                stop.is_updating, stop.begun = lambda: run.policy.version != run.last_step.done, True
                stop.acknowledge = run.display.stopping
                return _saved_whatever_happens(run, resume, stop)
        except GivenUp:
            raise Stopped(f"stopped by {stop.name} before the first step: nothing was changed", stop.number) from None


def check(config: Config, display: Display) -> None:
    """Make all checks of a new run and log what it would do. Train nothing. Raises the errors of `train`."""
    with opened(config, False, display) as run:
        prompt, config = run.parts.prompts[0], run.config
        tokenizer = load_tokenizer(config.model.path)
        shown = tokenizer.decode(prompt.token_ids)
        display.note(f"the first prompt, as the model sees it:\n{shown}")
        display.note(f"its right answer: {prompt.ground_truth}")
        # with a reward and an environment apart from those of the run, which write reward.log
        with closing(make_reward(config, run.parts.prompts)) as reward, closing(make_turns(config, tokenizer)) as turns:
            display.note(_trial(reward, turns, Request(prompt, 0, 0, 0, run.parts.sampling), config, tokenizer))
        display.note(f"all checks passed: this recipe can train for {counted(config.train.steps, 'step')}")


def _trial(reward: Reward, turns: Turns, request: Request, config: Config, tokenizer: Any) -> str:
    """Return a sentence on the reward of a made-up response, or on the environment's reply to it. The response contains
    the right answer of the prompt if there is one. Raises RewardError if the reward or the reply cannot be computed."""
    gold = right_answers(request.prompt)[:1]
    answer = "" if not gold or is_blank(gold[0]) else str(gold[0])
    written = f"{config.reward.answer_marker} {answer}{config.reward.answer_end}".strip()
    [row] = turns.begin([request])
    row.tokens += [*tokenizer.encode(written, add_special_tokens=False), *request.sampling.stop_token_ids[:1]]
    response = Response(request, row.tokens, [], [], "stop", request.prompt.prefill + written, replies=row.replies)
    finished, going_on = turns.take([response])
    while not finished and not going_on:
        finished, going_on = turns.take([], 1.0)
    if going_on:
        return f"the environment's reply to the made-up turn {response.text!r}:\n{going_on[0].replies[-1].text}"
    reward(finished)
    if response.reward is None:
        raise RewardError(
            f"a made-up response {response.text!r} has no reward ({response.outcome}, see above): correct the "
            f"{'environment' if config.reward.environment else 'reward function'}"
        )
    return f"reward of the made-up response {response.text!r}: {response.reward:g}"


def _saved_whatever_happens(run: Run, resume: bool, stop: StopRequest) -> dict[str, Any]:
    """Run all steps and return the summary. Save a checkpoint if a signal or an error ends the run early."""
    config, folder = run.config, run.folder
    try:
        if not resume:
            folder.delete_previous_run()
        run.parts.turns.record_replies(folder.path, resume and not changes_environment(run.changes))
        write_json(folder.path / "config.json", config.model_dump())
        record = Record(config, folder.path, run.last_step.done + 1, run.last_step.metrics)
        _trace(run)
        with run.display.live(config, run.last_step.done, run.parts.rollout.now, lambda: run.policy.updated):
            evaluation = _run_steps(run, record, stop)
        record.write_last_evaluation(config.train.steps + 1, evaluation)
        record.close()
        exactness = run.parts.exactness.facts
        summary = summarize(folder.path, run.policy.sha256(), evaluation, exactness, run.changes)
        write_report_or_warn(folder.path)
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


# -- steps -------------------------------------------------------------------------------------------------------------


def _run_steps(run: Run, record: Record, stop: StopRequest) -> dict[str, float]:
    """Run all remaining steps. Log each step, and save a checkpoint if one is due. Return the metrics of the evaluation
    after the last step. Raises Stopped after a signal."""
    config = run.config
    for result in _steps(run, record, stop):
        done = result.metrics.step
        run.step_ended(done, asdict(result.metrics))
        stop.step_has_ended()
        if stop or _save_is_due(config, done):
            with timed("save", result.metrics.seconds, run.parts.tracer), stop.unhurried():
                run.display.phase(done - 1, "save", 0)
                _save(run)
            result.metrics.seconds["total"] += result.metrics.seconds["save"]
        result.metrics.energy = run.parts.tracer.step_energy()
        run.busy.warn(done, result.metrics.energy)
        run.parts.tracer.mark("step ends", step=done)
        result.metrics.workers = workers = _trace(run)
        result.metrics.useful_share = useful_share([(workers, result.metrics.rollout)])
        result.metrics.memory = {"driver": peak_memory(), **run.parts.rollout.peak_memory()}
        record.write(result)
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
    done = run.last_step.done
    record.close()
    write_report_or_warn(run.folder.path)
    if not done:
        return Stopped(f"stopped by {stop.name} before the first step: nothing is saved", stop.number)
    if run.last_step.saved < done:
        _save(run)
    saved = f"stopped by {stop.name} and saved after step {done} of {run.config.train.steps} in {run.config.run.folder}"
    return Stopped(f"{saved}: continue with the same command and --resume", stop.number)


def _steps(run: Run, record: Record, stop: StopRequest) -> Iterator[StepResult]:
    """Run the remaining steps, each preceded by an evaluation if one is due. Yield the result of each step. Raises
    Stopped after a signal during an evaluation."""
    config = run.config
    for step in range(run.last_step.done, config.train.steps):
        run.parts.turns.step = step
        seconds: dict[str, float] = {}
        evaluation: dict[str, float] = {}
        if config.eval.every and step % config.eval.every == 0:
            with timed("eval", seconds, run.parts.tracer):
                evaluation = _evaluate(run, step, stop)
            if stop:
                raise _stopped(run, record, stop)
        result = one_step(run.parts, config, run.display, step)
        if evaluation:
            result.metrics.eval = evaluation
            result.metrics.seconds["eval"] = seconds["eval"]
            result.metrics.seconds["total"] += seconds["eval"]
        run.progress.add(result)
        yield result


def _trace(run: Run) -> list[dict[str, float]]:
    """Write the time spans since the last call to trace.json. Return for each worker its seconds in each state."""
    workers = run.parts.rollout.trace()
    named = {f"worker {index}": spans for index, spans in enumerate(workers)}
    run.trace.write({"driver": run.parts.tracer.drain(), **named})
    return [seconds_by_state(spans) for spans in workers]


# -- checkpoints -------------------------------------------------------------------------------------------------------


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
    parts, last_step = run.parts, run.last_step
    state = {
        "step": last_step.done,
        "config": run.config.model_dump(mode="json"),
        "model": run.contents.model,
        "reward": run.contents.reward,
        "changes": run.changes,
        **run.fingerprints,
        "cursor": asdict(last_step.cursor),
        "carried": to_plain(last_step.carried),
        "rollout": parts.rollout.state(),
        "metrics": last_step.metrics,
    }

    def write(folder: Path) -> None:
        _write_policy(run, last_step.done, folder)
        parts.rollout.save_history(folder)

    root = run.folder.path / "checkpoints"
    saved = checkpoint.save(root, last_step.done, state, write, run.config.run.keep)
    run.folder.point_to(saved)
    if run.on_save:
        run.on_save.saved(saved)
    last_step.saved = last_step.done
    parts.turns.saved(last_step.done)


def _rescue(run: Run) -> str:
    """Save a checkpoint after an error, if the state is intact. Return a sentence on how to continue the run."""
    last_step, failed = run.last_step, ""
    if run.policy.version == last_step.done > last_step.saved:
        try:
            _save(run)
        except Exception as error:
            failed = f"the newest steps cannot be saved ({error}); "
    return failed + _saved_before(run)


def _saved_before(run: Run) -> str:
    """Return a sentence on the newest checkpoint and how to continue from it, or a sentence that nothing is saved."""
    if run.last_step.saved:
        return f"saved after step {run.last_step.saved} in {run.folder.path}: continue with --resume"
    return "nothing is saved yet"


# -- evaluations -------------------------------------------------------------------------------------------------------


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


def evaluate(
    config: Config,
    prompts: Sequence[Prompt],
    rollout: Rollout,
    reward: Reward,
    sampling: SamplingParams,
    watcher: Watcher,
    step: int,
    coming: Iterable[list[Request]] = (),
) -> dict[str, float]:
    """Run an evaluation on held-out prompts and return its metrics by name.

    All evaluations of a run use the same seeds, so that differences come from the weights only. `step` is the index of
    the training step that follows, or of the last step. `coming` has the requests of the next training steps, one list
    per step. Idle workers decode them in advance as look-ahead drafts."""
    samples = config.eval.samples
    requests = make_requests(prompts, samples, sampling, config.run.seed, "eval")
    watcher.phase(step, "eval", len(requests))
    responses, _ = rollout.generate(requests, call_each(reward.submit, watcher.response), coming)
    by_seed = {response.request.seed: response for response in responses}
    in_order = [by_seed[request.seed] for request in requests]
    reward(in_order)
    groups = [in_order[i : i + samples] for i in range(0, len(in_order), samples)]
    return summary_of(groups, samples, config.eval.solved)


def summary_of(groups: Sequence[Sequence[Response]], samples: int, solved: float) -> dict[str, float]:
    """Return the metrics of an evaluation by name. Each group has `samples` responses to one prompt. A response counts
    as right if its reward is at least `solved`. Responses without a reward do not count in mean@k and pass@k. Their
    number is the metric `without_reward`. `half_width` is half of the 95 % confidence interval of mean@k. A metric
    without data is missing."""
    rewards = [[r.reward for r in group if r.reward is not None] for group in groups]
    everything = [r for group in rewards for r in group]
    lengths = [r.num_sampled for group in groups for r in group]
    counts = [(len(group), sum(is_solved(reward, solved) for reward in group)) for group in rewards]
    values = {f"mean@{samples}": everything}
    for k in _powers_of_two(samples):
        values[f"pass@{k}"] = [pass_at(n, right, k) for n, right in counts if n >= k]
    found = {name: fmean(mine) for name, mine in values.items() if mine}
    by_prompt = [fmean(group) for group in rewards if group]
    if len(by_prompt) > 1:  # responses to one prompt are alike, so prompts are the sample
        found["half_width"] = 1.96 * stdev(by_prompt) / math.sqrt(len(by_prompt))
    truncated = [r.is_truncated for group in groups for r in group]
    lengths_found = {"length_mean": fmean(lengths), "length_max": max(lengths), "truncated": fmean(truncated)}
    return {**found, **lengths_found, "without_reward": len(lengths) - len(everything)}


def is_solved(reward: float, solved: float) -> bool:
    """Return whether a reward is at least `solved`, with a relative tolerance of 1e-9: 0.6 + 0.3 + 0.1 counts as 1."""
    return reward >= solved - 1e-9 * max(1.0, abs(solved))


def pass_at(n: int, right: int, k: int) -> float:
    """Return pass@k, the probability that k responses drawn without replacement from n contain at least one of the
    `right` correct ones. This is the unbiased estimator 1 - C(n - right, k) / C(n, k) of arXiv 2107.03374. Example: n =
    4, right = 1, k = 2 gives 1 - 3 / 6 = 0.5."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def _powers_of_two(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most` itself: the values of k in pass@k."""
    return sorted({2**i for i in range(most.bit_length())} | {most})
