"""Real vLLM, if a tested version is installed: `make test-vllm`. On a CPU it uses its model runner V1."""

from __future__ import annotations

import ast
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import rollout_of
from test_episodes import AtOnce
from tiny_environments import Echo

from tlt.build import open_engine, open_target, open_workplace
from tlt.config import Config, load_config
from tlt.data.prompts import reply_encoder
from tlt.draft.eagle import EagleLayer, load_drafter, save_drafter
from tlt.engine.engine import Engine
from tlt.environments.episodes import Episodes
from tlt.models.families import decoder_options, read_config
from tlt.models.weights import read_safetensors
from tlt.sampling import request_seed
from tlt.spelling import Detokenizer
from tlt.types import Request, Response, SamplingParams
from tlt.verify.oracle import EXPLAINED_GAP, float64_target, fork_of
from tlt.vllm.settings import VllmError, is_tested, vllm_version
from tlt.vllm.vllm_engine import VllmEngine

pytestmark = pytest.mark.skipif(not is_tested(vllm_version() or ""), reason="no tested vLLM is installed")
ROOT = Path(__file__).parent.parent.parent
BY_VLLM = ("--engine.backend", "vllm", "--engine.vllm.enforce_eager", "true")
LEARNED, ALONE = ("adaptive", "eagle"), ("--speculation.path", "")
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.0),
)


def recipe(*overrides: str) -> Config:
    sizes = "--engine.kv_memory_mb 256 --engine.vllm.block_size 32 --rollout.max_new_tokens 160"
    return load_config(ROOT / "recipes" / "longtail.toml", [*BY_VLLM, *sizes.split(), *overrides])


@pytest.fixture(scope="module")
def opened() -> Callable[[str], VllmEngine]:
    """Return a function that makes an engine with a drafter. All engines share one vLLM."""
    target = open_target(recipe(), recipe().model.path)

    def engine(drafter: str) -> VllmEngine:
        config = recipe(
            "--speculation.drafter", drafter, "--speculation.depth", "4", *(() if drafter in LEARNED else ALONE)
        )
        found = open_engine(config, target)
        assert isinstance(found, VllmEngine)
        return found

    return engine


@pytest.fixture(scope="module")
def place() -> Any:
    return open_workplace(recipe())


def requests(place: Any, count: int, **changes: Any) -> list[Request]:
    same = {"stop_token_ids": place.sampling.stop_token_ids, "max_new_tokens": 160} | changes
    return [
        Request(place.prompts[p], i, 0, request_seed(0, "test", p, 0, i), replace(SAMPLINGS[i], **same))
        for p, i in itertools.islice(itertools.product(range(count), range(4)), count)
    ]


def plain(place: Any, asked: Sequence[Request]) -> dict[int, Response]:
    engine = Engine(place.target, recipe().engine)
    return {response.request.seed: response for response in engine.generate(asked)}


def assert_same(place: Any, responses: Sequence[Response], ours: dict[int, Response]) -> None:
    """Compare token for token. Differences are allowed if rounding explains them."""
    assert len(responses) == len(ours)
    for response in responses:
        expected = ours[response.request.seed]
        if response.token_ids == expected.token_ids:
            assert response.finish_reason == expected.finish_reason
            for name in ("logprobs", "full_logprobs"):
                pair = (torch.tensor(getattr(r, name)) for r in (response, expected))
                torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)
        else:
            exact = float64_target(recipe(), read_safetensors(recipe().model.path))
            assert fork_of("vllm", 0, expected, response, exact).gap < EXPLAINED_GAP["float32"]


@pytest.mark.parametrize("drafter", ["off", "suffix", "eagle", "adaptive"])
def test_every_drafter_and_distribution_gives_our_tokens(drafter: str, opened: Any, place: Any) -> None:
    asked = requests(place, 24)
    engine = opened(drafter)
    assert_same(place, list(engine.generate(asked)), plain(place, asked))
    if drafter != "off":
        assert engine.stats.accept_length > (2 if drafter in LEARNED else 1)
        assert 0 < engine.stats.accepted < engine.stats.drafted
        assert engine.stats.drafter_failures == 0


