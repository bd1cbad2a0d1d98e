"""`tlt verify` passes on the tiny model, and fails if a bug is planted."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny import tiny_config, tiny_tree
from torch import Tensor
from transformers import AutoModelForCausalLM

from tlt.config import Config, parse_config
from tlt.draft.ahead import LookAhead
from tlt.draft.tree import DraftTree
from tlt.engine import engine, runner
from tlt.engine.noise import DraftNoise
from tlt.engine.walk import walk
from tlt.models.choose import make_target
from tlt.models.weights import read_safetensors
from tlt.run import train as run
from tlt.run.display import Display
from tlt.sampling import TopK, gumbel_noise
from tlt.types import Prompt, Request, Response, SamplingParams
from tlt.verify import forks, oracle
from tlt.verify import verify as runs
from tlt.verify.look_ahead import OlderTarget
from tlt.verify.verify import verify

EXPLAINED = 1e-4  # in float32
MODES = {
    *("suffix", "suffix, wide", "random", "adversarial", "learned, chain", "learned, tree"),
    *("off and on", "swapped every round", "adaptive", "plain", "several workers"),
    *("look-ahead", "look-ahead, spoiled"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def small(home: Path, **sections: dict[str, Any]) -> Config:
    """Return the smallest recipe that shows a bug: 2 prompts, 2 responses each, 12 tokens."""
    rollout = {"group_size": 2, "max_new_tokens": 12} | sections.pop("rollout", {})
    return tiny_config(home, rollout=rollout, **sections)


def check(config: Config, tmp_path: Path, dtype: str = "float64", steps: int = 1) -> tuple[bool, dict[str, Any]]:
    file = tmp_path / "verdict.json"
    agree = verify(config, steps, dtype, False, file)
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["agree"] is agree
    return agree, result


@pytest.fixture(autouse=True)
def without_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the ledger. Users do not have it, and it would find most planted bugs before the verdict does."""
    monkeypatch.delenv("TLT_AUDIT")


# -- it holds ----------------------------------------------------------------------------------------------------------


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
    assert {r["tokens_different"] for r in verdict["runs"]} == {0}
    assert verdict["forks"] == []


def test_all_tokens_of_the_oracle_are_accepted_also_after_preemption(verdict: dict[str, Any]) -> None:
    samplings = {(o["temperature"], o["top_k"] > 0, o["top_p"] < 1) for o in verdict["oracle"]}
    assert samplings == {(1.0, False, False), (0.6, False, False), (1.0, True, True), (0.6, True, True)}
    assert all(o["accepted"] == o["drafted"] > 0 for o in verdict["oracle"])
    assert any(o["preemptions"] > 0 for o in verdict["oracle"])


def test_all_look_ahead_tokens_of_the_target_itself_are_accepted(verdict: dict[str, Any]) -> None:
    assert [sampling_of(check) for check in verdict["look_ahead"]] == [
        sampling_of(check) for check in verdict["oracle"]
    ]
    for check in verdict["look_ahead"]:
        assert check["accepted"] == check["drafted"] > 0
        assert check["passes"] == check["fewest_passes"] == 3 * 4  # 17, 17 and 14 tokens of each of four rows
    assert any(check["preemptions"] > 0 for check in verdict["look_ahead"])


def sampling_of(check: dict[str, Any]) -> tuple[Any, ...]:
    return check["temperature"], check["top_k"], check["top_p"]


def test_look_ahead_tokens_are_accepted_only_in_modes_with_look_ahead(verdict: dict[str, Any]) -> None:
    looking = {"look-ahead, spoiled", "look-ahead", "several workers"}
    assert {r["mode"] for r in verdict["runs"] if r["seen_ahead"]} == looking


def test_verify_and_train_end_with_the_same_policy(home: Path, verdict: dict[str, Any]) -> None:
    config = small(home, rollout={"max_new_tokens": 48}, train={"steps": 2})
    summary = run.train(config, False, Display(Console(quiet=True)))
    assert summary["policy_sha256"] == verdict["runs"][0]["policy_sha256"]


def test_verification_passes_for_episodes_whose_replies_differ_each_time(home: Path, tmp_path: Path) -> None:
    """The first mode calls the environment, and all others get its replies."""
    tree = tiny_tree(home, rollout={"group_size": 2, "max_new_tokens": 40, "stop_strings": list("abcdefgh ")})
    reward = {"environment": "tiny_environments:Unsure", "folder": str(Path(__file__).parent.parent)}
    agree, result = check(parse_config(tree | {"reward": reward}), tmp_path)
    assert agree
    assert len({run["policy_sha256"] for run in result["runs"]}) == 1


