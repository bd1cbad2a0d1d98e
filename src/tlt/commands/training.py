"""`tlt train`: starts or resumes a run from a recipe and its overrides, and selects the view."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tlt.commands.options import RECIPE
from tlt.config import ConfigError, load_config
from tlt.progress import loading
from tlt.run.folder import RunFolder, has_checkpoints
from tlt.run.mistakes import refuse_mistakes
from tlt.run.trackers import makers_of
from tlt.store.hub import from_hub

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
