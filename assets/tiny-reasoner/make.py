"""Make the tiny reasoner: a small Qwen3 model that answers by writing its reasoning out.

    python assets/tiny-reasoner/make.py

Trains a tokenizer and a model on generated worked solutions and saves an ordinary Hugging Face folder, by default
next to this file. Everything follows from the seed, on the same machine and versions to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from optimizer import Optimizer
from solutions import examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training import Example, check, lay_out, response_loss
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
PAD, END = "<|pad|>", "<|end|>"
VOCABULARY = 768
STEP_EXAMPLES = 64
CHUNK_STEPS = 50
# Share of the steps that are plain drill.
DRILL = 0.7


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with every digit a token of its own; phrases, not only words, may merge."""
    tokenizer = Tokenizer(models.BPE())
    # No split at spaces: the fixed wording of the questions shrinks to a few tokens, so prompts cost little.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Prompt and response are tokenized apart, in training as in use, so no token may straddle them.
    texts = (text for pair in examples(seed, 8000) for text in pair)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Deep and thin, so that one layer with the head is a small share of a pass."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.04,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=1024,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write beside the folder, then move file by file, so that a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tiny-reasoner-") as name:
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        # The class name that every version of transformers knows.
        config = Path(name) / "tokenizer_config.json"
        fields = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        config.write_text(json.dumps(fields, indent=2) + "\n")
        for path in Path(name).iterdir():
            path.chmod(0o644)
            os.replace(path, folder / path.name)


def stream(tokenizer: PreTrainedTokenizerFast, seed: int, drill_steps: int) -> Iterator[list[Example]]:
    """Endless batches of tokenized examples, generated chunk by chunk: first plain drill, then the mixture.

    Guesses and turns of phrase cannot be predicted: as long as the steps are not learned, they only add noise.
    """
    end = [tokenizer.eos_token_id]
    chunk = 0
    while True:
        plain = chunk * CHUNK_STEPS < drill_steps
        chunk += 1
        pairs = list(examples(seed * 500 + chunk, STEP_EXAMPLES * CHUNK_STEPS, plain))
        prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
        responses = tokenizer([response for _, response in pairs])["input_ids"]
        ready = [(p, r + end) for p, r in zip(prompts, responses, strict=True)]
        Random(chunk).shuffle(ready)
        for start in range(0, len(ready), STEP_EXAMPLES):
            yield ready[start : start + STEP_EXAMPLES]


def schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: a short warm-up, level for 40 %, then straight down to nothing."""
    return min(1.0, (step + 1) / min(50, steps), (steps - step) / (0.6 * steps))


def train(args: argparse.Namespace) -> dict[str, float]:
    """Tokenizer, model, training, saves on the way. Returns what the card should say about it."""
    began = time.time()
    tokenizer = train_tokenizer(args.seed)
    model = new_model(tokenizer, args.seed)
    optimizer = Optimizer(model, args.muon_rate, args.adam_rate)
    batches = stream(tokenizer, args.seed, int(DRILL * args.steps))
    tokens, losses = 0, []
    difference = check(model, next(stream(tokenizer, args.seed, 0)), tokenizer.pad_token_id)
    assert difference < 1e-3, f"the training pass is off by {difference} from transformers' own"
    for step in range(args.steps):
        batch = next(batches)
        loss = response_loss(model, lay_out(batch, tokenizer.pad_token_id))
        loss.backward()
        optimizer.step(schedule(step, args.steps))
        tokens += sum(len(prompt) + len(response) for prompt, response in batch)
        losses.append(loss.item())
        if step % 25 == 24 or step + 1 == args.steps:
            mean, seconds = sum(losses[-25:]) / len(losses[-25:]), time.time() - began
            print(f"step {step + 1} loss {mean:.4f} tokens {tokens} seconds {seconds:.0f}", flush=True)
        if step + 1 == args.steps or (args.save_every and step % args.save_every == args.save_every - 1):
            save(model, tokenizer, args.out)
    return {"steps": args.steps, "tokens": tokens, "loss": round(losses[-1], 4), "seconds": round(time.time() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write (default: this one)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--muon-rate", type=float, default=0.02, help="peak learning rate of the layers' matrices")
    parser.add_argument("--adam-rate", type=float, default=4e-3, help="peak learning rate of embedding and norms")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100, help="steps between saves on the way (0: none)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    made = train(args)
    (args.out / "made.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
