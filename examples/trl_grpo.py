"""GRPO by TRL, decoded by tlt: python examples/trl_grpo.py FOLDER [STEPS]

Without the argument `rollout_func`, and its import, it is a TRL script as any other.
"""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tlt.integrations.trl import Rollout

if not sys.argv[1:]:
    sys.exit(__doc__)
folder, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20
numbers = [(a, b) for a in range(2, 30) for b in range(2, 30)]
questions = [{"prompt": f"What is {a} + {b}?\n", "answer": str(a + b)} for a, b in numbers]


def is_right(completions, answer, **columns):
    return [float(said.strip().endswith(right)) for said, right in zip(completions, answer, strict=True)]


trainer = GRPOTrainer(
    model=folder,
    reward_funcs=is_right,
    args=GRPOConfig(
        output_dir="runs/trl",
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=128,
        max_steps=steps,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=torch.cuda.is_available(),
    ),
    train_dataset=Dataset.from_list(questions),
    rollout_func=Rollout(),
)
trainer.train()
