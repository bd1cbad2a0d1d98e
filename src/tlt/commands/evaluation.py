"""`tlt eval`: measures the newest policy of a run on held-out prompts, as the evaluations of the run do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tlt.commands.options import output_file
from tlt.config import Config, ConfigError, config_of_run
from tlt.progress import loading, working
from tlt.run.mistakes import refuse_mistakes
from tlt.store.checkpoint import latest
from tlt.wording import counted


def add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument(
        "--data", metavar="NAME", help="file of held-out prompts, or a data set on the hub (default: those of the run)"
    )
    parser.add_argument("--json", type=output_file, help="write the result to this file")
    parser.set_defaults(command=_eval)


def _eval(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    found = latest(arguments.run / "checkpoints")
    saved = found.state["config"]
    if not arguments.data and saved["data"]["path"] and not saved["eval"]["path"] and not overrides:
        raise ConfigError(f"{arguments.run} has no held-out prompts: give --data FILE")
    held_out = {"path": arguments.data, "hub": None, "size": 250_000} if arguments.data else {}
    sections = {
        "model": {"path": str(found.folder / "policy"), "hub": None},
        "eval": {"every": 1, **held_out},
        "cluster": {"workers": 1, "min_workers": None, "address": None},
        "train": {"shard": False},
    }
    config = config_of_run(saved, overrides, **sections)
    refuse_mistakes(config)
    with loading():
        from tlt.metrics import provenance, write_json
        from tlt.run.display import held_out_line
    prompts, values = evaluated(config, found.state["step"])
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


def evaluated(config: Config, steps: int) -> tuple[int, dict[str, float]]:
    """Return the number of held-out prompts, and the metrics of the policy in model.path by name. `steps` is the number
    of steps that have trained it. Raises a ValueError of one sentence for errors that the user can fix."""
    from tlt.build import for_machine, open_target
    from tlt.cluster.remote import local_rollout
    from tlt.cluster.worker import Worker, decoding_parts
    from tlt.data.limits import eval_sampling
    from tlt.data.tokenizer import load_tokenizer
    from tlt.environments.tools import with_tools
    from tlt.loop import Watcher
    from tlt.run.evaluate import evaluate
    from tlt.run.opening import read_inputs
    from tlt.store.hub import from_hub

    config = from_hub(with_tools(for_machine(config)))
    inputs = read_inputs(config, load_tokenizer(config.model.path))
    worker = Worker(config, *decoding_parts(config, open_target(config, config.model.path)))
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
