"""Tests on a CUDA device: the noise has the CPU's bits, the decoder agrees with transformers, and speculation changes
no token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from random_drafter import RandomDrafter
from tiny import qwen3

from tlt.config import DrafterTrainConfig, EngineConfig, RolloutConfig, TrainConfig
from tlt.draft.eagle import EagleLayer, Kind, eagle_options
from tlt.draft.features import FeatureLayout, Harvest
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options
from tlt.models.weights import sha256
from tlt.rl.policy import Policy
from tlt.sampling import gumbel_noise, request_seed
from tlt.spot.trainer import DrafterTrainer
from tlt.types import Prompt, Request, SamplingParams, TrainBatch
from tlt.verify.oracle import last_logits

# as `torch_device` does, before the first product
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
VOCAB = 300


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "head_dim": 32, "tie_word_embeddings": True}
    return qwen3(**sizes, **heads, max_position_embeddings=1024).float().cuda()


def decoder(model: Any, dtype: torch.dtype) -> Decoder:
    target = Decoder(decoder_options(model.config), dtype, torch.device("cuda"))
    target.load(model.state_dict(), version=0)
    return target


def requests(max_new_tokens: int, count: int = 24) -> list[Request]:
    params = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(7,))
    prompts = [Prompt(i, "", tuple((11 * i + j * j) % VOCAB for j in range(10 + i))) for i in range(count // 4)]
    return [Request(p, k, 0, request_seed(0, "gpu", p.prompt_id, 0, k), params) for p in prompts for k in range(4)]


def tokens(engine: Engine, asked: Sequence[Request]) -> dict[int, list[int]]:
    return {response.request.seed: response.token_ids for response in engine.generate(asked)}


def test_noise_has_the_same_bits_as_on_the_cpu() -> None:
    seeds, positions = torch.randint(-(2**62), 2**62, (64,)), torch.arange(64)
    on_gpu = gumbel_noise(seeds.cuda(), positions.cuda(), 16_384).cpu()
    assert torch.equal(on_gpu, gumbel_noise(seeds, positions, 16_384))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-6), (torch.bfloat16, 0.1)])
def test_logits_agree_with_transformers(model: Any, dtype: torch.dtype, tolerance: float) -> None:
    contexts = [[(3 * i + j * j) % VOCAB for j in range(40)] for i in range(4)]
    ours = last_logits(decoder(model, dtype), contexts)
    with torch.inference_mode():
        theirs = model(torch.tensor(contexts, device="cuda")).logits[:, -1]
    assert (ours.float() - theirs.float()).abs().max() < tolerance


@pytest.mark.parametrize("drafter", [SuffixDrafter(), RandomDrafter(VOCAB)], ids=lambda d: d.name)
def test_speculation_changes_no_token_in_float64(model: Any, drafter: Any) -> None:
    target, asked, config = decoder(model, torch.float64), requests(80), EngineConfig(max_rows=16)
    plain = tokens(Engine(target, config), asked)
    engine = Engine(target, config, [drafter], Fixed(Strategy(drafter.name, 4)))
    assert tokens(engine, asked) == plain
    assert engine.stats.drafted > 0


@pytest.mark.parametrize("strategy", [PLAIN, Strategy("random", 4)], ids=str)
def test_captured_passes_change_no_token(model: Any, strategy: Strategy) -> None:
    """The cache grows and rows end, so that graphs are dropped and captured again."""
    target, asked = decoder(model, torch.float64), requests(300)
    found, captured = [], 0
    for captures in (False, True):
        target.cuda_graphs = captures
        layout = FeatureLayout((1, 2), 16)
        harvested: list[Harvest] = []
        engine = Engine(
            target, EngineConfig(), [RandomDrafter(VOCAB)], Fixed(strategy), layout=layout, on_harvest=harvested.append
        )
        engine.start(asked)
        done: dict[int, list[int]] = {}
        while engine.busy:
            done |= {response.request.seed: response.token_ids for response in engine.round()}
            graphs = engine.rollout.runner.graphs
            captured = max(
                captured, sum(made.replayed.graph is not None for made in graphs.passes.values()) if graphs else 0
            )
        found.append((done, [(item.start, item.tokens.tolist()) for item in harvested], harvested))
    assert captured > 1
    assert found[0][:2] == found[1][:2]
    for eager, replayed in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(replayed.features, eager.features, rtol=1e-6, atol=1e-6)


def test_a_small_cache_preempts_and_changes_nothing(model: Any) -> None:
    target, asked = decoder(model, torch.float64), requests(80)
    roomy = tokens(Engine(target, EngineConfig()), asked)
    tight = Engine(target, EngineConfig(), kv_tokens=300)
    assert tokens(tight, asked) == roomy
    assert tight.stats.preemptions > 0


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_learned_drafter_trains_and_drafts_and_changes_no_token(model: Any, kind: Kind) -> None:
    """Training data, a few steps, then drafts in float32. The tokens are those of plain decoding, except for
    rounding."""
    target, asked, config = decoder(model, torch.float32), requests(80), EngineConfig(max_rows=16)
    torch.manual_seed(0)
    layer = EagleLayer(eagle_options(target.options, kind, 64))
    items: list[Harvest] = []
    plain = tokens(Engine(target, config, layout=layer.options.layout, on_harvest=items.append), asked)
    made = DrafterTrainer(layer, target, DrafterTrainConfig(unroll=3, learning_rate=3e-3))
    overlaps = [overlap for _ in range(4) for overlap in made.epoch(items)]
    assert overlaps[-1][0] > overlaps[0][0]
    drafter = EagleDrafter(layer, target)
    engine = Engine(target, config, [drafter], Fixed(Strategy("eagle", 4)), layout=layer.options.layout)
    found = tokens(engine, asked)
    assert sum(found[seed] != plain[seed] for seed in plain) <= 1  # a tie of rounding, in 2,000 tokens
    assert engine.stats.drafter_failures == 0
    assert engine.stats.accepted > 0


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_captured_chains_equal_those_grown_by_token(model: Any, kind: Kind) -> None:
    """Tokens and cells of all drafts, over rounds in which rows end and others take their places."""
    target, asked = decoder(model, torch.float64), requests(120)
    torch.manual_seed(0)
    layer = EagleLayer(eagle_options(target.options, kind, 32))
    found: list[list[Any]] = []
    for whole in (False, True):
        drafter = EagleDrafter(layer, target)
        drafter.whole_chains = whole
        tuner = Fixed(Strategy("eagle", 4))
        engine = Engine(target, EngineConfig(max_rows=7), [drafter], tuner, layout=layer.options.layout)
        found.append([])
        draft = engine.draft

        def observed(now: Any, draft: Any = draft) -> Any:
            drafts = draft(now)
            found[-1].append(drafts)
            return drafts

        engine.draft = observed
        tokens(engine, asked)
        assert engine.stats.drafter_failures == 0
    assert found[0] == found[1]
    assert any(chain.replayed.graph for chain in drafter.chains.values())


def test_graphs_of_ended_rollouts_do_not_disturb_later_ones(model: Any) -> None:
    """Also if references keep them until the garbage collector runs."""
    target, asked = decoder(model, torch.float32), requests(40)
    engine = Engine(target, EngineConfig(), [RandomDrafter(VOCAB)], Fixed(Strategy("random", 3)))
    first = tokens(engine, asked)
    for _ in range(4):
        graphs = engine.rollout.runner.graphs
        assert graphs is not None
        graphs.passes[None] = graphs  # type: ignore[index, assignment]  # a cycle
        assert tokens(engine, asked) == first


def test_two_updates_end_with_the_same_bits(tmp_path: Path) -> None:
    """The gradient of attention is added up in a fixed order."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "num_attention_heads": 8, "head_dim": 32}
    qwen3(**sizes, intermediate_size=256, num_hidden_layers=4).save_pretrained(tmp_path)
    prompts = [tuple(range(40))] * 4 + [tuple(range(9))] * 4
    responses = [torch.randint(VOCAB, (200 + 31 * n,), generator=generator).tolist() for n in range(8)]
    batch = TrainBatch(prompts, responses, [1.0, -1.0] * 4, [[-3.0] * len(response) for response in responses])
    found = []
    for _ in range(3):
        config = TrainConfig(learning_rate=1e-2, micro_batch_tokens=8192)
        policy = Policy(tmp_path, torch.bfloat16, torch.device("cuda"), config, RolloutConfig())
        policy.update(batch, 0)
        found.append(sha256(policy.state_dict()))
    assert found[0] == found[1] == found[2]