@pytest.mark.slow
def test_verification_passes_with_dynamic_sampling(home: Path, tmp_path: Path) -> None:
    config = small(
        home,
        rollout={"prompts_per_step": 3, "group_size": 4, "max_waves": 4},
        reward={"name": "tiny_rewards:every_third"},
    )
    agree, result = check(config, tmp_path, steps=3)
    assert agree
    assert len({r["policy_sha256"] for r in result["runs"]}) == 1


def test_with_importance_weights_rewards_are_compared_and_this_is_printed(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agree, result = check(small(home, train={"importance_cap": 2.0}), tmp_path)
    assert agree
    assert result["compared"] == "tokens and rewards"
    assert all(r["steps_equal"] for r in result["runs"])
    said = " ".join(capsys.readouterr().out.split())
    assert "sha256 cannot be compared" in said
    assert "runs that differ in no token end with the same rewards: yes" in said


def test_with_importance_weights_a_different_reward_is_found(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    class AlwaysAnother:
        def submit(self, response: Response) -> None: ...

        def __call__(self, responses: Sequence[Response]) -> None:
            for response in responses:
                response.reward = float(next(calls))

        def close(self) -> None: ...

    monkeypatch.setattr("tlt.run.parts.make_reward", lambda *_: AlwaysAnother())
    agree, _ = check(small(home, train={"importance_cap": 2.0}), tmp_path)
    assert not agree


def test_float32_passes_and_the_last_line_is_the_verdict(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agree, result = check(small(home), tmp_path, "float32")
    assert agree
    assert result["dtype"] == "float32"
    assert {r["mode"] for r in result["runs"]} == MODES
    lines = printed(capsys)
    assert lines[-1] == f"verdict: all {len(MODES)} modes agree in every token"
    assert "…" not in "".join(lines)
    table = [line for line in lines if any(line.strip().startswith(mode) for mode in MODES)]
    assert len(table) == len(MODES)
    assert max(len(line) for line in table) <= 80
    assert "1 preemption," in "".join(lines)
    assert "1 preemptions" not in "".join(lines)


def test_the_oracles_logits_are_those_of_transformers(home: Path) -> None:
    config = small(home)
    target = make_target(config.model)
    target.load(read_safetensors(config.model.path), 0)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64).eval()
    contexts = [[1, 2, 3], [9], [4, 4, 200, 7, 31]]
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([c])).logits[0, -1] for c in contexts])
    assert torch.allclose(oracle.last_logits(target, contexts), expected, rtol=0, atol=1e-4)


# -- look-ahead --------------------------------------------------------------------------------------------------------


class Weights:
    """Stand-in for a policy, which only has weights."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state_dict = lambda: state

    def update(self, batch: Any, step: int) -> dict[str, float]:
        raise AssertionError("nothing is trained here")


def decoded_by(config: Config, state: dict[str, Tensor], requests: Sequence[Request]) -> list[list[int]]:
    """Decode the requests one after the other. Return their tokens."""
    target = make_target(config.model)
    target.load(state, 0)
    engine_ = engine.Engine(target, config.engine)
    return [list(response.token_ids) for request in requests for response in engine_.generate([request])]


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
    now = decoded_by(config, first, requests)
    older.sync(Weights(first), 0)
    found = older.tokens_of(requests)
    tokens = [ahead.tokens.tolist() for ahead in found]
    assert [ahead.seed for ahead in found] == [request.seed for request in requests]
    assert all(ahead.ended for ahead in found)
    assert tokens != now, "they part"
    assert sum(a[0] == b[0] for a, b in zip(tokens, now, strict=True)) >= 6, "but not at once"
    older.sync(Weights(second), 1)
    older.sync(Weights(first), 0)
    assert all(a is b for a, b in zip(older.tokens_of(requests), found, strict=True)), "decoded once for all modes"
    older.sync(Weights(second), 1)
    assert [ahead.tokens.tolist() for ahead in older.tokens_of(requests)] == now


# -- planted bugs ------------------------------------------------------------------------------------------------------


def takes_the_first_child(tree: DraftTree, sampled: Sequence[int]) -> list[int]:
    return [0, 1] if len(tree.tokens) > 1 else [0]


def takes_a_second_child(tree: DraftTree, sampled: Sequence[int]) -> list[int]:
    """Planted bug that is right for chains, such as the oracle's."""
    return [0, 2] if tree.parents[:3] == [0, 0, 0] else walk(tree, sampled)


def rank_that_sees_the_tree(log_probs: Tensor, noise: Tensor, k: int = 1) -> TopK:
    """Planted bug: the distribution is a few per cent sharper if there are several nodes to verify."""
    sharper = log_probs * 1.05 if log_probs.shape[1] > 1 else log_probs
    scores, picks = (sharper + noise).max(dim=-1, keepdim=True)
    return TopK(scores, picks)


