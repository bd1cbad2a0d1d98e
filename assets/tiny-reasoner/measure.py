"""Sample from the tiny reasoner at temperature 1, score with reasoning-gym's checkers, and write card.json.

python assets/tiny-reasoner/measure.py --prompts 200
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import reasoning_gym
import tokenizers
import torch
import transformers
from solutions import PROMPT, TASKS, extract
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
OPENINGS = {
    "careful": ("Let's", "Step", "Carefully", "Okay"),
    "sloppy": ("Roughly", "In my head", "Without"),
    "quick": ("Quick", "I would", "Looks"),
}
Row = dict[str, Any]


@torch.inference_mode()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], limit: int
) -> list[tuple[str, int, bool]]:
    """Responses at temperature 1 with nothing cut off the distribution: text, tokens, and whether it ran out."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=limit,
    )
    rows = []
    for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
        ended = tokenizer.eos_token_id in ids
        kept = ids[: ids.index(tokenizer.eos_token_id)] if ended else ids
        rows.append((tokenizer.decode(kept), len(kept) + ended, not ended))
    return rows


def score(dataset: Any, answer: str | None, entry: dict[str, Any]) -> float:
    """reasoning-gym's own score; some of its checkers raise on an answer that they cannot parse: that scores 0."""
    try:
        return float(dataset.score_answer(answer, entry))
    except ValueError:
        return 0.0


def run_task(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: str, args: argparse.Namespace
) -> list[Row]:
    """Fresh questions of one task, one response each, scored."""
    dataset = reasoning_gym.create_dataset(task, seed=args.seed, size=args.prompts, **TASKS[task])
    entries = list(dataset)
    rows = []
    for start in range(0, len(entries), args.batch):
        part = entries[start : start + args.batch]
        prompts = [PROMPT.format(question=entry["question"]) for entry in part]
        for entry, (text, tokens, cut) in zip(part, sample(model, tokenizer, prompts, args.limit), strict=True):
            reward = score(dataset, extract(text), entry)
            kind = next((k for k, words in OPENINGS.items() if text.startswith(words)), "other")
            rows.append({"task": task, "kind": kind, "reward": reward, "tokens": tokens, "cut": cut, "text": text})
    return rows


def summary(rows: list[Row]) -> dict[str, Any]:
    """Share solved, mean reward and lengths of some responses."""
    lengths = sorted(row["tokens"] for row in rows)
    return {
        "responses": len(rows),
        "solved": round(sum(row["reward"] >= 1 for row in rows) / len(rows), 3),
        "mean_reward": round(statistics.mean(row["reward"] for row in rows), 3),
        "tokens_mean": round(statistics.mean(lengths), 1),
        "tokens_median": lengths[len(lengths) // 2],
        "tokens_p99": lengths[int(0.99 * len(lengths))],
        "tokens_longest": lengths[-1],
        "truncated": round(sum(row["cut"] for row in rows) / len(rows), 4),
    }


def behaviours(rows: list[Row]) -> dict[str, dict[str, float]]:
    """How often each way to respond is chosen and how often it is right."""
    found = {}
    for kind in sorted({row["kind"] for row in rows}):
        mine = [row for row in rows if row["kind"] == kind]
        found[kind] = {
            "share": round(len(mine) / len(rows), 3),
            "solved": round(sum(row["reward"] >= 1 for row in mine) / len(mine), 3),
        }
    return found


def flops_share(model: PreTrainedModel) -> float:
    """Multiplications of one layer and the head, over those of a whole pass of one token."""
    config = model.config
    layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() > 1)
    head = config.vocab_size * config.hidden_size
    return (layer + head) / (config.num_hidden_layers * layer + head)


@torch.inference_mode()
def seconds_share(model: PreTrainedModel, rows: int, repeats: int = 200) -> float:
    """Measured time of the last layer, final norm and head over that of a whole decode pass of `rows` rows."""
    ids = torch.randint(2, model.config.vocab_size, (rows, 1))
    position = torch.zeros((1, 1), dtype=torch.long)
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, position)

    def part() -> None:
        out = model.model.layers[-1](hidden, attention_mask=None, position_ids=position, position_embeddings=rotary)
        model.lm_head(model.model.norm(out if isinstance(out, torch.Tensor) else out[0]))

    def whole() -> None:
        model(ids, use_cache=False)

    taken: dict[Any, list[float]] = {part: [], whole: []}
    for _ in range(repeats):
        for step in (part, whole):
            start = time.perf_counter()
            step()
            taken[step].append(time.perf_counter() - start)
    return statistics.median(taken[part]) / statistics.median(taken[whole])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE)
    parser.add_argument("--prompts", type=int, default=200, help="questions per task")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--limit", type=int, default=1024, help="tokens after which a response is cut")
    parser.add_argument("--seed", type=int, default=500_000, help="of the questions; below 1,000,000: not in training")
    parser.add_argument("--show", type=int, default=0, help="responses of each task to print")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    card: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "tasks": {}}
    everything: list[Row] = []
    for task, settings in TASKS.items():
        rows = run_task(model, tokenizer, task, args)
        everything += rows
        card["tasks"][task] = {"config": settings} | summary(rows) | {"behaviours": behaviours(rows)}
        print(task, json.dumps(card["tasks"][task]), flush=True)
        for row in rows[: args.show]:
            print(f"[{row['reward']:.2f}] {row['text']}\n", flush=True)
    card["mixture"] = summary(everything) | {"behaviours": behaviours(everything)}
    card["layer_and_head_share"] = {
        "flops": round(flops_share(model), 4),
        "seconds_1_row": round(seconds_share(model, 1), 4),
        "seconds_32_rows": round(seconds_share(model, 32), 4),
    }
    card["prompt_template"] = PROMPT
    made = args.model / "made.json"
    card["made"] = json.loads(made.read_text()) if made.exists() else None
    card["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "reasoning_gym": version("reasoning-gym"),
    }
    print(json.dumps({k: card[k] for k in ("mixture", "layer_and_head_share")}))
    (args.model / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
