"""Command line of tlt. It checks options and recipes before it imports torch, so that errors appear at once."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tlt import __version__
from tlt.cluster.pool import ClusterError
from tlt.commands.estimate import add_estimate
from tlt.commands.options import GENERATES, OVERRIDES, RECIPE, Parser, joined, output_file, output_folder
from tlt.commands.training import add_eval, add_train
from tlt.config import Config, ConfigError, EvalConfig, load_config, load_generation
from tlt.config.recipe import SECTIONS, commented, resolved
from tlt.files import refuse_to_overwrite
from tlt.progress import loading, shown
from tlt.report import add_report
from tlt.run.mistakes import refuse_export_mistakes, refuse_generation_mistakes, refuse_mistakes
from tlt.stopping import Stopped
from tlt.store.hub import from_hub

LOST = 75
"""exit code of a run that lost its workers or its Ray cluster, or ran out of memory (EX_TEMPFAIL in sysexits.h)"""
_SPINS = "50000"  # spins of an idle thread of torch before it sleeps; by default it keeps the core for longer
_LONGEST = 1200  # maximum length of an error message in characters


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit.

    Exit codes: 0 success; 1 a check failed; 2 bad input, explained in one sentence; 75 no memory left, or the workers
    cannot start or continue; 130 interrupted, 143 terminated, 129 hung up. The message of a run that a signal stopped
    says what was saved.
    """
    arguments, overrides = _parser().parse_known_args(joined(sys.argv[1:] if argv is None else argv))
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of other libraries would garble tlt's display
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    try:
        with shown():
            code = arguments.command(arguments, overrides)
    except Stopped as stopped:
        print(f"tlt: {stopped}", file=sys.stderr)
        code = stopped.exit_code
    except KeyboardInterrupt as stop:
        print(f"tlt: {'; '.join(['interrupted', *getattr(stop, '__notes__', [])])}", file=sys.stderr)
        code = 130
    except Exception as error:
        message = _sentence(error)
        if message is None:  # a bug in tlt: show its traceback
            raise
        print(f"tlt: {_one_line('; '.join([message, *getattr(error, '__notes__', [])]))}", file=sys.stderr)
        code = LOST if isinstance(error, ClusterError) or _is_out_of_memory(error) else 2
    sys.exit(code)


def _sentence(error: Exception) -> str | None:
    if _is_out_of_memory(error):
        why = f" ({error})" if str(error) else ""
        return f"out of memory{why}: lower engine.kv_memory_mb, engine.max_rows or train.micro_batch_tokens"
    return str(error) if isinstance(error, (ValueError, OSError)) else None


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out. For host memory torch raises a RuntimeError that only its text identifies."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "CPUAllocator" in str(error)


def _one_line(text: str) -> str:
    """Return the text in one line. The middle of a long text is cut, because libraries may quote a whole file."""
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST // 2]} ... {words[-_LONGEST // 2 :]}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tlt", description="Faster RL training of reasoning LLMs, with not one token changed.")
    parser.add_argument("--version", action="version", version=f"tlt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_train(commands.add_parser("train", help="train a policy", epilog=OVERRIDES))

    add_eval(commands.add_parser("eval", help="measure a run's policy on held-out prompts", epilog=OVERRIDES))
    _add_generate(commands.add_parser("generate", help="sample responses to prompts", epilog=GENERATES))
    add_report(commands.add_parser("report", help="write one HTML page on a run"))
    _add_export(commands.add_parser("export", help="write a run's policy and drafter for an engine"))

    add_estimate(commands.add_parser("estimate", help="estimate a run's time from a few steps", epilog=OVERRIDES))

    verify = commands.add_parser("verify", help="prove that speculation changes no token", epilog=OVERRIDES)
    verify.add_argument("recipe", help=RECIPE)
    verify.add_argument("--steps", type=int, default=2, help="number of training steps")
    verify.add_argument("--dtype", default="float64", choices=["float64", "float32", "bfloat16"], help="number format")
    verify.add_argument("--json", type=output_file, help="write the result to this file")
    verify.set_defaults(command=_verify)

    config = commands.add_parser(
        "config", help="print every field of the configuration, or a recipe with all defaults", epilog=OVERRIDES
    )
    config.add_argument(
        "what", nargs="?", help=f"a section ({', '.join(SECTIONS)}), or a recipe (default: the whole default recipe)"
    )
    config.set_defaults(command=_config)

    _add_draft(commands.add_parser("draft", help="train or evaluate a drafter"))
    return parser


def _add_generate(generate: argparse.ArgumentParser) -> None:
    generate.add_argument("model", help="folder of a Hugging Face checkpoint or of a run, or a name on the hub")
    generate.add_argument(
        "--prompt", action="append", default=[], help="text of a prompt; repeat it for several prompts"
    )
    generate.add_argument("--data", help="file or data set of prompts, as data.path of a recipe")
    generate.add_argument("--out", type=Path, help="write the responses to this JSONL file")
    generate.add_argument("--samples", type=int, default=1, help="number of responses to each prompt")
    generate.set_defaults(command=_generate)


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("source", type=Path, help="folder of a run, of a model or of a drafter, or a name on the hub")
    export.add_argument("out", type=output_folder, help="folder to write; a run's drafter goes into drafter/")
    export.add_argument("--to", default="hf", choices=["hf", "vllm", "sglang"], help="engine that will load the export")
    export.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="number format")
    export.add_argument("--model", type=Path, help="for a drafter: folder or name of its target model")
    export.set_defaults(command=_export)


