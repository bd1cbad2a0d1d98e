"""vLLM's two model runners as our noise uses them, and its engine as ours uses it, by their documented interfaces, over
our own model.

The runners decode greedily and verify drafts greedily, as vLLM does. They know nothing of noise. Requests arrive and
leave, slots are reused, requests are in any order, the rows of a request are together, and drafts are made up."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from tlt.config import Config
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options, read_config
from tlt.types import Request
from tlt.verify.oracle import causal_hidden, last_logits
from tlt.vllm.worker_extension import Proposer, WorkerExtension

CPU = torch.device("cpu")


class LogitsProcessor:
    """vllm.v1.worker.gpu.sample.logits_processor.LogitsProcessor, as documented there."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None: ...

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None: ...

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return True

    def apply_staged_writes(self) -> None: ...

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise NotImplementedError


class Params(SimpleNamespace):
    """vllm.SamplingParams."""


_CONTENTS: dict[str, dict[str, Any]] = {
    "vllm.v1.worker.gpu.sample.logits_processor": {"LogitsProcessor": LogitsProcessor},
    "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta")},
    "vllm": {"SamplingParams": Params},
}


def put_modules(monkeypatch: Any, contents: dict[str, dict[str, Any]] = _CONTENTS) -> None:
    """Put modules with these contents, and the packages around them, into sys.modules, whether vLLM is installed or
    not."""
    found: dict[str, ModuleType] = {}
    for leaf, names in contents.items():
        for name in itertools.accumulate(leaf.split("."), "{}.{}".format):
            found.setdefault(name, ModuleType(name))
        vars(found[leaf]).update(names)
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)


class Runner:
    """Model runner that decodes each request in a slot. Subclasses put the noise on the logits."""

    def __init__(self, target: Decoder, slots: int, seed: int = 0) -> None:
        self.target, self.slots, self.rng = target, slots, random.Random(seed)
        self.free = list(range(slots))
        self.live: dict[str, SimpleNamespace] = {}

    def add(self, name: str, request: Request, params: Any, tokens: Sequence[int] = ()) -> None:
        prompt = [*request.prompt.token_ids, *tokens]
        slot = self.free.pop(self.rng.randrange(len(self.free)))
        self.live[name] = SimpleNamespace(slot=slot, prompt=prompt, tokens=[], params=params, request=request)
        self.joined(name)

    def remove(self, name: str) -> list[int]:
        row = self.live.pop(name)
        self.free.append(row.slot)
        return row.tokens

    @torch.inference_mode()
    def step(self, drafts_of: dict[str, Sequence[int]]) -> None:
        """Compute one pass over all requests. Keep the draft tokens that greedy decoding confirms, and one more."""
        names = list(self.live)
        self.rng.shuffle(names)
        rows = [self.live[name] for name in names]
        drafts = [list(drafts_of.get(name, ())) for name in names]
        contexts = [
            [*row.prompt, *row.tokens, *draft[:count]]
            for row, draft in zip(rows, drafts, strict=True)
            for count in range(len(draft) + 1)
        ]
        scores = self.sample(names, drafts, last_logits(self.target, contexts), contexts)
        best = iter(scores.argmax(-1).tolist())
        for row, draft in zip(rows, drafts, strict=True):
            said = [next(best) for _ in range(len(draft) + 1)]
            right = next((i for i, token in enumerate(draft) if token != said[i]), len(draft))
            row.tokens += said[: right + 1]
            row.computed = len(row.prompt) + len(row.tokens) - 1

    def joined(self, name: str) -> None:
        raise NotImplementedError

    def sample(self, names: list[str], drafts: list[list[int]], logits: torch.Tensor, contexts: Any) -> torch.Tensor:
        raise NotImplementedError


class RunnerV2(Runner):
    def __init__(self, target: Decoder, slots: int, processor: type, seed: int = 0) -> None:
        super().__init__(target, slots, seed)
        self.prompt_len = SimpleNamespace(np=[0] * slots)
        states = SimpleNamespace(device=CPU, max_num_reqs=slots, prompt_len=self.prompt_len)
        self.processor = processor(None, states)

    def joined(self, name: str) -> None:
        row = self.live[name]
        self.prompt_len.np[row.slot] = len(row.prompt)
        self.processor.validate_params(row.params)
        self.processor.add_request(row.slot, row.params)

    def sample(self, names: list[str], drafts: list[list[int]], logits: torch.Tensor, contexts: Any) -> torch.Tensor:
        slots = [self.live[name].slot for name, draft in zip(names, drafts, strict=True) for _ in range(len(draft) + 1)]
        positions = torch.tensor([len(context) - 1 for context in contexts])
        self.processor.apply_staged_writes()
        return self.processor.apply(
            logits, SimpleNamespace(expanded_idx_mapping=torch.tensor(slots), pos=positions, expanded_local_pos=None)
        )


