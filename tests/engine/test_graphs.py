"""Padded passes compute the same values, also if they are captured and replayed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_graph import fake_graphs
from random_drafter import RandomDrafter
from small import by_seed, decoder_of, finish
from tiny import decoder_options as tiny_options
from tiny import qwen3
from transformers import AutoConfig, AutoModelForCausalLM

from tlt.config import EngineConfig
from tlt.draft.features import FeatureLayout
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.engine import Engine
from tlt.engine.runner import GraphedPasses
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.models.device import to_device
from tlt.models.families import decoder_options
from tlt.models.generic import GenericDecoder
from tlt.types import Prompt, Request, SamplingParams

CPU = torch.device("cpu")
VOCAB = 60


@pytest.fixture(scope="module")
def target() -> Decoder:
    return decoder_of(qwen3(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3))


def requests(count: int) -> list[Request]:
    """Return requests of many lengths, so that the padded shapes change as rows end."""
    params = [SamplingParams(max_new_tokens=3 + 9 * n, stop_token_ids=(7,)) for n in range(count)]
    prompts = [Prompt(n, "", tuple((5 * n + j * j) % VOCAB for j in range(3 + 30 * n))) for n in range(count)]
    return [Request(prompts[n], 0, 0, 1000 + n, params[n]) for n in range(count)]


def started(target: Decoder, count: int) -> tuple[Engine, GraphedPasses]:
    """Return an engine with requests, and its captured passes."""
    engine = Engine(target, EngineConfig())
    engine.start(requests(count))
    graphs = engine.rollout.runner.graphs = GraphedPasses(engine.cache.store, target)
    return engine, graphs


def decoded(target: Decoder, strategy: Strategy, graphed: bool, asked: Sequence[Request]) -> tuple[Any, set[Any]]:
    """Return the tokens, the saved features, and the shapes of all passes."""
    harvested: list[Any] = []
    drafters = [] if strategy == PLAIN else [RandomDrafter(VOCAB)]
    layout = FeatureLayout((0, 2), 16)
    config, tuner = EngineConfig(max_rows=5), Fixed(strategy)
    engine = Engine(target, config, drafters, tuner, layout=layout, on_harvest=harvested.append)
    engine.start(asked)
    runner, shapes = engine.rollout.runner, set[Any]()
    if graphed:
        runner.graphs = GraphedPasses(engine.cache.store, target)
    tokens: dict[int, list[int]] = {}
    while engine.busy:
        tokens |= by_seed(engine.round())
        shapes |= set(runner.graphs.passes) if runner.graphs else set()
    return (tokens, [(item.start, item.tokens.tolist(), item.features) for item in harvested]), shapes


@pytest.mark.parametrize("strategy", [PLAIN, Strategy("random", 3), Strategy("random", 6)])
def test_padding_changes_no_token_and_no_feature(target: Decoder, strategy: Strategy) -> None:
    asked = requests(7)
    (tokens, harvest), _ = decoded(target, strategy, False, asked)
    with fake_graphs() as captured:
        (padded_tokens, padded_harvest), shapes = decoded(target, strategy, True, asked)
    assert len(captured) > 3
    assert padded_tokens == tokens
    assert len(harvest) == len(padded_harvest) > 7
    for (first, text, features), (padded_first, padded_text, padded_features) in zip(
        harvest, padded_harvest, strict=True
    ):
        assert (first, text) == (padded_first, padded_text)
        torch.testing.assert_close(padded_features, features, rtol=1e-9, atol=1e-9)
    assert {shape.rows for shape in shapes} == {1, 2, 4, 5}  # padded up to the slots, and fewer rows at the end
    assert {shape.new for shape in shapes} == {1, strategy.new}


def test_a_pass_is_captured_again_if_the_cache_tensors_change(target: Decoder) -> None:
    """A captured pass has addresses. They are not valid after a resize."""
    engine, graphs = started(target, 3)
    engine.round()
    before = dict(graphs.passes)
    assert before
    store = engine.cache.store
    store.resize(store.slots, store.tokens + 1)
    engine.round()
    assert not any(graphs.passes.get(shape) is old for shape, old in before.items())


def test_the_memory_of_a_released_cache_is_free(target: Decoder) -> None:
    """The update that follows a rollout needs it."""
    engine, _ = started(target, 2)
    finish(engine)
    memory = weakref.ref(engine.cache.store.memory[0])
    engine.release()
    assert memory() is None


def test_padding_rows_are_not_kept(target: Decoder) -> None:
    """A free slot may hold a prompt that a later row begins with."""
    engine = Engine(target, EngineConfig())
    engine.start(requests(4))
    engine.round()
    runner, store = engine.rollout.runner, engine.cache.store
    graphs = GraphedPasses(store, target)
    before = [layer.clone() for layer in store.layers]
    assert store.slots == 4
    graphs(torch.ones(3, 2, dtype=torch.long), [5, 40, 2], (), runner._forward)
    (shape,) = graphs.passes
    assert shape.rows == 4
    for old, new in zip(before, store.layers, strict=True):
        assert torch.equal(old[:, 3], new[:, 3])
        assert torch.equal(old[:, 2, :, 4:], new[:, 2, :, 4:])
        assert not torch.equal(old[:, 2, :, 2:4], new[:, 2, :, 2:4])


def test_the_inputs_of_a_pass_are_one_transfer(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transfer takes the host as long as the work of several rows."""
    sent: list[int] = []

    def count(device: torch.device, *columns: np.ndarray) -> Sequence[torch.Tensor]:
        sent.append(len(columns))
        return to_device(device, *columns)

    monkeypatch.setattr("tlt.engine.runner.to_device", count)
    engine, _ = started(target, 3)
    for rounds in range(1, 4):
        engine.round()
        assert sent == [1] * rounds


