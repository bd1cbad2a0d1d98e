"""Faults of tlt inside trainers of others, and of what is exported."""

from __future__ import annotations

from mutants.mutant import Mutant

TRL = "integrations/test_trl_contract.py"
FORMATS, EXPORT = "draft/test_formats.py", "test_export.py"

MUTANTS = [
    Mutant(
        "the engine trusts version counters of parameters, which fused AdamW leaves as they were",
        "integrations/trl_weights.py",
        "norms = [_whole(parameter.detach().norm()) for parameter in self.model.parameters()]",
        "norms = [torch.tensor(float(parameter._version)) for parameter in self.model.parameters()]",
        TRL,
    ),
    Mutant(
        "loading a drafter draws from the generator that shuffles the trainer's data",
        "integrations/trl.py",
        'with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):',
        "if device:",
        TRL,
    ),
    Mutant(
        "generations of one global step share their seeds",
        "integrations/trl.py",
        "count = count + 1 if before == step else 0",
        "count = 0",
        TRL,
    ),
    Mutant(
        "an evaluation makes the next generation of its step share its seeds",
        "integrations/trl.py",
        "self._last[domain] = step, count",
        "self._last = {domain: (step, count)}",
        TRL,
    ),
    Mutant(
        "rows of two processes share their seeds",
        "integrations/trl.py",
        "first, law = trainer.accelerator.process_index * len(prompts), law_of(trainer)",
        "first, law = 0, law_of(trainer)",
        TRL,
    ),
    Mutant(
        "only the tokenizer's end token ends a completion",
        "integrations/trl_terms.py",
        "stop_token_ids=tuple(trainer.eos_token_ids),",
        "stop_token_ids=(trainer.processing_class.eos_token_id,),",
        TRL,
    ),
    Mutant(
        "completions come in the order in which they finish",
        "integrations/trl.py",
        "in_order = [by_seed[request.seed] for request in requests]",
        "in_order = list(responses)",
        TRL,
    ),
    Mutant(
        "adapters are left out of what the engine takes",
        "rl/lora.py",
        "        weight = weight + layer.get_delta_weight(adapter)\n",
        "        weight = weight + 0 * layer.get_delta_weight(adapter)\n",
        TRL,
    ),
    Mutant(
        "dropout that somebody had switched off is on again",
        "integrations/trl_weights.py",
        "        for module in training:\n            module.training = True\n",
        "        model.train()\n",
        TRL,
    ),
    Mutant(
        "SGLang is told vLLM's numbers of the layers",
        "draft/formats.py",
        "nested = [tap - 1 for tap in options.taps]",
        "nested = list(options.taps)",
        FORMATS,
    ),
    Mutant(
        "a bias that SGLang makes up at random is left to it",
        "draft/formats.py",
        'if to == "sglang" else {})',
        'if to == "nobody" else {})',
        FORMATS,
    ),
    Mutant(
        "layers that collide are exported",
        "draft/formats.py",
        "list(options.taps) != sorted(set(options.taps)):",
        "list(options.taps) != sorted(options.taps):",
        FORMATS,
    ),
    Mutant(
        "an exported policy is served without a cache",
        "export.py",
        "    whole.config.use_cache = True\n",
        "",
        EXPORT,
    ),
]
