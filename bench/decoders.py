"""Plain decoding of the same greedy requests by the fused decoder, the generic one, and transformers' generate.

    OMP_NUM_THREADS=1 python bench/decoders.py MODEL [--batches 1 8 32] [--tokens 64] [--repeats 3] [--json FILE]

MODEL is of a family that the fused decoder knows. The three take turns; medians of tokens per CPU second of one thread
are reported, so that they do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tlt.build import load_tokenizer
from tlt.config import EngineConfig
from tlt.draft.strategy import PLAIN
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.metrics import provenance, write_json
from tlt.models.choose import decoder_for
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options, read_config
from tlt.models.generic import GenericDecoder
from tlt.models.hugging_face import load_model
from tlt.types import Prompt, Request, SamplingParams

CPU = torch.device("cpu")
PROMPTS = Path(__file__).parent / "prompts.jsonl"
Way = Callable[[Sequence[Request]], list[list[int]]]


def prompts(tokenizer: Any) -> list[Prompt]:
    """Return the questions as chat prompts."""
    found = []
    for number, line in enumerate(PROMPTS.read_text(encoding="utf-8").splitlines()):
        asked = [{"role": "user", "content": json.loads(line)["question"]}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        found.append(Prompt(number, text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])))
    return found


def requests(asked: Sequence[Prompt], batch: int, rollout: int, params: SamplingParams) -> list[Request]:
    first = rollout * batch
    return [Request(asked[n % len(asked)], n // len(asked), 0, 1000 + n, params) for n in range(first, first + batch)]


def ways(folder: str) -> dict[str, Way]:
    config, dtype = read_config(folder), torch.float32
    model = load_model(folder, dtype, CPU)
    weights = model.state_dict()

    def by(target: Decoder) -> Way:
        target.load(weights, 0)
        engine = Engine(target, EngineConfig(), [], Fixed(PLAIN))

        def decode(asked: Sequence[Request]) -> list[list[int]]:
            found = {response.request.seed: list(response.token_ids) for response in engine.generate(asked)}
            return [found[request.seed] for request in asked]

        return decode

    def generate(asked: Sequence[Request]) -> list[list[int]]:
        longest = max(len(request.prompt.token_ids) for request in asked)
        gaps = [longest - len(request.prompt.token_ids) for request in asked]
        rows = [[0] * gap + list(request.prompt.token_ids) for gap, request in zip(gaps, asked, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        new = asked[0].sampling.max_new_tokens
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
        found = model.generate(torch.tensor(rows), attention_mask=torch.tensor(mask), eos_token_id=None, **settings)
        return found[:, longest:].tolist()

    fused = decoder_for(config, dtype, CPU)
    assert not isinstance(fused, GenericDecoder), "a family that the fused decoder knows"
    generic = GenericDecoder(decoder_options(config), dtype, CPU, config)
    return {"fused": by(fused), "generic": by(generic), "generate": generate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sides, asked = ways(arguments.model), prompts(load_tokenizer(arguments.model))
    sampling, found = SamplingParams(temperature=0.0, max_new_tokens=arguments.tokens), []
    for batch in arguments.batches:
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        equal: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(arguments.repeats):
            work, tokens = requests(asked, batch, repeat, sampling), {}
            for name, way in sides.items():
                began = time.process_time()
                tokens[name] = way(work)
                speeds[name].append(batch * arguments.tokens / (time.process_time() - began))
            for name in sides:
                same = [a == b for a, b in zip(tokens["fused"], tokens[name], strict=True)]
                equal[name].append(sum(same) / len(same))
        case = {"batch": batch, "tokens_per_second": {name: statistics.median(x) for name, x in speeds.items()}}
        case["equal_responses"] = {name: statistics.fmean(x) for name, x in equal.items()}
        found.append(case)
        print(case, flush=True)
    if arguments.json:
        write_json(arguments.json, {"what": "plain decoding", "cases": found, **provenance()})


if __name__ == "__main__":
    main()