def _add_draft(draft: argparse.ArgumentParser) -> None:
    kinds = draft.add_subparsers(required=True, metavar="WHAT")
    train = kinds.add_parser("train", help="train a drafter for the recipe's model", epilog=OVERRIDES)
    train.add_argument("recipe", help=RECIPE)
    train.add_argument("--out", type=output_folder, help="folder for the drafter")
    train.add_argument("--tokens", type=int, default=100_000, help="tokens of training data")
    train.add_argument(
        "--seconds",
        type=float,
        default=300,
        help="training time in seconds, evaluations included; 0 evaluates the drafter in speculation.path instead",
    )
    train.set_defaults(command=_draft_train)


def _draft_train(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    _at_least_one("--tokens", arguments.tokens)
    if arguments.seconds:
        _at_least_one("--seconds", arguments.seconds)
        config = load_config(arguments.recipe, overrides)
        if not arguments.out:
            raise ConfigError("give --out FOLDER, the folder for the drafter")
        refuse_to_overwrite(arguments.out)
    else:  # for a learned drafter
        config = load_config(arguments.recipe, ["--speculation.drafter", "adaptive", *overrides])
        if config.speculation.path is None:
            raise ConfigError("--seconds 0 evaluates a drafter: give --speculation.path FOLDER")
    config = _checked(config)
    with loading():
        from tlt.commands.draft import eval_drafter, train_drafter

    if arguments.seconds:
        train_drafter(config, arguments.out, arguments.tokens, arguments.seconds)
    else:
        eval_drafter(config)
    return 0


def _generate(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    _at_least_one("--samples", arguments.samples)
    config, data = load_generation(arguments.model, overrides)
    if not arguments.prompt and not arguments.data:
        raise ConfigError("no prompt given: use --prompt TEXT or --data FILE")
    refuse_generation_mistakes(config, arguments.data, data, arguments.out)
    with loading():
        from tlt.commands.generate import Asked, generate

    generate(config, Asked(arguments.prompt, arguments.data, data), arguments.samples, arguments.out)
    return 0


def _export(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ConfigError(f"unknown option {overrides[0].partition('=')[0]}: see tlt export --help")
    refuse_export_mistakes(arguments.source, arguments.out)
    from tlt.commands.export import export

    for line in export(arguments.source, arguments.out, arguments.to, arguments.dtype, arguments.model):
        print(line)
    return 0


def _config(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    what = arguments.what
    if what is None or what in SECTIONS:
        if overrides:
            flag = overrides[0].partition("=")[0]
            raise ConfigError(f"{flag} is for a recipe: tlt config RECIPE {flag} VALUE")
        text = commented(what)
    elif Path(what).suffix or Path(what).is_file():
        text = resolved(load_config(what, overrides))
    else:
        near = difflib.get_close_matches(what, SECTIONS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"give one of {', '.join(SECTIONS)}, or a recipe"
        raise ConfigError(f"there is no section {what}: {meant}")
    sys.stdout.write(text)
    return 0


def _verify(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    _at_least_one("--steps", arguments.steps)
    config = load_config(arguments.recipe, overrides)
    if config.engine.backend == "vllm" and arguments.dtype == "float64":
        raise ConfigError("vLLM has no float64: give tlt verify --dtype float32")
    config = _checked(config)
    with loading():
        from tlt.verify.verify import verify

    return 0 if verify(config, arguments.steps, arguments.dtype, arguments.json) else 1


def _checked(config: Config) -> Config:
    """Return the configuration without evaluations, and with local paths of what it names on the hub. Raises ValueError
    for a mistake in it."""
    config = from_hub(config.model_copy(update={"eval": EvalConfig()}))
    refuse_mistakes(config)
    return config


def _at_least_one(option: str, value: float) -> None:
    if not 1 <= value < math.inf:
        raise ConfigError(f"{option} must be a number of at least 1, not {value}")
