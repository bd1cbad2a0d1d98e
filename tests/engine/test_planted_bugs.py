"""Tests of the checks in small.py: each check fails for a bug that it must find.

`tests/mutants/table.py` plants the other bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import small
from small import ContextDrafter, Violation, build, decode
from test_losslessness import SPECULATIVE, mixed_requests, target

import tlt.engine.committing
import tlt.engine.noise_window
from tlt import sampling
from tlt.engine.engine import Engine
from tlt.engine.noise_window import DraftNoise
from tlt.engine.runner import Runner, Sampled
from tlt.types import Row, SamplingParams

Patch = pytest.MonkeyPatch
WARM = SamplingParams(0.7, max_new_tokens=4)


def noise_shared_by_two_responses_of_a_group(patch: Patch) -> None:
    seed = sampling.request_seed
    patch.setattr(sampling, "request_seed", lambda *key: seed(*key[:4], 0))


def noise_shared_by_two_prompts(patch: Patch) -> None:
    seed = sampling.request_seed
    patch.setattr(sampling, "request_seed", lambda run, domain, prompt, *key: seed(run, domain, 0, *key))


def draft_under_the_noise_of_the_next_position(patch: Patch) -> None:
    """Tokens and distributions stay right, so this only costs speed."""
    noise_of = DraftNoise.__call__
    patch.setattr(DraftNoise, "__call__", lambda self, depth, ids: noise_of(self, depth + 1, ids))


def first_draft_tokens_always_accepted(patch: Patch) -> None:
    patch.setattr(tlt.engine.committing, "num_accepted", lambda draft, sampled: min(1, len(draft.tokens)))


def kv_not_rebuilt_after_preemption(patch: Patch) -> None:
    """Prefill only the prompt when a row returns."""
    patch.setattr(Row, "context", property(lambda row: row.request.prompt.token_ids))


def logprob_of_the_wrong_token(patch: Patch) -> None:
    """Let each token report the log-probs of the previous token."""
    verify = Runner.verify

    def shifted(self: Runner, *arguments: Any) -> Sampled:
        sampled = verify(self, *arguments)
        return sampled._replace(logprobs=[[row[0], *row[:-1]] for row in sampled.logprobs])

    patch.setattr(Runner, "verify", shifted)


def speculating(max_rows: int = 64, bound_tokens: int | None = None) -> Engine:
    return build(target(), ContextDrafter(target(), 0.7, 0.7), SPECULATIVE, max_rows, bound_tokens)


def joint() -> None:
    for epochs in (300, 2_000):  # most bugs need few responses
        small.check_joint(small.draw(speculating(512), WARM, epochs, run_seed=epochs), target(), WARM)


def group_independence() -> None:
    small.check_group_independence(small.draw(speculating(512), WARM, epochs=600), target(), WARM)


def request_independence() -> None:
    small.check_request_independence(small.draw(speculating(512), WARM, epochs=600), target(), WARM)


def tokens() -> None:
    requests, expected = mixed_requests()
    for bound in (None, 85):
        small.check_tokens(decode(speculating(bound_tokens=bound), requests), expected)


def logprobs() -> None:
    requests, expected = mixed_requests()
    small.check_logprobs(decode(speculating(), requests), expected)


def cache_integrity() -> None:
    decode(speculating(bound_tokens=85), mixed_requests()[0], after_round=small.check_integrity)


def oracle() -> None:
    engine = build(target(), small.oracle(target()), SPECULATIVE)
    steps = small.record_steps(engine)
    decode(engine, [r for r in mixed_requests()[0] if r.sampling.temperature > 0 and not r.sampling.stop_token_ids])
    small.check_oracle(steps, SPECULATIVE)


FINDS: dict[Callable[[], None], Callable[[Patch], None]] = {
    group_independence: noise_shared_by_two_responses_of_a_group,
    request_independence: noise_shared_by_two_prompts,
    oracle: draft_under_the_noise_of_the_next_position,
    joint: first_draft_tokens_always_accepted,
    tokens: kv_not_rebuilt_after_preemption,
    cache_integrity: kv_not_rebuilt_after_preemption,
    logprobs: logprob_of_the_wrong_token,
}


@pytest.mark.parametrize("check", FINDS, ids=lambda check: check.__name__)
def test_each_check_passes_without_a_bug_and_finds_its_bug(check: Callable[[], None], monkeypatch: Patch) -> None:
    """Less noise is computed ahead than responses of four tokens use. The ledger, which would find most bugs before the
    checks do, is off."""
    monkeypatch.setattr(tlt.engine.noise_window, "_MAX_WINDOW", 4)
    monkeypatch.delenv("TLT_AUDIT")
    check()
    FINDS[check](monkeypatch)
    with pytest.raises(Violation):
        check()