@pytest.mark.parametrize(
    ("bug", "dtype"),
    [
        ((engine, "walk", takes_the_first_child), "float64"),
        ((runner, "gumbel_topk", rank_that_sees_the_tree), "float32"),
    ],
    ids=["a walk that takes what was not sampled", "a sample that depends on the batch"],
)
def test_a_planted_bug_is_found(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: tuple[Any, str, Any], dtype: str
) -> None:
    monkeypatch.setattr(*bug)
    agree, result = check(small(home), tmp_path, dtype)
    assert not agree
    assert sum(r["tokens_different"] for r in result["runs"]) > 0
    assert result["runs"][-1]["tokens_different"] == 0  # plain is the measure
    for fork in result["forks"]:
        assert set(fork) == {"mode", "step", "prompt", "index", "position", "gap"}
        assert fork["mode"] in {r["mode"] for r in result["runs"]} - {"plain"}
    assert any(fork["gap"] > EXPLAINED for fork in result["forks"])


def test_a_bug_that_changes_tokens_but_no_reward_is_found(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal rewards do not change the policy, so its sha256 does not depend on the tokens."""
    monkeypatch.setattr(engine, "walk", takes_a_second_child)
    agree, result = check(small(home, reward={"name": "exact"}), tmp_path)
    assert sum(r["tokens_different"] for r in result["runs"]) > 0
    assert len({r["policy_sha256"] for r in result["runs"]}) == 1
    assert not agree
    apart = [r["mode"] for r in result["runs"] if r["tokens_different"]]
    assert printed(capsys)[-1].startswith(
        f"verdict: DIFFER in {len(apart)} of {len(MODES)} modes ({'; '.join(apart)});"
    )


def test_a_bug_that_only_costs_speed_is_found_by_the_oracle(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without: Callable[..., Tensor] = DraftNoise.__call__

    def silence(*args: Any) -> Tensor:
        return without(*args) * 0.0

    monkeypatch.setattr(DraftNoise, "__call__", silence)
    agree, result = check(small(home), tmp_path)
    assert len({r["policy_sha256"] for r in result["runs"]}) == 1
    assert any(o["accepted"] < o["drafted"] for o in result["oracle"])
    assert not agree


def commits_what_it_saw(tree: DraftTree, sampled: Sequence[int]) -> list[int]:
    return list(range(len(tree.tokens))) if tree.ahead else walk(tree, sampled)


def test_look_ahead_without_verification_is_found(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "walk", commits_what_it_saw)
    agree, result = check(small(home), tmp_path)
    assert not agree
    assert "look-ahead, spoiled" in {r["mode"] for r in result["runs"] if r["tokens_different"]}
    assert result["runs"][-1]["tokens_different"] == 0


def test_look_ahead_that_only_costs_speed_is_found(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of its chains begins one token late. No token changes, and no token of a chain is accepted."""
    propose: Callable[..., list[list[int]]] = LookAhead.propose
    monkeypatch.setattr(LookAhead, "propose", lambda self, counts: [chain[1:] for chain in propose(self, counts)])
    agree, result = check(small(home), tmp_path)
    assert {r["tokens_different"] for r in result["runs"]} == {0}
    assert any(c["accepted"] < c["drafted"] for c in result["look_ahead"])
    assert not agree
    assert printed(capsys)[-1].startswith(f"verdict: DIFFER in 0 of {len(MODES)} modes; 1 of ")


# -- what it says ------------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.rstrip().split("\n")


# -- forks -------------------------------------------------------------------------------------------------------------

V, SEED = 8, 2**63 + 5
REFERENCE: Any = SimpleNamespace(device=torch.device("cpu"))


def request_of(**sampling: Any) -> Request:
    return Request(Prompt(3, "", (1, 2)), 2, 0, SEED, SamplingParams(**sampling))


def noise_at(position: int) -> Tensor:
    seed = torch.tensor([SEED], dtype=torch.uint64).view(torch.int64)
    return gumbel_noise(seed, torch.tensor([position]), V)[0].double()


@pytest.fixture
def recompute(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], None]:
    """Let the float64 recomputation return these logits."""

    def give(logits: Tensor) -> None:
        monkeypatch.setattr(forks, "last_logits", lambda target, contexts: logits.double()[None])

    return give


def response(tokens: list[int], **sampling: Any) -> Response:
    return Response(request_of(**sampling), tokens, [], [], "length")


