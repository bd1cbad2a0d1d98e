"""The engine's decoder and the policy are one model: they read the same files, and use the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import qwen3, random_batch, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from tlt.cluster.run_worker import RunWorker
from tlt.config import Config, RolloutConfig, TrainConfig
from tlt.data.tokenizer import load_tokenizer
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options, read_config
from tlt.models.model_folder import ModelError
from tlt.models.weights import read_safetensors
from tlt.rl.parity import check_parity, take_weights
from tlt.rl.policy import Policy
from tlt.run.opening import make_parts
from tlt.verify.oracle import last_logits

CPU = torch.device("cpu")
VOCAB = 31
TEXT = torch.tensor([5, 1, 30, 2, 2, 17])
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def own_head(folder: Path) -> Path:
    """Return a model whose config.json ties the head, although the file has a head of its own."""
    qwen3(vocab_size=VOCAB, tie_word_embeddings=True, initializer_range=0.3).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    other = torch.randn(VOCAB, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    save_file(tensors | {HEAD: other}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_policy(folder: Path, dtype: torch.dtype = torch.float64) -> Policy:
    config = TrainConfig(learning_rate=1e-2, micro_batch_tokens=24)
    return Policy(folder, dtype, CPU, config, RolloutConfig(max_new_tokens=12))


def make_decoder(folder: Path, dtype: torch.dtype = torch.float64) -> Decoder:
    decoder = Decoder(decoder_options(read_config(folder)), dtype, CPU)
    decoder.load(read_safetensors(folder), version=0)
    return decoder


def transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(tokens[None]).logits[0]


def assert_distribution(decoder: Decoder, expected: Tensor) -> None:
    found = last_logits(decoder, [TEXT.tolist()])[0]
    torch.testing.assert_close(found.softmax(-1), expected[-1].softmax(-1), atol=1e-5, rtol=0)


def test_a_head_that_config_json_ties_is_kept_from_file_to_checkpoint(tmp_path: Path) -> None:
    folder = own_head(tmp_path / "model")
    policy, decoder = make_policy(folder), make_decoder(folder)
    before = transformers_logits(folder, TEXT)
    assert_distribution(decoder, before)
    policy.update(random_batch(VOCAB), 0)
    policy.save(tmp_path)
    decoder.load(policy.state_dict(), version=1)
    after = transformers_logits(tmp_path / "policy", TEXT)
    assert float((after - before)[-1].abs().sum()) > 0.01
    assert_distribution(decoder, after)
    assert_distribution(make_decoder(tmp_path / "policy"), after)
    assert make_policy(tmp_path / "policy").sha256() == policy.sha256()


def sound(folder: Path) -> Path:
    qwen3(vocab_size=VOCAB, initializer_range=0.3).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equal_models_pass_and_another_head_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = own_head(tmp_path)
    policy, decoder = make_policy(folder, dtype), make_decoder(folder, dtype)
    check_parity(decoder, policy)
    policy.update(random_batch(VOCAB), 0)
    take_weights(decoder, policy, version=1)
    state = policy.state_dict()
    torch.testing.assert_close(decoder.embedding, state[EMBEDDING].to(dtype), rtol=0, atol=0)
    decoder.load({**state, HEAD: state[EMBEDDING]}, version=7)
    with pytest.raises(ModelError, match=rf"version 7: .* in {str(dtype)[6:]} .*check that config\.json fits"):
        check_parity(decoder, policy)


class Recurrent(Decoder):
    """Planted bug: the model has state other than keys and values, which wrong draft tokens change. It is the position,
    which counts all tokens so far."""

    count = 0

    def forward(self, tokens: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        counted = self.count + torch.arange(tokens.shape[1])[None]
        self.count += tokens.shape[1]
        return super().forward(tokens, counted, *rest)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Decoder, lambda options: {"inv_freq": options.inv_freq**1.1}),
        (Decoder, lambda options: {"attention_scaling": 1.1}),
        (Decoder, lambda options: {"rms_norm_eps": 1e-2}),
        (Recurrent, lambda options: {}),
    ],
    ids=["the rope's base", "the rope's scaling", "the norms", "state of wrong drafts"],
)
def test_a_decoder_that_computes_differently_is_refused(tmp_path: Path, kind: Any, change: Any) -> None:
    folder = sound(tmp_path)
    options = decoder_options(read_config(folder))
    decoder = kind(replace(options, **change(options)), torch.float32, CPU)
    with pytest.raises(ModelError, match="not one model"):
        take_weights(decoder, make_policy(folder, torch.float32), version=1)


@pytest.mark.parametrize(("whose", "value"), [("policy", float("nan")), ("engine", float("inf"))])
def test_logits_that_are_not_finite_are_named(tmp_path: Path, whose: str, value: float) -> None:
    folder = sound(tmp_path)
    policy, decoder = make_policy(folder), make_decoder(folder)
    weights = policy.state_dict()["model.norm.weight"] if whose == "policy" else decoder.embedding
    weights.view(-1)[0] = value
    with pytest.raises(ModelError, match=f"the {whose}'s logits are not finite at version 0"):
        check_parity(decoder, policy)


@pytest.mark.parametrize("positions", [3, 5])
def test_a_model_with_few_positions_is_compared_within_them(tmp_path: Path, positions: int) -> None:
    qwen3(vocab_size=3, max_position_embeddings=positions).save_pretrained(tmp_path)
    check_parity(make_decoder(tmp_path), make_policy(tmp_path))


def test_a_comparison_changes_no_state(tmp_path: Path) -> None:
    folder = sound(tmp_path)
    policy, decoder = make_policy(folder), make_decoder(folder)
    random, digest = torch.get_rng_state(), policy.sha256()
    modes = [module.training for module in policy.model.modules()]
    check_parity(decoder, policy)
    assert torch.equal(torch.get_rng_state(), random)
    assert policy.sha256() == digest
    assert [module.training for module in policy.model.modules()] == modes
    assert not policy.logits(torch.arange(3)).requires_grad
    assert all(parameter.grad is None and parameter.requires_grad for parameter in policy.model.parameters())


# -- where it is asked -------------------------------------------------------------------------------------------------

REAL_LOAD = Decoder.load


def as_if_tied(self: Decoder, state: Mapping[str, Tensor], version: int) -> None:
    """Planted bug of the decoder, which has an effect only if the head is not the embedding."""
    REAL_LOAD(self, {**state, HEAD: state[EMBEDDING]}, version)


def untied_config(home: Path) -> Config:
    config = tiny_config(home)
    sizes = {"vocab_size": 257, "eos_token_id": 256, "initializer_range": 0.5}
    qwen3(**sizes).save_pretrained(config.model.path)
    return config


def local(config: Config) -> Callable[[], None]:
    parts, policy = make_parts(config, load_tokenizer(config.model.path))
    return lambda: parts.rollout.sync(policy, 1)


def worker_sync(config: Config) -> Callable[[], None]:
    worker = RunWorker.of_run(config, 0, config.model.path)
    return lambda: worker.sync(1)


def worker_state(config: Config) -> Callable[[], None]:
    worker = RunWorker.of_run(config, 0, config.model.path)
    state = worker.state()._replace(version=1)
    return lambda: worker.take_state(state)


@pytest.mark.parametrize("start", [local, worker_sync, worker_state])
def test_a_run_with_two_models_ends_at_its_start_and_at_every_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[Config], Callable[[], None]]
) -> None:
    config = untied_config(tmp_path)
    sync = start(config)
    sync()
    monkeypatch.setattr(Decoder, "load", as_if_tied)
    with pytest.raises(ModelError, match=r"not one model at version 1.*lower train\.learning_rate"):
        sync()
    with pytest.raises(ModelError, match="not one model at version 0"):
        start(config)


def test_a_wrong_rope_that_rounding_hides_is_refused_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, made = tiny_config(tmp_path, model={"dtype": "bfloat16"}), list[Decoder]()

    def with_another_base(config: Config, device: None) -> Decoder:
        sound = decoder_options(read_config(config.model.path))
        made.append(Decoder(replace(sound, inv_freq=sound.inv_freq**1.1), torch.bfloat16, CPU))
        return made[0]

    RunWorker.of_run(config, 0, config.model.path)
    monkeypatch.setattr("tlt.cluster.run_worker.open_target", with_another_base)
    with pytest.raises(ModelError, match=r"not one model .* rounding in float32 explains at most 0\.001"):
        RunWorker.of_run(config, 0, config.model.path)
    assert made[0].version == 0, "in bfloat16 it passed"
    monkeypatch.setattr("tlt.rl.parity.free_bytes", lambda device: 0)
    RunWorker.of_run(config, 0, config.model.path)
    assert "compared in bfloat16 only" in caplog.text