class RunnerV1(Runner):
    """Runner whose `positions` and `query_start_loc` cover the tokens of a pass: those that earlier passes did not
    compute."""

    def __init__(self, target: Decoder, slots: int, seed: int = 0) -> None:
        super().__init__(target, slots, seed)
        self.device, self.max_num_reqs = CPU, slots
        self.requests: dict[str, Any] = {}
        self.verifies = False  # whether vLLM's last call sampled by its verification of drafts
        self.block, self.cached = (
            0,
            set[tuple[int, ...]](),
        )  # size in tokens, and prefixes, of the prefix cache's blocks
        self.input_batch = SimpleNamespace(req_ids=[])
        self.drafter: Any = None

    def reload_weights(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights as on a CPU: a head that the weights leave out keeps its values, even if it is tied."""
        given, before = dict(weights_iterator), getattr(self.target, "to_logits", None)
        self.target.load(given, self.target.version + 1)
        if before is not None and "lm_head.weight" not in given:
            self.target.to_logits = before

    def joined(self, name: str) -> None:
        row = self.live[name]
        row.computed = self._cached(row.prompt)
        self.requests[name] = SimpleNamespace(prompt_token_ids=row.prompt, sampling_params=row.params)

    def _cached(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens in the prefix cache. As in vLLM, blocks are in it before a pass computes them."""
        ends = range(self.block, len(tokens), self.block) if self.block else ()  # the last token is always computed
        known = next((end for end in reversed(ends) if tuple(tokens[:end]) in self.cached), 0)
        self.cached |= {tuple(tokens[:end]) for end in ends}
        return known

    def remove(self, name: str) -> list[int]:
        row = self.live[name]
        self._cached([*row.prompt, *row.tokens])
        del self.requests[name]
        return super().remove(name)

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> torch.Tensor:
        self.verifies = spec_decode_metadata is not None
        return logits

    def sample(self, names: list[str], drafts: list[list[int]], logits: torch.Tensor, contexts: Any) -> torch.Tensor:
        rows = [self.live[name] for name in names]
        known = [len(row.prompt) + len(row.tokens) for row in rows]
        new = [(row.computed, end + len(draft)) for row, end, draft in zip(rows, known, drafts, strict=True)]
        ends = torch.tensor([end - start for start, end in new]).cumsum(0)
        self.input_batch = SimpleNamespace(
            req_ids=names, num_computed_tokens_cpu=np.array([row.computed for row in rows])
        )
        self.positions = torch.cat([torch.arange(start, end) for start, end in new])
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), ends.int()])
        self.query_start_loc = SimpleNamespace(gpu=starts, np=starts.numpy())
        metadata = None
        if any(drafts) or self.drafter:
            counts = [len(draft) for draft in drafts]
            of = [end - count - 1 + i for end, count in zip(ends, counts, strict=True) for i in range(count + 1)]
            metadata = SimpleNamespace(num_draft_tokens=counts, logits_indices=torch.stack(of))
        self.metadata = metadata
        return self._sample(logits, metadata)