@pytest.mark.parametrize("difference", [1e-6, 0.3])
def test_gap_of_two_noisy_scores(recompute: Callable[[Tensor], None], difference: float) -> None:
    logits = -noise_at(2)  # every score equal
    logits[5] += difference
    recompute(logits)
    fork = forks.fork_of("suffix", 7, response([0, 1, 5, 2]), response([0, 1, 6, 3]), REFERENCE)
    assert (fork.mode, fork.step, fork.prompt, fork.index, fork.position) == ("suffix", 7, 3, 2, 2)
    assert fork.gap == pytest.approx(difference, rel=1e-6)
    assert (fork.gap < EXPLAINED) == (difference == 1e-6)


def test_the_gap_uses_the_noise_of_the_forks_own_position(recompute: Callable[[Tensor], None]) -> None:
    recompute(-noise_at(1))
    assert forks.fork_of("suffix", 0, response([4, 5]), response([4, 6]), REFERENCE).gap == pytest.approx(0, abs=1e-9)
    assert forks.fork_of("suffix", 0, response([5]), response([6]), REFERENCE).gap > 1e-3


def test_the_gap_is_computed_after_the_temperature(recompute: Callable[[Tensor], None]) -> None:
    logits = -noise_at(0) * 0.5
    recompute(logits)

    def gap(temperature: float) -> float:
        ours, theirs = (response([token], temperature=temperature) for token in (5, 6))
        return forks.fork_of("suffix", 0, ours, theirs, REFERENCE).gap

    assert gap(0.5) == pytest.approx(0, abs=1e-9)
    assert gap(1.0) > 1e-3


def test_the_recomputation_uses_prompt_and_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(forks, "last_logits", lambda target, contexts: (seen.extend(contexts), torch.zeros(1, V))[1])
    forks.fork_of("suffix", 0, response([4, 5, 6]), response([4, 5, 7]), REFERENCE)
    assert seen == [[1, 2, 4, 5]]


def test_a_response_that_ends_early_for_no_reason_is_never_explained() -> None:
    fork = forks.fork_of("suffix", 0, response([4, 5]), response([4, 5, 6]), REFERENCE)
    assert fork.gap == math.inf
    assert fork.position == 2


def distribution_with(chances: list[float]) -> Tensor:
    return torch.tensor([*chances, *[1e-9] * (V - len(chances))], dtype=torch.float64).log()


def test_a_token_at_the_edge_of_top_k_explains_a_fork_to_the_one_outside(recompute: Callable[[Tensor], None]) -> None:
    recompute(distribution_with([0.4, 0.3, 0.15, 0.15 * (1 - 1e-6)]))
    fork = forks.fork_of("suffix", 0, response([2], top_k=3), response([3], top_k=3), REFERENCE)
    assert fork.gap < EXPLAINED


def test_a_token_at_the_edge_of_top_k_explains_a_fork_to_one_well_inside(recompute: Callable[[Tensor], None]) -> None:
    """One side kept token 2, which won. The other one cut it in favour of token 3, and then token 0 was the best."""
    recompute(distribution_with([0.4, 0.3, 0.15, 0.15 * (1 - 1e-6)]))
    fork = forks.fork_of("suffix", 0, response([2], top_k=3), response([0], top_k=3), REFERENCE)
    assert fork.gap < EXPLAINED


def test_a_mass_at_the_edge_of_top_p_explains_a_fork(recompute: Callable[[Tensor], None]) -> None:
    """The mass above token 2 is top_p except for rounding: it is inside on one side, and outside on the other."""
    recompute(distribution_with([0.5, 0.4, 0.1]))
    for top_p in (0.9 - 1e-6, 0.9 + 1e-6):
        fork = forks.fork_of("suffix", 0, response([2], top_p=top_p), response([0], top_p=top_p), REFERENCE)
        assert fork.gap < EXPLAINED


@pytest.mark.parametrize("sampling", [{"top_k": 2}, {"top_p": 0.6}])
def test_a_token_far_outside_the_cut_explains_nothing(
    recompute: Callable[[Tensor], None], sampling: dict[str, Any]
) -> None:
    recompute(distribution_with([0.5, 0.3, 0.1, 0.06]))
    fork = forks.fork_of("suffix", 0, response([0], **sampling), response([3], **sampling), REFERENCE)
    assert fork.gap > EXPLAINED


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
    found = [forks.Fork("suffix", 0, 0, 0, 0, gap) for gap in gaps]
    right = {"drafted": 1, "accepted": 1, "preemptions": 1, "passes": 1, "fewest_passes": 1}
    every = {"suffix": runs.ModeRun("suffix", tokens_different=len(gaps)), "plain": runs.ModeRun("plain")}
    assert all(runs._checks(every, found, [right], [right], 100, dtype, False).values()) is holds