def test_graphs_are_freed_with_the_cache_whose_addresses_they_have(target: Decoder) -> None:
    """They are freed without the garbage collector, because a collection during a capture would make it fail."""
    engine, graphs = started(target, 3)
    engine.round()
    made = [weakref.ref(one.replayed) for one in graphs.passes.values()]
    assert made
    engine.release_requests([1000, 1001, 1002])
    engine.release()
    gc.collect()
    gc.disable()
    try:
        engine.start(requests(2))
        engine.round()
        assert all(one() is None for one in made)
    finally:
        gc.enable()


# -- rollouts and new weights ------------------------------------------------------------------------------------------


def model_of(seed: int, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = qwen3(seed, **sizes | changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which begin as ones and zeros
                parameter += torch.rand_like(parameter)
    return model


def with_graphs(model: Any) -> Decoder:
    """Return the decoder of a model, which a device would replay."""
    decoder = decoder_of(model)
    decoder.cuda_graphs = True
    return decoder


GENERIC: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "cohere": {"logit_scale": 0.5},
    "phi3": {},
    "glm": {"partial_rotary_factor": 0.5},
}


def generic_of(family: str, seed: int) -> tuple[GenericDecoder, Any]:
    """Return the generic decoder of a family, and transformers' random model with its weights."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **sizes | heads | tokens | {"initializer_range": 0.3} | GENERIC[family])
    model = AutoModelForCausalLM.from_config(config).double().eval()
    decoder = GenericDecoder(decoder_options(config), torch.float64, CPU, config)
    decoder.load(model.state_dict(), version=0)
    return decoder, model


FUSED: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
}


def decoder_and_model(name: str, seed: int) -> tuple[Decoder, Any]:
    if name in GENERIC:
        return generic_of(name, seed)
    model = model_of(seed, **FUSED[name])
    return decoder_of(model), model


@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_graphs_survive_rollouts_and_new_weights(name: str) -> None:
    """The second rollout begins with the cache that the first one needed at its end. From then on nothing is captured
    again, and the tokens are those of an engine without graphs. In a capture, an operation that waits for the device
    raises an error."""
    asked = [replace(one, sampling=SamplingParams(max_new_tokens=12)) for one in requests(4)]
    plain = [decoder_and_model(name, seed) for seed in (1, 2)]
    expected = [by_seed(Engine(decoder, EngineConfig()).generate(asked)) for decoder, _ in plain]
    assert expected[0] != expected[1]
    target, _ = decoder_and_model(name, 1)
    assert target.can_be_captured
    target.cuda_graphs = True
    with fake_graphs() as captured:
        engine = Engine(target, EngineConfig(), layout=FeatureLayout((0,), 16))
        for _ in range(2):
            assert by_seed(engine.generate(asked)) == expected[0]
        before = [one() for one in captured]
        assert before
        target.load(plain[1][1].state_dict(), version=1)
        assert by_seed(engine.generate(asked)) == expected[1]
        assert [one() for one in captured] == before


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}),
    ],
)
def test_what_the_host_chooses_is_not_captured(family: str, changes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, pad_token_id=None)
    for name, value in changes.items():
        setattr(config, name, value)
    assert not GenericDecoder(tiny_options(), torch.float64, CPU, config).can_be_captured


def test_a_head_that_is_tied_no_longer_is_in_no_graph() -> None:
    """The tensors of a tied head and of a separate one differ, so the graphs are captured again."""
    tied, apart = model_of(1, tie_word_embeddings=True), model_of(2)
    target, asked = with_graphs(tied), requests(2)
    with fake_graphs():
        engine = Engine(target, EngineConfig())
        for _ in range(2):
            by_seed(engine.generate(asked))
        target.load(apart.state_dict(), version=1)
        found = by_seed(engine.generate(asked))
    assert found == by_seed(Engine(decoder_of(apart), EngineConfig()).generate(asked))


def test_an_abandoned_rollout_leaves_no_values_in_the_memory_that_is_kept() -> None:
    """The mask of a shorter row does not hide values that are not finite."""
    target, asked = with_graphs(model_of(1)), requests(3)
    with fake_graphs():
        engine = Engine(target, EngineConfig())
        engine.start(asked)
        engine.round()
        for layer in engine.cache.store.layers:
            layer[:, 2].fill_(torch.nan)
        memory = engine.cache.store.memory[0]
        engine.start(asked[:1])
        assert engine.cache.store.memory[0] is memory
        assert memory.isfinite().all()
        engine.round()


def test_an_abandoned_rollout_leaves_no_rows_in_the_feature_window(target: Decoder) -> None:
    engine = Engine(target, EngineConfig(), layout=FeatureLayout((0,), 16))
    for count in (3, 2):
        engine.start(requests(count))
        engine.round()
        assert engine.runner.window
        assert engine.runner.window.live == len(engine.rows) == count


def test_the_limit_of_a_cache_counts_the_memory_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that captures graphs keeps its cache."""
    engine = Engine(with_graphs(model_of(1)), EngineConfig())
    monkeypatch.setattr("tlt.engine.memory.free_bytes", lambda device: 10**9 - engine.cache.bytes)
    bounds = []
    with fake_graphs():
        for count in (1, 2, 3):
            by_seed(engine.generate(requests(count)))
            bounds.append(engine.cache.bound_tokens)
    assert engine.cache.bytes
    assert bounds[1] == bounds[2]