def test_look_ahead_tokens_are_accepted(opened: Any, place: Any) -> None:
    asked, engine = requests(place, 24), opened("adaptive")
    engine.start(())
    engine.look_ahead(asked)
    while engine.looks_ahead:
        engine.round()
    assert all(engine.store.has_ended(request) for request in asked)
    assert_same(place, list(engine.generate(asked)), plain(place, asked))
    assert engine.stats.seen_ahead > 0.9 * engine.stats.ahead_drafted > 0
    engine.store.forget(request.seed for request in asked)


def test_requests_move_between_engines(opened: Any, place: Any) -> None:
    asked, engine = requests(place, 16), opened("adaptive")
    ours = plain(place, asked)
    engine.start(asked)
    responses = [response for _ in range(9) for response in engine.round()]
    left = engine.release_requests([request.seed for request in asked[::2]])
    assert all(len(row.logprobs) == len(row.tokens) for row in left)
    back, away = left[::2], left[1::2]
    engine.submit([], back)
    while engine.busy:
        responses += engine.round()
    other = Engine(place.target, recipe().engine)
    other.submit([], away)
    while other.busy:
        responses += other.round()
    assert_same(place, responses, ours)


def test_episodes_are_those_of_our_engine(opened: Any, place: Any) -> None:
    asked, spell = requests(place, 16, stop_strings=("=",), continues=True), Detokenizer(place.tokenizer)

    def played(engine: Any) -> list[Response]:
        turns = Episodes(AtOnce(Echo), reply_encoder(place.tokenizer, recipe().data), spell, None)  # type: ignore[arg-type]
        return rollout_of(engine, turns).generate(asked, lambda response: None)[0]

    ours = {r.request.seed: r for r in played(Engine(place.target, recipe().engine, detokenize=spell))}
    assert max(len(response.replies) for response in ours.values()) > 1
    engine = opened("off")
    assert_same(place, played(engine), ours)
    turns = [
        (r, end)
        for r in ours.values()
        for end in (0, *(reply.end for reply in r.replies if reply.end < len(r.token_ids)))
    ]
    contexts = sum(len(response.request.prompt.token_ids) + end for response, end in turns)
    assert 0 < engine.stats.prefill_tokens < contexts, "the prefix cache holds earlier turns"


def test_another_drafter_is_loaded_during_a_run(opened: Any, place: Any) -> None:
    asked, engine = requests(place, 12), opened("eagle")
    ours = plain(place, asked)
    drafter = load_drafter(str(recipe().speculation.path), engine.target.options)
    accepted = []
    for layer in (drafter, EagleLayer(drafter.options), drafter):  # that between knows nothing
        engine.draft_with(layer)
        assert_same(place, list(engine.generate(asked)), ours)
        accepted.append(engine.stats.accept_length)
    assert min(accepted[0], accepted[2]) > 2  # less precisely known is where drafts should end
    assert accepted[1] < 1.2


def test_a_model_that_vllm_does_not_support_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(recipe().model.path, folder)
    known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(known | {"architectures": ["NobodysForCausalLM"]}), encoding="utf-8")
    config = recipe("--model.path", str(folder))
    with pytest.raises(VllmError, match=r"^vLLM cannot run .*NobodysForCausalLM") as refused:
        open_target(config, config.model.path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--engine.kv_memory_mb=1", r"vLLM cannot run .*: .*KV cache"),
        ("--engine.vllm.max_num_seqs=3", r"remove engine\.vllm\.max_num_seqs: tlt sets it"),
    ],
)
def test_too_little_memory_and_arguments_that_tlt_sets_are_refused(option: str, said: str) -> None:
    config = recipe(option)
    with pytest.raises(VllmError, match=said):
        open_target(config, config.model.path)


def test_any_vllm_draws_our_tokens_if_tlt_is_installed(place: Any) -> None:
    """vLLM loads the plugin itself, and has a speculator of its own. Other requests are unchanged. Our requests are
    refused if they cannot be drawn in this way, and this ends nothing."""
    asked = requests(place, 4)
    samplings = [(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p) for r in asked]
    rows = [(list(r.prompt.token_ids), r.seed, *sampling) for r, sampling in zip(asked, samplings, strict=True)]
    given = [recipe().model.path, repr(rows), repr(list(place.sampling.stop_token_ids))]
    said = subprocess.run([sys.executable, "-c", _FOREIGN, *given], capture_output=True, text=True, check=False)
    expected = plain(place, asked)
    assert said.returncode == 0, said.stderr[-3000:]
    ours, theirs, refusals = [ast.literal_eval(line) for line in said.stdout.splitlines()[-3:]]
    assert ours == [expected[r.seed].token_ids for r in asked]
    greedy = replace(asked[0], sampling=replace(asked[0].sampling, temperature=0.0))
    assert theirs == plain(place, [greedy])[greedy.seed].token_ids
    assert ["extra_args['tlt']" in refusal for refusal in refusals] == [True, True]


