"""Faults of engine/ and attention/: most would change tokens in silence, some what drafters and their training get.

The ledger (TLT_AUDIT, on in tests) may be what notices a fault, as every test runs under it. But the files named here
hold the tokens against an independent reference too, so that these die with TLT_AUDIT=0 as well.
"""

from __future__ import annotations

from mutants.mutant import Mutant

ROWS = "engine/test_rows.py"
ENGINE = "engine/test_engine.py"
PLANTED = "engine/test_planted_bugs.py"
NOISE = "engine/test_noise.py"
SLOTS = "attention/test_slots.py"
FEATURES = "draft/test_features.py"

MUTANTS = [
    # -- what a slot holds
    Mutant(
        "slots that were given up for a row that outgrew the capacity are still said to hold their prompts",
        "engine/kv_cache.py",
        "        self._held = held + [()] * (slots - len(held))\n",
        "        self._held = [*held, *self._held[slots:]] + [()] * (slots - len(self._held))\n",
        ROWS,
    ),
    Mutant(
        "a slot that became shorter than its prompt is still said to hold it",
        "engine/kv_cache.py",
        "prompt if len(prompt) <= tokens else () for prompt in self._held[:slots]",
        "prompt for prompt in self._held[:slots]",
        ROWS,
    ),
    Mutant(
        "a new rollout trusts what the slots held in the one before",
        "engine/kv_cache.py",
        "        self._rows = []\n        self.release()\n",
        "        self._rows = []\n",
        ROWS,
    ),
    Mutant(
        "a slot that was wiped is still said to hold its prompt",
        "engine/kv_cache.py",
        "        if start == 0:\n            self._held[slot] = ()\n",
        "",
        ROWS,
    ),
    Mutant(
        "a slot is said to hold the prompt of the row that left, not of the one that moved there",
        "engine/kv_cache.py",
        "self._rows[place], self._held[place] = mover, self._held[last]",
        "self._rows[place] = mover",
        ROWS,
    ),
    Mutant(
        "a row that moves leaves its last key and value behind",
        "engine/kv_cache.py",
        "self.copy(last, place, mover.kv_length)",
        "self.copy(last, place, mover.kv_length - 1)",
        ROWS,
    ),
    Mutant(
        "the slot of a row that was not finite is not wiped",
        "engine/kv_cache.py",
        "        if not row.finite:\n            self.wipe(place, 0)\n",
        "",
        ROWS,
    ),
    Mutant(
        "a row that was not finite moves and leaves its slot as it was",
        "engine/kv_cache.py",
        "            if not mover.finite:  # what it leaves behind would wait there for the next row\n"
        "                self.wipe(last, 0)\n",
        "",
        ROWS,
    ),
    # -- where new rows begin
    Mutant(
        "a row that was begun takes a free slot with its prompt alone",
        "engine/placing.py",
        "not row.tokens and row.request.prompt.token_ids == held",
        "row.request.prompt.token_ids == held",
        ROWS,
    ),
    Mutant(
        "a row that was begun copies its sibling's prompt alone",
        "engine/placing.py",
        "if prompt in known and not row.tokens else fresh",
        "if prompt in known else fresh",
        ROWS,
    ),
    Mutant(
        "siblings that follow one with a kept prompt are kept too, whatever their places hold",
        "engine/placing.py",
        "cache.held(len(live) + len(kept))",
        "cache.held(len(live))",
        ROWS,
    ),
    Mutant(
        "a copy is taken from the last row with that prompt, which is itself",
        "engine/placing.py",
        "for place, row in reversed(list(enumerate(rows)))}",
        "for place, row in enumerate(rows)}",
        ENGINE,
    ),
    Mutant(
        "rows that come back start from their prompt again",
        "engine/placing.py",
        "[row.context for row in fresh]",
        "[row.request.prompt.token_ids for row in fresh]",
        ENGINE,
    ),
    Mutant(
        "a draft that led to what is not finite leaves it in the slots",
        "engine/engine.py",
        "            for place in spoiled:\n                self.cache.wipe(place, now.lengths[place])\n",
        "",
        ROWS,
    ),
    # -- commit
    Mutant(
        "an accepted branch of a lone row stays where it is",
        "engine/engine.py",
        "        if moves:\n",
        "        if moves and len(now.rows) > 1:\n",
        PLANTED,
    ),
    Mutant(
        "an accepted branch is moved the wrong way",
        "engine/engine.py",
        "(place, start + node, start + i) for i, node in enumerate(path) if",
        "(place, start + i, start + node) for i, node in enumerate(path) if",
        PLANTED,
    ),
    Mutant(
        "responses end where the first row's does",
        "engine/stops.py",
        "        params = row.request.sampling\n        if row.tokens[-1]",
        "        params = vars(self).setdefault('params', row.request.sampling)\n        if row.tokens[-1]",
        ENGINE,
    ),
    Mutant(
        "a response may be longer by one",
        "engine/stops.py",
        "if len(row.tokens) >= params.max_new_tokens else",
        "if len(row.tokens) > params.max_new_tokens else",
        ENGINE,
    ),
    Mutant(
        "features stand at the number of their node",
        "engine/engine.py",
        "entries += [(place, node, start + i, sampled",
        "entries += [(place, node, start + node, sampled",
        FEATURES,
    ),
    Mutant(
        "the token of an entry is its own, not the one that follows",
        "engine/engine.py",
        "start + i, sampled.tokens[place][node]) for",
        "start + i, tree.tokens[node]) for",
        FEATURES,
    ),
    Mutant(
        "features are kept of what was accepted behind a stop",
        "engine/engine.py",
        "enumerate(path[:taken])]",
        "enumerate(path)]",
        FEATURES,
    ),
    # -- rows and laws
    Mutant(
        "the table closes up where a row left, its stores do not",
        "engine/rows.py",
        "        self._rows[place] = self._rows[last]\n        self._rows.pop()\n",
        "        del self._rows[place]\n",
        ROWS,
    ),
    Mutant(
        "laws close up where a row left",
        "engine/laws.py",
        "        self._params[place] = self._params[last]\n        self._params.pop()\n",
        "        del self._params[place]\n",
        PLANTED,
    ),
    Mutant(
        "drafters are given the law that tokens are drawn from, not a copy",
        "engine/laws.py",
        "            law, shown = (law_of(self._params, self.device) for _ in range(2))\n",
        "            law = shown = law_of(self._params, self.device)\n",
        "engine/test_drafters.py",
    ),
    # -- noise
    Mutant(
        "a row that moves finds the noise of the one that left",
        "engine/noise.py",
        "        if place != last:\n            self.ring[place] = self.ring[last]\n",
        "",
        NOISE,
    ),
    Mutant(
        "a row that moves is thought to have noise as far as the one that left",
        "engine/noise.py",
        "        for per_row in (self.seeds, self.ends, self.ready):\n"
        "            per_row[place] = per_row[last]\n"
        "            per_row.pop()\n",
        "        for per_row in (self.seeds, self.ends):\n"
        "            per_row[place] = per_row[last]\n"
        "            per_row.pop()\n"
        "        self.ready.pop()\n",
        NOISE,
    ),
    Mutant(
        "greedy rows are drafted under noise",
        "engine/noise.py",
        "len(row.tokens) if params.temperature > 0 else params.max_new_tokens",
        "len(row.tokens)",
        NOISE,
    ),
    Mutant(
        "a greedy row has the noise of the row before it",
        "engine/noise.py",
        "        if params.temperature == 0:\n            self.ring[place] = 0\n",
        "",
        NOISE,
    ),
    Mutant(
        "the noise of a chain's bonus token is not looked to",
        "engine/noise.py",
        "ready >= min(at + depth + 1, end)",
        "ready >= min(at + depth, end)",
        NOISE,
    ),
    Mutant(
        "the ring is too short by one for the deepest draft",
        "engine/noise.py",
        "self.width = max(max_depth + 1, ",
        "self.width = max(max_depth, ",
        NOISE,
    ),
    Mutant(
        "noise is computed one position further than the ring is long",
        "engine/noise.py",
        "min(self.width, max(at, least))",
        "min(self.width + 1, max(at, least))",
        NOISE,
    ),
    Mutant(
        "listed candidates are ranked under the noise of the root",
        "engine/noise.py",
        "(self.positions + depth)[:, None, None], ids)",
        "self.positions[:, None, None], ids)",
        NOISE,
    ),
    # -- passes
    Mutant(
        "the token of a prefilled entry is its own, not the one that follows",
        "engine/runner.py",
        "[contexts[r][p + 1] for r, p in places]",
        "[contexts[r][p] for r, p in places]",
        FEATURES,
    ),
    Mutant(
        "a prefill claims entries that it did not keep",
        "engine/runner.py",
        "window.first[first + row] = max(0, len(context) - 1 - window.window)",
        "window.first[first + row] = 0",
        FEATURES,
    ),
    # -- the line
    Mutant(
        "the oldest row leaves where there is no room",
        "engine/scheduler.py",
        "self._leave(len(self.rows) - 1)",
        "self._leave(0)",
        "engine/test_scheduler.py",
    ),
    # -- what drafters and their training get
    Mutant(
        "the harvest of rows that are not finite is given away",
        "engine/harvest.py",
        "if not row.finite or row.ahead:",
        "if row.ahead:",
        ROWS,
    ),
    Mutant(
        "a drafter is handed the list that tokens are committed to",
        "engine/drafters.py",
        "drafter.open(request, tuple(row.tokens))",
        "drafter.open(request, row.tokens)",
        "engine/test_drafters.py",
    ),
    # -- attention
    Mutant(
        "bfloat16 scores are not widened for the softmax",
        "attention/slots.py",
        "wide = torch.float32 if self.shape.dtype == torch.bfloat16 else None",
        "wide = None",
        SLOTS,
    ),
    Mutant(
        "new nodes go round a ring that is shorter by one",
        "attention/slots.py",
        "np.arange(old, old + new)) % self.tokens",
        "np.arange(old, old + new)) % (self.tokens - 1)",
        SLOTS,
    ),
    Mutant(
        "the entries in use are looked for in a ring that is longer by one",
        "attention/slots.py",
        "around + self.tokens * (around < 0)",
        "around + (self.tokens + 1) * (around < 0)",
        SLOTS,
    ),
    Mutant(
        "what is written is not taken round the ring",
        "attention/slots.py",
        "(written.positions % size)[:, None]",
        "written.positions[:, None]",
        SLOTS,
    ),
    Mutant(
        "where all rows are as long, chains see what lies before their windows",
        "attention/slots.py",
        "if min(lengths) < longest or max(starts) > 0:",
        "if min(lengths) < longest:",
        SLOTS,
    ),
    Mutant(
        "a third level overwrites the second",
        "attention/slots.py",
        "plan.ahead, plan.old + plan.nodes",
        "plan.ahead, plan.nodes",
        SLOTS,
    ),
    Mutant(
        "a chain goes on behind the end of its ring unless all rows come to theirs",
        "attention/slots.py",
        "any((length - 1) % size + MOST_GUESSES >= size for length in lengths)",
        "all((length - 1) % size + MOST_GUESSES >= size for length in lengths)",
        SLOTS,
    ),
    Mutant(
        "nodes of a tree see what lies behind it",
        "attention/slots.py",
        "(beyond < new)[:, None])",
        "(beyond <= new)[:, None])",
        SLOTS,
    ),
    Mutant(
        "rows of a later span go by the trees of the first ones",
        "attention/slots.py",
        "else visible[rows]",
        "else visible[: span.high - span.low]",
        SLOTS,
    ),
    Mutant(
        "rows of a later span are asked for by the first ones' queries",
        "attention/slots.py",
        "query.narrow(0, span.low * heads, rows * heads)",
        "query.narrow(0, 0, rows * heads)",
        SLOTS,
    ),
    Mutant(
        "a span is as long as its last row",
        "attention/slots.py",
        "else [Span(low, high, whole + new)]",
        "else [Span(low, high, (whole if low == 0 else lengths[high - 1]) + new)]",
        SLOTS,
    ),
]
