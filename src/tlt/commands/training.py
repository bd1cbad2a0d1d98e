"""`tlt train` starts or resumes a run from a recipe and its overrides. `tlt eval` measures the newest policy of a run
on held-out prompts, as the evaluations of the run do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tlt.commands.options import RECIPE, output_file
from tlt.config import Config, ConfigError, config_of_run, load_config
from tlt.progress import loading, working
from tlt.run.folder import RunFolder, has_checkpoints
from tlt.run.mistakes import refuse_mistakes
from tlt.run.trackers import makers_of
from tlt.store.checkpoint import latest
from tlt.store.hub import from_hub
from tlt.wording import counted

if TYPE_CHECKING:
    from tlt.engine.protocol import Target

# a recipe has one source of prompts and one of rewards: --data and --reward replace those of the recipe
_OTHER_DATA = ("--data.tasks=[]",)
_OTHER_REWARDS = ("--reward.terms=[]", "--reward.environment=", "--reward.turns=")


def add_train(train: argparse.ArgumentParser) -> None:
    train.add_argument("recipe", nargs="?", help=f"{RECIPE} (default: all defaults, with --model, --data and --reward)")
    train.add_argument("--model", metavar="NAME", help="folder of the model, or its name on the hub (model.path)")
    train.add_argument(
        "--data", metavar="NAME", help="file of prompts, or a data set on the hub; replaces the recipe's"
    )
    train.add_argument("--reward", metavar="NAME", help="reward, such as math; replaces the recipe's")
    train.add_argument("--workers", type=int, help="number of workers (cluster.workers)")
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint in run.folder; start a new run if there is none",
    )
    train.add_argument(
        "--force",
        action="append",
        default=[],
        metavar="KEY",
        help="with --resume: allow this field to change, such as train.learning_rate, although the result changes; the "
        "run records it; repeat it for several fields",
    )
    train.add_argument(
        "--check", action="store_true", help="check paths, columns, template, reward and memory, and train nothing"
    )
    train.set_defaults(command=_train)


def _train(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    if arguments.force and not arguments.resume:
        raise ConfigError("--force needs --resume: a new run may use any recipe")
    if arguments.check and arguments.resume:
        raise ConfigError("--check is for a new run: leave out --resume")
    loose = [word for word in overrides if word.endswith(".toml") and not word.startswith("--")]
    if not arguments.recipe and loose:  # argparse of Python 3.11 does not find a recipe after an option
        arguments.recipe = loose[0]
        overrides = [word for word in overrides if word != loose[0]]
    if not arguments.recipe and not (arguments.model and arguments.data and arguments.reward):
        raise ConfigError("give a recipe, or --model NAME --data NAME --reward NAME")
    named = {"model.path": arguments.model, "data.path": arguments.data, "reward.name": arguments.reward}
    named["cluster.workers"] = arguments.workers
    replaced = [*_OTHER_DATA] * bool(arguments.data) + [*_OTHER_REWARDS] * bool(arguments.reward)
    overrides = [*replaced, *overrides, *(f"--{key}={value}" for key, value in named.items() if value is not None)]
    config = load_config(arguments.recipe, overrides)
    resume = arguments.resume and has_checkpoints(Path(config.run.folder))
    starts_anew = arguments.resume and not resume
    if starts_anew:  # the folder has no checkpoint to lose
        config = load_config(arguments.recipe, [*overrides, "--run.overwrite", "true"])
    makers_of(config)  # raises if a tracker cannot be used
    with RunFolder(config.run, resume):
        config = config if resume else from_hub(config)  # a resumed run loads the commit in its checkpoint
        refuse_mistakes(config)
    with loading():
        from tlt.run.display import Display
        from tlt.run.train import check, train
    view = Display()
    if arguments.check:
        check(config, view)
        return 0
    if starts_anew:
        view.note(f"there is no checkpoint in {config.run.folder}: starting a new run")
    summary = train(config, resume, view, force=arguments.force)
    view.end(summary, config.run.folder)
    return 0


def add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument(
        "--data", metavar="NAME", help="file of held-out prompts, or a data set on the hub (default: those of the run)"
    )
    parser.add_argument("--json", type=output_file, help="write the result to this file")
    parser.set_defaults(command=_eval)


def _eval(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    found = latest(arguments.run / "checkpoints")
    saved, policy = found.state["config"], found.folder / "policy"
    if not arguments.data and saved["data"]["path"] and not saved["eval"]["path"] and not overrides:
        raise ConfigError(f"{arguments.run} has no held-out prompts: give --data FILE")
    held_out = {"path": arguments.data, "hub": None, "size": 250_000} if arguments.data else {}
    sections = {
        "model": {} if saved["train"]["lora"]["rank"] else {"path": str(policy), "hub": None},
        "eval": {"every": 1, **held_out},
        "cluster": {"workers": 1, "min_workers": None, "address": None},
        "train": {"shard": False},
    }
    config = config_of_run(saved, overrides, **sections)
    refuse_mistakes(config)
    with loading():
        from tlt.metrics import provenance, write_json
        from tlt.run.display import held_out_line
    prompts, values = evaluated(config, policy, found.state["step"])
    responses = counted(config.eval.samples, "response")
    source = config.eval.path or config.data.source[1]
    steps = counted(found.state["step"], "step")
    print(f"{arguments.run} after {steps}: {counted(prompts, 'held-out prompt')} of {source}, {responses} to each")
    print(held_out_line(values))
    if arguments.json:
        write_json(
            arguments.json, {"run": str(arguments.run), "data": source, "prompts": prompts, **values, **provenance()}
        )
    return 0


def evaluated(config: Config, policy: Path, steps: int) -> tuple[int, dict[str, float]]:
    """Return the number of held-out prompts, and the metrics of the policy by name. The policy is the model in
    model.path. With LoRA, it is that model with the adapters in the folder `policy`. `steps` is the number of steps
    that have trained it. Raises a ValueError of one sentence for errors that the user can fix."""
    from tlt.build import for_machine
    from tlt.cluster.remote import local_rollout
    from tlt.cluster.worker import Worker, decoding_parts
    from tlt.data.limits import eval_sampling
    from tlt.data.tokenizer import load_tokenizer
    from tlt.environments.tools import with_tools
    from tlt.loop import Watcher
    from tlt.run.opening import read_inputs
    from tlt.run.train import evaluate
    from tlt.store.hub import from_hub

    config = from_hub(with_tools(for_machine(config)))
    inputs = read_inputs(config, load_tokenizer(config.model.path))
    worker = Worker(config, *decoding_parts(config, _target(config, policy, steps)))
    rollout = local_rollout(worker, config, inputs.turns)
    inputs.turns.step = steps
    sampling, watcher = eval_sampling(config, inputs.sampling), Watcher()
    try:
        with working("evaluate", len(inputs.held_out) * config.eval.samples, "responses") as work:
            watcher.response = lambda response: work.advance()
            values = evaluate(config, inputs.held_out, rollout, inputs.reward, sampling, watcher, steps)
    finally:
        rollout.close()
        inputs.reward.close()
    return len(inputs.held_out), values


def _target(config: Config, policy: Path, steps: int) -> Target:
    """Return the target with the weights of the policy, which are described at `evaluated`."""
    from tlt.build import open_target
    from tlt.rl.lora import refuse_other_base
    from tlt.rl.parity import take_weights
    from tlt.rl.sharded import make_policy

    if not config.train.lora.rank:
        return open_target(config, config.model.path)
    refuse_other_base(policy, config.model.path)
    target = open_target(config, None)
    take_weights(target, make_policy(config, policy), steps)  # merges the adapters, as the run does
    return target
