"""Faults of the vLLM part, and of what a drafter learns where the engine keeps no features. The tests need no vLLM."""

from __future__ import annotations

from mutants.mutant import Mutant

NOISE = "vllm_backend/test_shared_noise.py"
ENGINE = "vllm_backend/test_vllm_engine.py"
PLUGIN = "vllm_backend/test_plugin.py"
VERSIONS = "vllm_backend/test_versions.py"
TEACHER = "rl/test_teacher.py"

MUTANTS = [
    # -- the noise
    Mutant(
        "noise is that of the position before",
        "vllm/noise.py",
        "times = positions + 1 - self._starts[slots]",
        "times = positions - self._starts[slots]",
        NOISE,
    ),
    Mutant(
        "greedy requests get noise",
        "vllm/noise.py",
        "noisy = law.temperature > 0",
        "noisy = law.temperature >= 0",
        NOISE,
    ),
    Mutant(
        "requests of others get noise",
        "vllm/noise.py",
        "torch.where(ours[:, None], (log_p + noise).to(logits.dtype), logits)",
        "(log_p + noise).to(logits.dtype)",
        NOISE,
    ),
    Mutant(
        "log-probs that a request brought are told once more",
        "vllm/noise.py",
        "drawn[first:end].tolist()",
        "drawn[: end - first].tolist()",
        NOISE,
    ),
    Mutant(
        "a draft's rows all have the slot of the batch's first request",
        "vllm/runner_v1.py",
        "return slots.repeat_interleave(counts), ",
        "return slots[:1].expand(int(counts.sum())), ",
        NOISE,
    ),
    Mutant(
        "a request that vLLM samples itself is let through",
        "vllm/noise.py",
        "if draw and params.temperature != 0:",
        "if draw and params.temperature < 0:",
        f"{NOISE} {PLUGIN}",
    ),
    Mutant(
        "what is drawn amid a prompt lands at the end of the record",
        "vllm/noise.py",
        "(times >= 0) & (times < last)",
        "times < last",
        NOISE,
    ),
    Mutant(
        "a pass counts as many as its tokens",
        "vllm/noise.py",
        "self._drafts[slot][1] += 1",
        "self._drafts[slot][1] += tokens",
        NOISE,
    ),
    Mutant("no slot for a request that was preempted", "vllm/runner_v1.py", "_SLOTS = 2 ", "_SLOTS = 1 ", NOISE),
    Mutant(
        "no room for log-probs behind a prompt that brings a response, in V1",
        "vllm/runner_v1.py",
        "len(request.prompt_token_ids) - draw.prompt_tokens if draw else 0",
        "0",
        NOISE,
    ),
    Mutant(
        "no room for log-probs behind a prompt that brings a response, in V2",
        "vllm/processor.py",
        "int(req_states.prompt_len.np[slot]) - draw.prompt_tokens if draw else 0",
        "0",
        NOISE,
    ),
    # -- the engine
    Mutant(
        "a request goes on elsewhere without the log-probs of its tokens",
        "vllm/engine.py",
        "        self._take_logprobs(names)\n        return left",
        "        return left",
        ENGINE,
    ),
    Mutant(
        "tokens behind a stop string stay",
        "vllm/engine.py",
        "                finished[name] = reason\n                break",
        "                finished[name] = reason",
        ENGINE,
    ),
    Mutant(
        "a prompt's keys and values of other weights stay in the cache",
        "vllm/target.py",
        "        self.llm.reset_prefix_cache(reset_running_requests=True)",
        "        pass",
        ENGINE,
    ),
    Mutant(
        "a live row keeps the prefixes of other weights in the cache",
        "vllm/target.py",
        "reset_prefix_cache(reset_running_requests=True)",
        "reset_prefix_cache()",
        ENGINE,
    ),
    Mutant(
        "top-p alone cuts nothing",
        "vllm/noise.py",
        "restricted=any(draw.top_k or draw.top_p < 1 for draw in draws)",
        "restricted=any(draw.top_k for draw in draws)",
        NOISE,
    ),
    Mutant(
        "two requests of one key, and one loses its noise",
        "vllm/noise.py",
        "self.draws[other], self._drafts[other] = replace(self.draws[other], key=None), [0, 0]",
        "self.leave(other)",
        NOISE,
    ),
    Mutant(
        "a request of ours goes to a vLLM that adds no noise",
        "vllm/plugin.py",
        "            if not _draws(processor.vllm_config):",
        "            if False:",
        PLUGIN,
    ),
    Mutant(
        "a pass has no room for drafts",
        "vllm/settings.py",
        "engine.max_rows * (1 + drafted)",
        "engine.max_rows",
        ENGINE,
    ),
    Mutant(
        "rows of coming steps keep their slots while others wait",
        "vllm/engine.py",
        "        if self.waiting:\n            self._put_off_ahead()\n",
        "",
        ENGINE,
    ),
    Mutant("a version is tested that begins alike", "vllm/versions.py", 'f"{tested}."', "tested", VERSIONS),
    # -- look-ahead
    Mutant(
        "the token is drafted that comes without a draft",
        "vllm/look_ahead.py",
        "row.last - end - 1)",
        "row.last - end)",
        ENGINE,
    ),
    Mutant(
        "the pointer misses a token of each pass",
        "vllm/look_ahead.py",
        "tokens[self.end : end]",
        "tokens[self.end + 1 : end]",
        ENGINE,
    ),
    Mutant(
        "nothing that is known travels with a request",
        "vllm/engine.py",
        "if self.target.looks_ahead else ()\n            name",
        "if not self.target.looks_ahead else ()\n            name",
        ENGINE,
    ),
    # -- the learned drafter
    Mutant(
        "a drafter guesses with the noise of the token that it was given",
        "vllm/runner_v1.py",
        "self.drafter.positions[found[1]] + 1",
        "self.drafter.positions[found[1]]",
        ENGINE,
    ),
    Mutant(
        "all guesses of a drafter have the noise of the first one",
        "vllm/runner_v1.py",
        "        self._positions = positions + 1\n",
        "",
        ENGINE,
    ),
    Mutant(
        "what is published never reaches vLLM",
        "vllm/engine.py",
        "        self.target.load_drafter(layer)\n",
        "        assert layer is not None\n",
        ENGINE,
    ),
    Mutant(
        "what is published is in use by the trainer alone",
        "cluster/worker.py",
        "self.engine.draft_with(trainer.publish(common.tensors, agreement))",
        "trainer.publish(common.tensors, agreement)",
        ENGINE,
    ),
    Mutant(
        "a drafter learns from responses without their prompts",
        "vllm/engine.py",
        "self.on_harvest(Transcript(prompt.prompt_id, len(prompt.token_ids), row.context))",
        "self.on_harvest(Transcript(prompt.prompt_id, len(prompt.token_ids), tuple(row.tokens)))",
        ENGINE,
    ),
    Mutant(
        "idle workers train a drafter that nobody uses",
        "build.py",
        '(speculation.drafter != "eagle" or config.train.shard)',
        "config.train.shard",
        ENGINE,
    ),
    Mutant(
        "an entry is followed by its own token",
        "draft/recompute.py",
        "transcript.prompt_length, tokens[1:], features",
        "transcript.prompt_length, tokens[:-1], features",
        TEACHER,
    ),
    Mutant(
        "the last window of a response is left out",
        "draft/recompute.py",
        "            starts.append(max(0, length - size))",
        "            pass",
        TEACHER,
    ),
    Mutant(
        "the head of a version moves with the policy",
        "rl/teacher.py",
        "weight.to(self.dtype, copy=True)",
        "weight",
        TEACHER,
    ),
    Mutant("a pass is not broken off", "rl/teacher.py", "            if stop():\n", "            if False:\n", TEACHER),
    Mutant(
        "responses of all steps wait to be learned from",
        "draft/spot.py",
        "            self.recompute.next_step()\n",
        "            pass\n",
        TEACHER,
    ),
    Mutant(
        "held-back prompts are trained on where harvest is computed anew",
        "draft/recompute.py",
        "if is_held_back(t.prompt_id) == held_back",
        "if held_back in (True, False)",
        TEACHER,
    ),
]
