"""Rounds on a device that this machine lacks: tensors of two devices are never mixed, and the host waits no more than
necessary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_gpu import HostSuffix, device, fake_gpu
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import LlamaConfig, LlamaForCausalLM

from tlt.config import EngineConfig
from tlt.draft.drafter import Drafter
from tlt.draft.eagle import EagleLayer, Kind, eagle_options
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options
from tlt.types import Prompt, Request, SamplingParams

SHAPE = {"vocab_size": 50, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
STRATEGIES = {
    "plain": PLAIN,
    "suffix": Strategy("suffix", 2),
    "eagle": Strategy("eagle", 3),
}
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, stop_token_ids=(7,)),
)


def decoder() -> Decoder:
    """Return a decoder of transformers' Llama, with tensors of the right shapes only."""
    config = LlamaConfig(**SHAPE, tie_word_embeddings=True)
    with unset_fake_temporarily():
        with torch.device("meta"):
            shapes = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
        options = decoder_options(config)
    made = Decoder(replace(options, inv_freq=torch.ones(len(options.inv_freq))), torch.float32, device())
    weights = {name: torch.empty(shape, device=device()) for name, shape in shapes.items()}
    made.load({name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}, version=0)
    return made


def engine_for(target: Decoder, strategy: Strategy, kind: Kind) -> Engine:
    layer = EagleLayer(eagle_options(target.options, kind, 16))
    learned, suffix = EagleDrafter(layer, target), HostSuffix()
    drafters: list[Drafter] = [learned, suffix]
    return Engine(
        target, EngineConfig(max_rows=8, kv_memory_mb=64), drafters, Fixed(strategy), layout=layer.options.layout
    )


def requests(count: int, tokens: int) -> list[Request]:
    """Return groups of two. The suffix drafter finds its matches in the prompts."""
    samplings = [replace(sampling, max_new_tokens=tokens) for sampling in SAMPLINGS]
    prompts = [Prompt(i, "", (1, 2, 3, 1, 1, 1, 1, 1, 1)[: 5 + i]) for i in range((count + 1) // 2)]
    return [Request(prompts[n // 2], n % 2, 0, n, samplings[n % len(samplings)]) for n in range(count)]


@pytest.mark.parametrize("kind", [pytest.param("eagle1", marks=pytest.mark.slow), "eagle3"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_round_mixes_no_devices_and_waits_once_per_level_and_once_for_the_target(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: Kind
) -> None:
    """Siblings are admitted, rows leave and return, the cache grows, and the drafter is swapped."""
    strategy = STRATEGIES[name]
    tokens = 5 * (strategy.depth + 1)  # five rounds, if every draft token is accepted
    with fake_gpu(monkeypatch) as trips:
        engine = engine_for(decoder(), strategy, kind)
        engine.start(requests(6, tokens))
        engine.round()  # a prefill, and the round
        for _ in range(3):
            before = trips.count
            engine.round()
            assert trips.count - before == 1 + strategy.depth
        left = engine.release_requests([1, 2])
        engine.submit(requests(8, tokens)[6:], left)
        engine.round()
        layer = EagleLayer(eagle_options(engine.target.options, kind, 16))
        engine.swap(EagleDrafter(layer, engine.target))
        while engine.busy:
            engine.round()
        assert engine.stats.drafter_failures == 0
        assert (engine.stats.drafted > 0) == (strategy != PLAIN)


def test_a_hidden_copy_to_the_host_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch):
        there = torch.ones(3, device=device())
        for copy in (there.tolist, there[0].item, there.any().__bool__, there.cpu().numpy):
            with pytest.raises((RuntimeError, TypeError)):
                copy()
        with pytest.raises(Exception, match="device"):
            there + torch.ones(3)
