"""`tlt verify` passes on the tiny model, and fails if a bug is planted."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_letters
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tiny import tiny_config, tiny_tree
from torch import Tensor

from tlt.attention import slots
from tlt.config import Config, EvalConfig, parse_config
from tlt.draft.ahead import LookAhead
from tlt.draft.chains import Draft
from tlt.engine import committing, engine, runner
from tlt.engine.committing import num_accepted
from tlt.engine.exactness import Exactness
from tlt.engine.noise_window import DraftNoise
from tlt.models.loading import make_target
from tlt.models.weights import read_safetensors
from tlt.run import train as run
from tlt.run.display import Display
from tlt.sampling import TopK, gumbel_noise
from tlt.types import Prompt, Request, Response, SamplingParams
from tlt.verify import oracle
from tlt.verify import verify as runs
from tlt.verify.modes import OlderTarget
from tlt.verify.verify import verify

ATTEND = F.scaled_dot_product_attention
INEXACT = "tlt.cluster.run_worker.check_exactness", lambda target: Exactness(True, ("attention",))
Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
EXPLAINED = 1e-4  # in float32
MODES = {*("suffix", "learned", "quantized", "off and on", "adaptive", "look-ahead", "plain")}


def small(home: Path, **sections: dict[str, Any]) -> Config:
    """Return the smallest recipe that shows a bug: 2 prompts, 2 responses each, 12 tokens."""
    rollout = {"group_size": 2, "max_new_tokens": 12} | sections.pop("rollout", {})
    return tiny_config(home, rollout=rollout, **sections)


def check(config: Config, tmp_path: Path, dtype: str = "float64", steps: int = 1) -> tuple[bool, dict[str, Any]]:
    file = tmp_path / "verdict.json"
    config = config.model_copy(update={"eval": EvalConfig(every=1, path="missing.jsonl")})  # is not used
    agree = verify(config, steps, dtype, file)
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["agree"] is agree
    return agree, result


Verified = Callable[..., tuple[bool, dict[str, Any]]]


@pytest.fixture
def verified(home: Path, tmp_path: Path, monkeypatch: Patch) -> Verified:
    """Return `check` for the smallest recipe with changed sections. The oracle checks use one distribution."""
    monkeypatch.setattr(oracle, "_DISTRIBUTIONS", oracle._DISTRIBUTIONS[-1:])

    def run(dtype: str = "float64", steps: int = 1, **sections: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        return check(small(home, **sections), tmp_path, dtype, steps)

    return run


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.rstrip().split("\n")


@pytest.fixture(autouse=True)
def without_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the ledger. Users do not have it, and it would find most planted bugs before the verdict does."""
    monkeypatch.delenv("TLT_AUDIT")