class LLM:
    """vllm.v1.engine.llm_engine.LLMEngine in this process, with one worker and its model runner V1. It is passed to
    `_start` of `tlt.vllm.target` (see `install`)."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        options = decoder_options(read_config(arguments["model"]))
        self.arguments = arguments
        self.runner = RunnerV1(Decoder(options, getattr(torch, arguments["dtype"]), CPU), arguments["max_num_seqs"])
        self.longest = arguments["max_model_len"]
        self.end_token = read_config(arguments["model"]).eos_token_id
        self.runner.drafter = self._drafter(arguments["speculative_config"])
        self.worker = WorkerExtension()
        self.worker.rank = 0
        self.worker.model_runner = self.runner
        self.drafts_of: dict[str, list[int]] = {}
        self.cached_by = self.runner.target.version  # weights that prefixes in the cache are of
        self.asleep, self.scheduler_knows_ends = False, True

    def _drafter(self, speculative: dict[str, Any] | None) -> Any:
        return Proposer(None) if speculative else None

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Reset the cache as vLLM does: not with active rows, unless they are preempted and prefilled again."""
        if self.runner.live and not reset_running_requests:
            return
        self.cached_by = self.runner.target.version

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        tokens = prompt["prompt_token_ids"]
        assert not self.asleep
        assert params.temperature == 0
        assert self.cached_by == self.runner.target.version, "prefixes are those of other weights"
        assert 0 < params.max_tokens <= self.longest - len(tokens)
        self.runner.add(f"{name}-own", SimpleNamespace(prompt=SimpleNamespace(token_ids=tokens)), params)

    def abort_request(self, names: Sequence[str]) -> None:
        for name in names:
            self.runner.remove(f"{name}-own")
        self.scheduler_knows_ends = False

    def sleep(self, level: int) -> None:
        assert level in (0, 2)
        assert not self.runner.live, "vLLM would end them all"
        self.asleep = True

    def release_kv_cache_memory(self) -> None:
        assert self.asleep
        assert self.scheduler_knows_ends, "vLLM wants a completed pause first"

    def wake_up(self, tags: Sequence[str]) -> None:
        assert list(tags) == ["kv_cache"]
        self.asleep = False

    def has_unfinished_requests(self) -> bool:
        return bool(self.runner.live)

    def step(self) -> list[Any]:
        """Compute a pass over all requests. Return the tokens of each, and whether it has ended."""
        assert not self.asleep
        self.scheduler_knows_ends = True  # of those that ended before this pass
        if not self.runner.live:
            return []
        before = {name: len(row.tokens) for name, row in self.runner.live.items()}
        self.runner.step({name: self.drafts_of.get(name, []) for name in before})
        outputs = []
        for name, had in before.items():
            row = self.runner.live[name]
            news = row.tokens[had : row.params.max_tokens]
            stops = {*row.params.stop_token_ids, None if row.params.ignore_eos else self.end_token}
            stop = next((i for i, token in enumerate(news) if token in stops), None)
            news = news if stop is None else news[: stop + 1]
            del row.tokens[had + len(news) :]
            ended = stop is not None or len(row.tokens) == row.params.max_tokens
            tokens = [SimpleNamespace(token_ids=news)]
            outputs.append(
                SimpleNamespace(
                    request_id=name.removesuffix("-own"), outputs=tokens, finished=ended, num_cached_tokens=0
                )
            )
        if self.runner.drafter:
            self._propose(before)
        for output in outputs:
            if output.finished:
                self.runner.remove(f"{output.request_id}-own")
                self.scheduler_knows_ends = False
        return outputs

    @torch.inference_mode()
    def _propose(self, before: dict[str, int]) -> None:
        runner = self.runner
        rows = [runner.live[name] for name in runner.input_batch.req_ids]
        fed = [[*row.prompt, *row.tokens] for row in rows]
        starts = runner.input_batch.num_computed_tokens_cpu.tolist()
        counts = runner.query_start_loc.np[1:] - runner.query_start_loc.np[:-1]
        hidden = [
            causal_hidden(runner.target, torch.tensor([tokens + [0] * count]))[0, start : start + count]
            for tokens, start, count in zip(fed, starts, counts.tolist(), strict=True)
        ]  # those of rejected draft tokens are of others
        sampled = [row.tokens[before[name] :] for name, row in zip(runner.input_batch.req_ids, rows, strict=True)]
        features = torch.cat(hidden)
        drafts = runner.propose_draft_token_ids(None, sampled, None, features, None, None, runner.metadata, None, None)
        features.fill_(torch.nan)  # a CUDA graph writes the next pass into the same tensor
        self.drafts_of |= dict(zip(runner.input_batch.req_ids, drafts, strict=True))
        assert max(map(len, drafts)) <= self.arguments["speculative_config"]["num_speculative_tokens"]


def by_vllm(config: Config) -> Config:
    """Return the configuration with vLLM, which a recipe may not combine with float64."""
    return config.model_copy(update={"engine": config.engine.model_copy(update={"backend": "vllm"})})


def install(monkeypatch: Any) -> list[LLM]:
    """Let `engine.backend = "vllm"` start such engines from now on. Return the list of started ones."""
    started: list[LLM] = []

    def start(arguments: dict[str, Any]) -> LLM:
        started.append(LLM(arguments))
        return started[-1]

    put_modules(monkeypatch)
    monkeypatch.setattr("tlt.vllm.target._start", start)
    for module in ("target", "worker_extension"):
        monkeypatch.setattr(f"tlt.vllm.{module}.require_vllm", lambda: None)
    monkeypatch.setattr("tlt.vllm.target.vllm_version", lambda: "0.32.0")
    return started