_FOREIGN = """
import ast, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
from vllm import LLM, SamplingParams
from tlt.vllm.noise import Draw
path, rows, stops = sys.argv[1], *map(ast.literal_eval, sys.argv[2:])
ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
llm = LLM(path, dtype="float32", max_model_len=512, kv_cache_memory_bytes=2**28, enforce_eager=True,
          skip_tokenizer_init=True, speculative_config=ngram)
samplings = [
    SamplingParams(temperature=0, max_tokens=160, stop_token_ids=stops, ignore_eos=True, detokenize=False,
                   extra_args=Draw(key, seed, len(prompt), *sampling).as_extra())
    for key, (prompt, seed, *sampling) in enumerate(rows)
]
wanted = dict(max_tokens=160, stop_token_ids=stops, ignore_eos=True, detokenize=False)
samplings.append(SamplingParams(temperature=0, **wanted))  # of somebody else, amid ours
prompts = [{"prompt_token_ids": prompt} for prompt, *_ in [*rows, rows[0]]]
refusals = []
for extra in (samplings[0].extra_args, {"tlt": {"seed": 1}}):
    try:
        llm.generate(prompts[:1], [SamplingParams(temperature=0.7, extra_args=extra, **wanted)], use_tqdm=False)
    except ValueError as error:
        refusals.append(str(error))
found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, samplings, use_tqdm=False)]
for line in (found[:-1], found[-1], refusals):
    print(line)
"""


def trained(folder: Path, *options: str) -> str:
    """Return the sha256 of the policy after two steps of two workers on Ray."""
    words = ["--train.steps", "2", "--rollout.max_new_tokens", "160", "--workers", "2", "--run.folder", str(folder)]
    command = [sys.executable, "-m", "tlt", "train", str(ROOT / "recipes/longtail.toml"), *words, *options]
    subprocess.run(command, check=True)
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["policy_sha256"]


def test_training_with_a_worker_that_is_killed_during_its_rollout_ends_in_the_same_policy(tmp_path: Path) -> None:
    """Each worker has its own vLLM with look-ahead."""
    pytest.importorskip("ray")
    expected = trained(tmp_path / "ours")
    code = _KILLED.format(tests=str(ROOT / "tests"), recipe=str(ROOT / "recipes/longtail.toml"), run=tmp_path / "run")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.stdout.split()[-2:] == [expected, "1"], said.stderr[-3000:]


_KILLED = """
import sys
sys.path[:0] = ["{tests}", "{tests}/cluster"]
from test_workers import Killer
from tlt.run import train as run
from tlt.run import opening
from tlt.config import load_config

killer, real = Killer({{(1, "rollout"): 0.3}}), opening.join

def join(pool, config, *rest):
    killer.folder = pool.folder
    return real(pool, config, *rest)

opening.join = join
words = "--engine.backend vllm --engine.vllm.enforce_eager true --train.steps 2 --rollout.max_new_tokens 160"
config = load_config("{recipe}", [*words.split(), "--cluster.workers", "2", "--run.folder", "{run}"])
print(run.train(config, False, killer)["policy_sha256"], killer.killed)
"""


def test_idle_workers_train_the_learned_drafter(tmp_path: Path) -> None:
    """They train in the third step, on the first rollout's hidden states, which vLLM computed."""
    drafter, three = tmp_path / "drafter", ("--train.steps", "3")
    options = load_drafter(str(recipe().speculation.path), decoder_options(read_config(recipe().model.path))).options
    save_drafter(EagleLayer(options), drafter)
    learned = ("--speculation.drafter", "eagle", "--speculation.path", str(drafter), "--speculation.depth", "4")
    soon = ("--speculation.training.buffer_tokens", "2048")
    assert trained(tmp_path / "run", *BY_VLLM, *learned, *soon, *three) == trained(tmp_path / "ours", *three)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert sum(json.loads(line)["rollout"]["drafter_tokens"] for line in lines) > 0
