"""The engine's decoder and the policy are one model: they read the same files, and take the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import qwen3, random_batch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tlt.config import RolloutConfig, TrainConfig
from tlt.fidelity.oracle import last_logits
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options, read_config
from tlt.models.weights import read_safetensors
from tlt.rl.policy import Policy

CPU = torch.device("cpu")
VOCAB = 31
TEXT = [5, 1, 30, 2, 2, 17]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def own_head(folder: Path) -> Path:
    """config.json says that the head is tied, and the file holds another one."""
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


def transformers_law(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([TEXT])).logits[0, -1].softmax(-1)


def assert_law(decoder: Decoder, expected: Tensor) -> None:
    torch.testing.assert_close(last_logits(decoder, [TEXT])[0].softmax(-1), expected, atol=1e-5, rtol=0)


def test_a_head_that_config_json_does_not_know_of_is_kept_from_file_to_checkpoint(tmp_path: Path) -> None:
    """By the policy, the engine, and a checkpoint, before and after an update."""
    folder = own_head(tmp_path / "model")
    policy, decoder = make_policy(folder), make_decoder(folder)
    before = transformers_law(folder)
    assert_law(decoder, before)
    policy.update(random_batch(VOCAB), 0)
    policy.save(tmp_path)
    decoder.load(policy.state_dict(), version=1)
    after = transformers_law(tmp_path / "policy")
    assert float((after - before).abs().sum()) > 0.01
    assert_law(decoder, after)
    assert_law(make_decoder(tmp_path / "policy"), after)
    assert make_policy(tmp_path / "policy").sha256() == policy.sha256()
