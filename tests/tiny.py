"""A random Qwen3 of two layers with a byte-level tokenizer, as an ordinary model folder, and a configuration for it.

Its weights are large for its size, so that its distribution depends on the context and its rewards vary within a
group."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tlt.config import Config, parse_config
from tlt.models.families import DecoderOptions
from tlt.types import TrainBatch

EOS = 256


def decoder_options(**changes: Any) -> DecoderOptions:
    """Return options of a decoder small enough to compute by hand. `changes` are those that a test needs."""
    plain: dict[str, Any] = {
        **{"vocab_size": 7, "hidden_size": 8, "intermediate_size": 8, "num_layers": 2, "max_positions": 4096},
        **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6, "tied": True},
        **dict.fromkeys(("qk_norm", "qkv_bias", "out_bias", "mlp_bias"), False),
        **{"inv_freq": torch.ones(2), "attention_scaling": 1.0},
    }
    return DecoderOptions(**plain | changes)


QUESTIONS = ("two and two", "a", "name a colour", "why?", "3 * 7 =", "go")


def qwen3(seed: int = 0, **changes: Any) -> Any:
    """Return transformers' own random model in float64, with these changes of its configuration."""
    torch.manual_seed(seed)
    plain = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 512},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
    }
    return Qwen3ForCausalLM(Qwen3Config(**plain | changes)).double().eval()


def save_weights(folder: Path, vocab_size: int = 257, layers: int = 2, seed: int = 0, scale: float = 0.5) -> Path:
    """Save config.json and model.safetensors in float64. The end token is the last one."""
    sizes = {"vocab_size": vocab_size, "num_hidden_layers": layers, "eos_token_id": vocab_size - 1}
    qwen3(seed, **sizes, tie_word_embeddings=True, initializer_range=scale).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> Path:
    """Save a tokenizer in which every byte is a token. The end token has number 256."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


def tiny_model(folder: Path, seed: int = 0) -> Path:
    return save_tokenizer(save_weights(folder, seed=seed))


def tiny_tree(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as a tree, with all its files in `folder`. `sections` override its values."""
    if not (folder / "model").is_dir():
        tiny_model(folder / "model")
        lines = [json.dumps({"question": q, "answer": q[0]}) for q in QUESTIONS]
        (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "model"), "dtype": "float64", "device": "cpu"},
        "data": {"path": str(folder / "prompts.jsonl")},
        "reward": {"name": "tiny_rewards:share_of_low_bytes"},
        "rollout": {"prompts_per_step": 2, "group_size": 3, "max_new_tokens": 16, "temperature": 0.6},
        "engine": {"max_rows": 4, "kv_memory_mb": 1},
        "speculation": {"drafter": "suffix"},
        "train": {"steps": 2, "learning_rate": 1e-3, "micro_batch_tokens": 64},
        "run": {"folder": str(folder / "run"), "seed": 1},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return tree


def tiny_config(folder: Path, **sections: dict[str, Any]) -> Config:
    return parse_config(tiny_tree(folder, **sections))


def write_recipe(path: Path, tree: dict[str, Any]) -> Path:
    """Write a tree of sections as a recipe in TOML."""
    lines = []
    for name, section in tree.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def random_batch(vocab_size: int, seed: int = 0, longest: int = 9, responses: int = 6) -> TrainBatch:
    """Return random sequences, each a group of its own, with advantages of both signs. Log-probs mean nothing."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(shortest: int) -> list[int]:
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        return torch.randint(vocab_size, (length,), generator=generator).tolist()

    prompts = [tuple(tokens(1)) for _ in range(responses)]
    answers = [tokens(1) for _ in range(responses)]
    advantages = torch.randn(responses, generator=generator, dtype=torch.float64).tolist()
    logprobs = [[-1.0] * len(answer) for answer in answers]
    return TrainBatch(prompts, answers, advantages, logprobs, rewards=[[0.0]] * responses)


class Crash(BaseException):
    """End of the process."""


def train(config: Config, resume: bool = False, display: Any = None, **options: Any) -> dict[str, Any]:
    """Run a training without output, unless there is a display. Return its summary."""
    from rich.console import Console

    from tlt.run.display import Display
    from tlt.run.train import train as run

    return run(config, resume, display or Display(Console(quiet=True)), **options)


def load_script(path: Path) -> Any:
    """Return a script outside the package as a module."""
    spec: Any = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_completions(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's completions, the oldest first."""
    files = [path for name in ("completions.old.jsonl", "completions.jsonl") if (path := folder / name).is_file()]
    return [json.loads(line) for path in files for line in path.read_bytes().split(b"\n")[:-1]]
