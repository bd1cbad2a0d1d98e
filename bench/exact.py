"""Random cases in which no bit of a response may change: how it is decoded, against decoding it alone without drafts.

    python bench/exact.py [--cases 2000] [--seed 0] [--json FILE]

A case has a small random model, a number format, prompts of 1 to 2,000 tokens, and a way to decode: numbers of rows,
prefill tokens and threads, a drafter whose draft tokens are right with some probability, look-ahead drafts, or a cache
so small that rows are preempted. Tokens and log-probs are compared bit for bit. For models of the fused decoder, the
log-probs of the update are compared too. The JSON is written as cases end.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from families import SIZES, small_config
from transformers import AutoModelForCausalLM

from tlt import Engine, Prompt, SamplingParams, make_requests
from tlt.attention.key_counts import rounded_up
from tlt.config import EngineConfig
from tlt.draft.ahead import Ahead, AheadStore
from tlt.draft.drafter import Offer, Prefix, PrefixDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.tuner import Fixed
from tlt.metrics import provenance, write_json
from tlt.models.decoder import Decoder
from tlt.models.loading import decoder_for
from tlt.rl.batching import by_prompt, pack
from tlt.rl.logprobs import token_logprobs
from tlt.rl.passes import EngineForward, can_follow
from tlt.types import Request, Response

FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi"),
    *("olmo2", "glm4", "starcoder2", "mixtral", "qwen3_moe", "granitemoe"),
    *("qwen2_moe", "laguna", "afmoe", "gpt2", "aria_text"),
)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
LONGEST, MOST_NEW = 2000, 16
TEMPERATURE = 0.9
WAYS = ("rows", "drafts", "look-ahead", "preemption", "update")


class Model(NamedTuple):
    own: Any
    target: Decoder


@cache
def model_of(family: str, dtype: torch.dtype) -> Model:
    config = small_config(family)
    config.max_position_embeddings = LONGEST + 2 * MOST_NEW
    torch.manual_seed(0)
    own: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in own.parameters():
        weight.data.mul_(2.0 if weight.dim() > 1 else 1.0)
    target = decoder_for(config, dtype, torch.device("cpu"))
    target.load(own.state_dict(), 0)
    return Model(own.eval(), target)


class PartlyRight(PrefixDrafter):
    """Drafter that knows the responses. Each of its draft tokens is right with a probability."""

    name = "partly_right"

    def __init__(self, responses: Mapping[int, Sequence[int]], right: float, chance: random.Random) -> None:
        self.responses, self.right, self.chance = responses, right, chance

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        found = []
        for prefix in prefixes:
            known, place = self.responses[prefix.request.seed], len(prefix.committed) + len(prefix.drafted)
            is_right = place < len(known) and self.chance.random() < self.right
            found.append([known[place] if is_right else self.chance.randrange(3, SIZES["vocab_size"])])
        return Offer(torch.tensor(found), torch.zeros(len(found), 1))


def some_requests(chance: random.Random) -> list[Request]:
    lengths = [int(LONGEST ** chance.random()) for _ in range(chance.randint(1, 3))]
    texts = [tuple(chance.randrange(3, SIZES["vocab_size"]) for _ in range(length)) for length in lengths]
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=chance.randint(1, MOST_NEW), stop_token_ids=(2,))
    prompts = [Prompt(i, "", text) for i, text in enumerate(texts)]
    return make_requests(prompts, chance.randint(1, 2), sampling, seed=chance.randrange(2**30))


def decode(engine: Engine, requests: Sequence[Request]) -> dict[int, Response]:
    return {response.request.seed: response for response in engine.generate(requests)}


def decode_in_a_way(
    way: str, target: Decoder, requests: list[Request], alone: dict[int, Response], chance: random.Random
) -> dict[int, Response]:
    config = EngineConfig(max_rows=chance.randint(1, 8), prefill_tokens=int(16 * 512 ** chance.random()))
    known = {seed: response.token_ids for seed, response in alone.items()}
    drafter = PartlyRight(known, chance.choice([0.3, 0.8, 1.0]), chance)
    strategy, store, kv_tokens = PLAIN, AheadStore(10**6), None
    if way != "rows" and chance.random() < 0.8:
        strategy = Strategy(drafter.name, chance.choice([1, 2, 3, 4, 7, 16]))
    if way == "look-ahead":
        strategy = strategy._replace(ahead=chance.choice([4, 16]))
        store.put(Ahead.of(response, version=0) for response in alone.values() if response.token_ids)
    if way == "preemption":
        longest = max(len(r.prompt.token_ids) + r.sampling.max_new_tokens for r in requests)
        kv_tokens = chance.choice([1, 2]) * rounded_up(longest + 64, (512,))
    requests = chance.sample(requests, len(requests))
    return decode(Engine(target, config, [drafter], Fixed(strategy), store=store, kv_tokens=kv_tokens), requests)


def update_logprobs(model: Model, responses: Sequence[Response], chance: random.Random) -> list[float]:
    """Return the log-probs that the update computes, in the order of the responses."""
    forward = EngineForward(model.own, model.target.dtype, checkpoints=False)
    prompts, tokens = [r.request.prompt.token_ids for r in responses], [list(r.token_ids) for r in responses]
    members = range(len(responses))
    layout = by_prompt(members, prompts) if chance.random() < 0.5 else [[i] for i in members]
    micro = pack(layout, prompts, tokens, torch.device("cpu"))
    with torch.no_grad():
        found, _ = token_logprobs(forward, micro, TEMPERATURE)
    parts = dict(zip(micro.sequences, found.split([len(tokens[i]) for i in micro.sequences]), strict=True))
    return [x for i in members for x in parts[i].tolist()]


def different(number: int, seed: int, counts: Counter[str]) -> str:
    """Run a case. Return "" if all bits are equal, else a description of the case."""
    chance = random.Random(f"{seed}/{number}")
    family, dtype, way = chance.choice(FAMILIES), chance.choice(DTYPES), chance.choice(WAYS)
    model = model_of(family, dtype)
    if way == "update" and not can_follow(model.own, dtype):
        way = "drafts"
    requests = some_requests(chance)
    torch.set_num_threads(1)
    alone = decode(Engine(model.target, EngineConfig(max_rows=1)), requests)
    torch.set_num_threads(threads := chance.choice([1, 2, 3, 4]))
    counts[way] += 1
    counts[f"threads {threads}"] += 1
    counts["tokens"] += sum(len(response.token_ids) for response in alone.values())
    if way == "update":
        responses = list(alone.values())
        equal = update_logprobs(model, responses, chance) == [x for r in responses for x in r.full_logprobs]
    else:
        found = decode_in_a_way(way, model.target, requests, alone, chance)
        equal = all(
            (found[seed].token_ids, found[seed].full_logprobs) == (one.token_ids, one.full_logprobs)
            for seed, one in alone.items()
        )
    return "" if equal else f"case {number}: {family}, {str(dtype).removeprefix('torch.')}, {way}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    logging.disable(logging.WARNING)
    counts, faults, began = Counter[str](), list[str](), time.perf_counter()
    for number in range(arguments.first, arguments.first + arguments.cases):
        if fault := different(number, arguments.seed, counts):
            faults.append(fault)
            print(fault, flush=True)
        done = number - arguments.first + 1
        if done % 50 == 0 or done == arguments.cases:
            print(f"{done} cases, {len(faults)} with differing bits, {time.perf_counter() - began:.0f} s", flush=True)
            if arguments.json:
                result = {"cases": done, "seed": arguments.seed, "different": faults, "counts": dict(counts)}
                write_json(arguments.json, {**result, "families": FAMILIES, **provenance()})
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