@pytest.fixture(scope="module")
def verdict(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of two steps in float64, with responses long enough to outgrow the oracle's cache."""
    config = small(home, rollout={"max_new_tokens": 48})
    agree, result = check(config, tmp_path_factory.mktemp("verdict"), steps=2)
    assert agree
    return result


def test_every_mode_ends_in_the_same_bits(verdict: dict[str, Any]) -> None:
    assert {r["mode"] for r in verdict["runs"]} == MODES
    assert verdict["runs"][-1]["mode"] == "plain"
    assert len({r["policy_sha256"] for r in verdict["runs"]}) == 1
    assert {(r["tokens_different"], r["logprobs_different"]) for r in verdict["runs"]} == {(0, 0)}
    assert verdict["forks"] == []
    assert {r["mode"] for r in verdict["runs"] if r["seen_ahead"]} == {"look-ahead"}


@pytest.mark.parametrize("part", ["oracle", "look_ahead"])
def test_all_draft_tokens_of_the_target_itself_are_accepted(verdict: dict[str, Any], part: str) -> None:
    samplings = {(o["temperature"], o["top_k"] > 0, o["top_p"] < 1) for o in verdict[part]}
    assert samplings == {(1.0, False, False), (0.6, False, False), (1.0, True, True), (0.6, True, True)}
    assert all(o["accepted"] == o["drafted"] > 0 for o in verdict[part])
    assert any(o["preemptions"] > 0 for o in verdict[part])
    if part == "look_ahead":  # 17, 17 and 14 tokens of each of four rows
        assert all(o["passes"] == o["fewest_passes"] == 3 * 4 for o in verdict[part])


def test_verify_and_train_end_with_the_same_policy(home: Path, verdict: dict[str, Any]) -> None:
    config = small(home, rollout={"max_new_tokens": 48}, train={"steps": 2})
    summary = run.train(config, False, Display(Console(quiet=True)))
    assert summary["policy_sha256"] == verdict["runs"][0]["policy_sha256"]


def test_verification_passes_for_episodes_whose_replies_differ_each_time(home: Path, tmp_path: Path) -> None:
    """The first mode calls the environment, and all others get its replies."""
    rows = [{"question": word, "calls": str(tmp_path / "calls")} for word in ("two and two", "a")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    rollout = {"group_size": 2, "max_new_tokens": 40, "stop_strings": list(ascii_letters)}
    tree = tiny_tree(home, data={"path": str(tmp_path / "prompts.jsonl")}, rollout=rollout)
    reward = {"environment": "tiny_environments:Unsure", "folder": str(Path(__file__).parent.parent)}
    agree, result = check(parse_config(tree | {"reward": reward}), tmp_path)
    assert agree
    assert len((tmp_path / "calls").read_text(encoding="utf-8").splitlines()) > 4, "episodes of several turns"
    assert len({run["policy_sha256"] for run in result["runs"]}) == 1


def test_a_sharded_policy_is_verified_as_a_whole(home: Path) -> None:
    config = small(home, train={"shard": True}, cluster={"workers": 2, "min_workers": 2})
    found = runs._verify_config(config, "float64")
    assert not Config.model_validate(found.model_dump()).train.shard


@pytest.mark.slow
def test_verification_passes_with_dynamic_sampling(verified: Verified) -> None:
    rollout = {"prompts_per_step": 3, "group_size": 4, "max_waves": 4}
    agree, result = verified(steps=3, rollout=rollout, reward={"name": "tiny_rewards:every_third"})
    assert agree
    assert len({r["policy_sha256"] for r in result["runs"]}) == 1


def sums_by_number_of_queries(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **rest: Any) -> Tensor:
    """Planted fault: attention whose order of sums depends on the number of tokens in a pass."""
    if attn_mask is not None and query.shape[2] > 4:
        key, value, attn_mask = key.flip(2), value.flip(2), attn_mask.flip(-1)
    return ATTEND(query, key, value, attn_mask=attn_mask, **rest)


@pytest.mark.parametrize("honest", [True, False], ids=["the check says no", "the check says yes"])
def test_other_bits_are_allowed_only_if_the_check_at_start_says_no(
    verified: Verified, monkeypatch: Patch, capsys: Capture, honest: bool
) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", sums_by_number_of_queries)
    monkeypatch.setattr(slots, "full_queries", lambda head_dim, dtype: 4)
    if not honest:
        monkeypatch.setattr("tlt.cluster.run_worker.check_exactness", lambda target: Exactness(True))
    agree, result = verified("float32")
    differ = sum(run["logprobs_different"] for run in result["runs"])
    assert differ > 0
    assert (result["exact"], agree) == (not honest, honest)
    said = capsys.readouterr().out
    expected = "not exact: the last bits of attention" if honest else f"tokens and {differ:,} log-probs differ: NO"
    assert expected in said


def test_with_importance_weights_rewards_are_compared_unless_the_engine_is_exact(
    verified: Verified, monkeypatch: Patch, capsys: Capture
) -> None:
    agree, result = verified(train={"importance_cap": 2.0})
    assert (agree, result["compared"]) == (True, "tokens and sha256")
    assert len({run["policy_sha256"] for run in result["runs"]}) == 1
    monkeypatch.setattr(*INEXACT)
    agree, result = verified(train={"importance_cap": 2.0})
    assert (agree, result["compared"]) == (True, "tokens and rewards")
    assert all(r["steps_equal"] for r in result["runs"])
    said = " ".join(capsys.readouterr().out.split())
    assert "sha256 cannot be compared" in said
    assert "runs with equal tokens end with the same rewards: yes" in said


def test_with_importance_weights_a_different_reward_is_found(verified: Verified, monkeypatch: Patch) -> None:
    calls = itertools.count()

    class AlwaysAnother:
        submit = close = lambda self, *_: None

        def __call__(self, responses: Sequence[Response]) -> None:
            for response in responses:
                response.reward = float(next(calls))

    monkeypatch.setattr("tlt.run.opening.make_reward", lambda *_: AlwaysAnother())
    monkeypatch.setattr(*INEXACT)
    agree, _ = verified(train={"importance_cap": 2.0})
    assert not agree


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_bits_agree_and_the_first_line_is_the_verdict(verified: Verified, capsys: Capture, dtype: str) -> None:
    agree, result = verified(dtype)
    assert (agree, result["exact"], result["dtype"]) == (True, True, dtype)
    assert {r["mode"] for r in result["runs"]} == MODES
    assert {(r["tokens_different"], r["logprobs_different"]) for r in result["runs"]} == {(0, 0)}
    lines = printed(capsys)
    assert lines[0] == f"verdict: all {len(MODES)} modes agree in every token and log-prob"
    assert "…" not in "".join(lines)
    table = [line for line in lines if any(line.strip().startswith(mode) for mode in MODES)]
    assert len(table) == len(MODES)
    assert max(len(line) for line in table) <= 80
    assert "1 preemption," in "".join(lines)
    assert "1 preemptions" not in "".join(lines)


def policy(state: dict[str, Tensor]) -> Any:
    return SimpleNamespace(state_dict=lambda: state)


def test_an_older_target_is_that_of_the_previous_step(home: Path) -> None:
    """Every mode trains from the same state, so versions are synced repeatedly. In the first step there is no older
    one."""
    config = small(home)
    first = read_safetensors(config.model.path)
    second = {name: tensor * 1.1 for name, tensor in first.items()}
    params = SamplingParams(max_new_tokens=24)
    requests = [Request(Prompt(i, "", (1 + i, 2, 3)), 0, 0, 50 + i, params) for i in range(8)]
    target = make_target(config.model)
    target.cuda_graphs = True
    older = OlderTarget(target, config.engine, lambda tokens: "")
    assert older.target.cuda_graphs, "as the recipe has it"
    another = make_target(config.model)
    another.load(first, 0)
    one_by_one = engine.Engine(another, config.engine)
    now = [list(r.token_ids) for request in requests for r in one_by_one.generate([request])]
    older.sync(policy(first), 0)
    found = older.tokens_of(requests)
    tokens = [ahead.tokens.tolist() for ahead in found]
    assert [ahead.seed for ahead in found] == [request.seed for request in requests]
    assert all(ahead.ended for ahead in found)
    assert tokens != now, "they part"
    assert sum(a[0] == b[0] for a, b in zip(tokens, now, strict=True)) >= 6, "but not at once"
    older.sync(policy(second), 1)
    older.sync(policy(first), 0)
    assert all(a is b for a, b in zip(older.tokens_of(requests), found, strict=True)), "decoded once for all modes"
    older.sync(policy(second), 1)
    assert [ahead.tokens.tolist() for ahead in older.tokens_of(requests)] == now


def takes_a_third_token(draft: Draft, sampled: Sequence[int]) -> int:
    """Planted bug that is right for an oracle's drafts."""
    return 3 if len(draft.tokens) > 3 and not draft.ahead else num_accepted(draft, sampled)


def sample_that_sees_the_batch(log_probs: Tensor, noise: Tensor, k: int = 1) -> TopK:
    """Planted bug: the distribution is a few per cent sharper if there are more tokens to verify than the four rows."""
    sharper = log_probs * 1.05 if len(log_probs) > 4 else log_probs
    scores, picks = (sharper + noise).max(dim=-1, keepdim=True)
    return TopK(scores, picks)


def commits_what_it_saw(draft: Draft, sampled: Sequence[int]) -> int:
    """Planted bug: look-ahead without verification."""
    return len(draft.tokens) if draft.ahead else num_accepted(draft, sampled)


@pytest.mark.parametrize(
    ("bug", "dtype", "mode"),
    [
        ((committing, "num_accepted", commits_what_it_saw), "float64", "look-ahead"),
        ((runner, "gumbel_topk", sample_that_sees_the_batch), "float32", ""),
    ],
    ids=["no verification", "a sample that depends on the batch"],
)
def test_a_planted_bug_is_found(
    verified: Verified, monkeypatch: Patch, bug: tuple[Any, str, Any], dtype: str, mode: str
) -> None:
    monkeypatch.setattr(*bug)
    agree, result = verified(dtype)
    assert not agree
    apart = {r["mode"] for r in result["runs"] if r["tokens_different"]}
    assert apart >= ({mode} if mode else set())
    assert "plain" not in apart, "it is what the others are compared with"
    for fork in result["forks"]:
        assert set(fork) == {"mode", "step", "prompt", "index", "position", "gap"}
        assert fork["mode"] in apart
    assert any(fork["gap"] > EXPLAINED for fork in result["forks"])


def test_a_bug_that_changes_tokens_but_no_reward_is_found(
    verified: Verified, monkeypatch: Patch, capsys: Capture
) -> None:
    """Equal rewards do not change the policy, so its sha256 does not depend on the tokens."""
    monkeypatch.setattr(committing, "num_accepted", takes_a_third_token)
    agree, result = verified(reward={"name": "exact"})
    assert sum(r["tokens_different"] for r in result["runs"]) > 0
    assert len({r["policy_sha256"] for r in result["runs"]}) == 1
    assert not agree
    apart = [r["mode"] for r in result["runs"] if r["tokens_different"]]
    verdict = f"verdict: DIFFER in {len(apart)} of {len(MODES)} modes ({'; '.join(apart)});"
    assert printed(capsys)[0].startswith(verdict)


SLOWER: dict[str, tuple[Any, str, Callable[[Any], Callable[..., Any]]]] = {
    "oracle": (DraftNoise, "__call__", lambda noise: lambda *args: noise(*args) * 0.0),
    "look_ahead": (LookAhead, "propose", lambda chains: lambda *args: [chain[1:] for chain in chains(*args)]),
}


@pytest.mark.parametrize("part", SLOWER)
def test_a_bug_that_only_costs_speed_is_found(
    verified: Verified, monkeypatch: Patch, capsys: Capture, part: str
) -> None:
    """Drafts have no noise, or look-ahead drafts begin one token late. No token changes."""
    owner, name, spoil = SLOWER[part]
    monkeypatch.setattr(owner, name, spoil(getattr(owner, name)))
    agree, result = verified()
    assert {r["tokens_different"] for r in result["runs"]} == {0}
    assert len({r["policy_sha256"] for r in result["runs"]}) == 1
    assert any(o["accepted"] < o["drafted"] for o in result[part])
    assert not agree
    assert printed(capsys)[0].startswith(f"verdict: DIFFER in 0 of {len(MODES)} modes; ")


V, SEED = 8, 2**63 + 5
REFERENCE: Any = SimpleNamespace(device=torch.device("cpu"))


def noise_at(position: int) -> Tensor:
    seed = torch.tensor([SEED], dtype=torch.uint64).view(torch.int64)
    return gumbel_noise(seed, torch.tensor([position]), V)[0].double()


def fork(ours: list[int], theirs: list[int], **sampling: Any) -> oracle.Fork:
    request = Request(Prompt(3, "", (1, 2)), 2, 0, SEED, SamplingParams(**sampling))
    responses = (Response(request, tokens, [], [], "length") for tokens in (ours, theirs))
    return oracle.fork_of("suffix", 7, *responses, REFERENCE)


@pytest.fixture
def recompute(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], None]:
    """Let the float64 recomputation return these logits."""

    def give(logits: Tensor) -> None:
        monkeypatch.setattr(oracle, "last_logits", lambda target, contexts: logits.double()[None])

    return give


@pytest.mark.parametrize("difference", [1e-6, 0.3])
def test_gap_of_two_noisy_scores(recompute: Callable[[Tensor], None], difference: float) -> None:
    logits = -noise_at(2)  # every score equal
    logits[5] += difference
    recompute(logits)
    found = fork([0, 1, 5, 2], [0, 1, 6, 3])
    assert found == oracle.Fork("suffix", 8, 3, 2, 2, pytest.approx(difference, rel=1e-6))
    assert (found.gap < EXPLAINED) == (difference == 1e-6)


def test_the_gap_uses_the_noise_of_the_forks_own_position_and_the_temperature(recompute: Callable[..., None]) -> None:
    recompute(-noise_at(1))
    assert fork([4, 5], [4, 6]).gap == pytest.approx(0, abs=1e-9)
    assert fork([5], [6]).gap > 1e-3
    recompute(-noise_at(0) * 0.5)
    assert fork([5], [6], temperature=0.5).gap == pytest.approx(0, abs=1e-9)
    assert fork([5], [6], temperature=1.0).gap > 1e-3


def test_the_recomputation_uses_prompt_and_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(oracle, "last_logits", lambda target, contexts: (seen.extend(contexts), torch.zeros(1, V))[1])
    fork([4, 5, 6], [4, 5, 7])
    assert seen == [[1, 2, 4, 5]]


def test_a_response_that_ends_early_for_no_reason_is_never_explained() -> None:
    found = fork([4, 5], [4, 5, 6])
    assert (found.gap, found.position) == (math.inf, 2)


EDGE = [0.4, 0.3, 0.15, 0.15 * (1 - 1e-6)]
CUTS: dict[str, tuple[list[float], int, int, dict[str, Any], bool]] = {
    "the edge of top-k, and the token outside": (EDGE, 2, 3, {"top_k": 3}, True),
    # one side kept token 2, which won; the other one cut it in favour of token 3, and then token 0 was the best
    "the edge of top-k, and a token well inside": (EDGE, 2, 0, {"top_k": 3}, True),
    # the mass above token 2 is top_p except for rounding: it is inside on one side, and outside on the other
    "just below the edge of top-p": ([0.5, 0.4, 0.1], 2, 0, {"top_p": 0.9 - 1e-6}, True),
    "just above the edge of top-p": ([0.5, 0.4, 0.1], 2, 0, {"top_p": 0.9 + 1e-6}, True),
    "far outside top-k": ([0.5, 0.3, 0.1, 0.06], 0, 3, {"top_k": 2}, False),
    "far outside top-p": ([0.5, 0.3, 0.1, 0.06], 0, 3, {"top_p": 0.6}, False),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_fork_at_the_edge_of_a_cut_is_explained(recompute: Callable[[Tensor], None], case: str) -> None:
    chances, ours, theirs, sampling, explained = CUTS[case]
    recompute(torch.tensor([*chances, *[1e-9] * (V - len(chances))], dtype=torch.float64).log())
    assert (fork([ours], [theirs], **sampling).gap < EXPLAINED) == explained


@pytest.mark.parametrize(
    ("gaps", "dtype", "holds"),
    [
        ((), "float64", True),
        ((1e-12,), "float64", False),
        ((1e-6,), "float32", True),
        ((1e-3,), "float32", False),
        ((math.nan,), "float32", False),
        ((1e-6, 1e-6), "float32", False),
        ((1e-3, 1e-3), "bfloat16", True),
    ],
)
def test_the_number_of_allowed_forks(gaps: tuple[float, ...], dtype: str, holds: bool) -> None:
    """In float32 one in 100,000 tokens, or a single one, if rounding explains it. In float64 none."""
    found = [oracle.Fork("suffix", 0, 0, 0, 0, gap) for gap in gaps]
    right = {"drafted": 1, "accepted": 1, "preemptions": 1, "passes": 1, "fewest_passes": 1}
    every = {"suffix": runs.ModeRun("suffix", tokens_different=len(gaps)), "plain": runs.ModeRun("plain")}
    inexact = runs.Comparison(every, dtype, Exactness(), False, 100, found, [right], [right])
    assert all(runs._checks(inexact).values()) is holds
    exact = replace(inexact, exactness=Exactness(True))
    assert all(runs._checks(exact).values()) == (not gaps)


def test_log_probs_are_compared_bit_by_bit_up_to_the_first_other_token() -> None:
    def response(tokens: list[int], logprobs: list[float], full: list[float]) -> Response:
        return Response(Request(Prompt(0, "", (1,)), 0, 0, 0, SamplingParams()), tokens, logprobs, full, "length")

    ours = response([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -4.0])
    others = [
        ([1, 2, 3, 4], ours.logprobs, ours.full_logprobs, 0),
        ([1, 2, 3, 4], [-1.0, math.nextafter(-2.0, 0), -3.0, -4.0], ours.full_logprobs, 1),
        ([1, 2, 3, 4], ours.logprobs, [-1.0, -2.0, -3.5, -4.5], 2),
        ([1, 9, 3, 4], [-1.5, -2.5, -3.5, -4.5], ours.full_logprobs, 1),
        ([1, 2], [-1.0, -2.0], [-1.0, -2.0], 0),
    ]
    assert [runs._different_logprobs(ours, response(*it)) for *it, _ in others] == [count for *_, count in others]
