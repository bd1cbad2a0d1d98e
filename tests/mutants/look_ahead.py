"""Faults of look-ahead: in what is kept, where a row stands in it, how it is drafted by, who is decoded ahead, and when
that is thought to pay. Few would change a token, most cost speed or a response."""

from __future__ import annotations

from mutants.mutant import Mutant

STORE = "draft/test_ahead.py"
ENGINE = "engine/test_look_ahead.py"
TUNER = "engine/test_tuner.py"

MUTANTS = [
    # -- the store
    Mutant(
        "what is put again is counted twice",
        "draft/ahead.py",
        "            self.forget([ahead.seed])\n            self._kept",
        "            self._kept",
        STORE,
    ),
    Mutant(
        "a look-ahead is looked for by prompt, not by seed",
        "draft/ahead.py",
        "known = bool(group) and group[0].seed == row.request.seed and len",
        "known = bool(group) and len",
        STORE,
    ),
    Mutant(
        "siblings come in the order in which they were decoded, a row's own among them",
        "draft/ahead.py",
        "for seed in sorted(seeds, key=lambda seed: seed != request.seed)]",
        "for seed in seeds]",
        STORE,
    ),
    # -- where a row stands
    Mutant(
        "the chain starts one token off after it was taken up again",
        "draft/ahead.py",
        "return int(places[np.abs(places - near).argmin()]) if",
        "return int(places[np.abs(places - near).argmin()]) + 1 if",
        STORE,
    ),
    Mutant(
        "of several places the first",
        "draft/ahead.py",
        "places[np.abs(places - near).argmin()]",
        "places[0]",
        STORE,
    ),
    Mutant(
        "what was left out or put in before is forgotten",
        "draft/ahead.py",
        "self.length if which else here)",
        "self.length)",
        STORE,
    ),
    Mutant(
        "a chain that was right to its end is followed by one as long",
        "draft/ahead.py",
        "min(2 * self.width, MOST_GUESSES) if full",
        "self.width if full",
        STORE,
    ),
    Mutant(
        "an old response that came to its end is taken up there, where nothing follows",
        "draft/ahead.py",
        "np.flatnonzero(tokens[:-_CONTEXT] == first)",
        "np.flatnonzero(tokens[: 1 - _CONTEXT] == first)",
        STORE,
    ),
    Mutant(
        "a row that comes back starts at the beginning of its old response",
        "draft/ahead.py",
        "_Pointer(group, row.tokens) if known",
        "_Pointer(group, ()) if known",
        STORE,
    ),
    Mutant(
        "a row that moves leaves its place in the old response behind",
        "draft/ahead.py",
        "        self._pointers[place] = self._pointers[last]\n",
        "",
        STORE,
    ),
    Mutant(
        "the number behind the last token counts as one",
        "draft/ahead.py",
        "ahead.tokens.max() < self.vocab_size",
        "ahead.tokens.max() <= self.vocab_size",
        STORE,
    ),
    Mutant(
        "what is left of a sibling's is kept as a row's own",
        "draft/ahead.py",
        "if self.at is None or not self.is_own:",
        "if self.at is None:",
        STORE,
    ),
    Mutant(
        "what is left of an old response is thrown away with the first new tokens",
        "engine/engine.py",
        ", rest=rollout.ahead.rest(place))",
        ")",
        ENGINE,
    ),
    # -- a round
    Mutant(
        "a look-ahead is committed without a walk",
        "engine/engine.py",
        "path = walk(tree, sampled.tokens[place])",
        "path = list(range(len(tree.tokens))) if tree.ahead else walk(tree, sampled.tokens[place])",
        ENGINE,
    ),
    Mutant(
        "a look-ahead goes on where the response must end",
        "engine/engine.py",
        "[min(offer, widest, row.room - 1) if",
        "[min(offer, widest) if",
        ENGINE,
    ),
    Mutant(
        "a look-ahead is as long as it is offered, whatever the strategy says",
        "engine/engine.py",
        "[min(offer, now.strategy.ahead) for",
        "[offer for",
        ENGINE,
    ),
    Mutant(
        "the noise of a look-ahead is not looked to",
        "engine/engine.py",
        "max(strategy.depth, min(strategy.ahead, noise.width - 1)))",
        "strategy.depth)",
        ENGINE,
    ),
    Mutant(
        "a look-ahead counts as the drafter's guesses",
        "engine/engine.py",
        "if len(tree.tokens) > 1 and not tree.ahead:",
        "if len(tree.tokens) > 1:",
        ENGINE,
    ),
    # -- who is decoded ahead
    Mutant(
        "a row of a coming step is a response of this one",
        "engine/engine.py",
        "if not self._was_ahead(row)]",
        "if not self._was_ahead(row) or True]",
        ENGINE,
    ),
    Mutant(
        "those that are decoded ahead stay where others wait",
        "engine/engine.py",
        "        if self.waiting:\n            self._put_off_ahead()\n",
        "",
        ENGINE,
    ),
    Mutant(
        "what those have that make way is lost",
        "engine/engine.py",
        "        self.keep_ahead()\n        self.rollout.scheduler.put_off_ahead()\n",
        "        self.rollout.scheduler.put_off_ahead()\n",
        ENGINE,
    ),
    Mutant(
        "what is decoded ahead as a new rollout begins is lost",
        "engine/engine.py",
        "            self.keep_ahead()\n            self.rollout = self._new_rollout()\n",
        "            self.rollout = self._new_rollout()\n",
        ENGINE,
    ),
    Mutant(
        "those that are asked for again are decoded twice",
        "engine/scheduler.py",
        "for seed, request in requests.items() if seed not in live)",
        "for seed, request in requests.items())",
        ENGINE,
    ),
    Mutant(
        "those that are no longer asked for go on",
        "engine/scheduler.py",
        "            elif row.ahead:\n                self.rows.remove(place)\n",
        "",
        ENGINE,
    ),
    Mutant(
        "tokens decoded ahead count as this step's",
        "engine/state.py",
        "        stats.ahead_tokens += taken\n        return\n",
        "        stats.ahead_tokens += taken\n",
        ENGINE,
    ),
    Mutant(
        "those that make way are forgotten",
        "engine/scheduler.py",
        "self.ahead.appendleft(Row(self.rows.remove(place).request, ahead=True))",
        "self.rows.remove(place)",
        ENGINE,
    ),
    Mutant(
        "those of coming steps come first",
        "engine/scheduler.py",
        "line = self.waiting or self.ahead",
        "line = self.ahead or self.waiting",
        ENGINE,
    ),
    Mutant(
        "one that leaves a full cache waits as a request of this step",
        "engine/scheduler.py",
        "(self.ahead if row.ahead else self.waiting).appendleft(row)",
        "self.waiting.appendleft(row)",
        ENGINE,
    ),
    # -- when it pays
    Mutant(
        "a look-ahead is used wherever there is one",
        "engine/tuner.py",
        "                if speed > most:\n",
        "                if True:\n",
        TUNER,
    ),
    Mutant(
        "a short look-ahead is thought to be as long as the pass is wide",
        "engine/tuner.py",
        "np.minimum(known[known > 0], width)",
        "np.full(np.count_nonzero(known), width)",
        TUNER,
    ),
    Mutant(
        "the rows without a look-ahead count for nothing",
        "engine/tuner.py",
        "(by_ahead + others * each) /",
        "by_ahead /",
        TUNER,
    ),
    Mutant(
        "how far look-aheads are right is not learned",
        "engine/tuner.py",
        "                guesses.add(_AHEAD_KIND, levels, right)\n",
        "                pass\n",
        TUNER,
    ),
    Mutant(
        "rows with a look-ahead teach what the drafter is worth",
        "engine/tuner.py",
        "zip(tokens, ahead, strict=True) if not guessed]",
        "zip(tokens, ahead, strict=True)]",
        TUNER,
    ),
    Mutant(
        "what look-aheads were worth is not read back",
        "engine/tuner.py",
        "drafters = {arm.drafter for arm in self.strategies} | {_AHEAD_KIND[0]}",
        "drafters = {arm.drafter for arm in self.strategies}",
        TUNER,
    ),
]
