"""The target's key-value cache: how many slots of how many tokens there are, under a bound, and what each slot holds.

The slot of a live row is its place. A slot's committed tokens are [0, length), what lies behind is free. All slots have
one capacity, which grows with the longest row; when the bound does not allow that, the scheduler preempts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tlt.attention.backend import AttentionBackend, TreeBatch
from tlt.engine.ledger import Ledger
from tlt.types import Row

_GRAIN = 64  # capacity grows in steps of this many tokens
AUDIT = "TLT_AUDIT"
"""with this environment variable at 1, a ledger checks after every round that the slots hold what they should"""


class KVCache:
    """A per-row store; all that happens to the backend's slots goes through here."""

    def __init__(self, store: AttentionBackend, bound_tokens: int) -> None:
        self.store, self.bound_tokens = store, bound_tokens
        self.ledger = Ledger() if os.environ.get(AUDIT) == "1" else None
        self._rows: list[Row] = []
        self._held: list[tuple[int, ...]] = []

    def clear(self) -> None:
        """No row is live. The memory goes too: a rollout that was broken off may have left in it what is not finite."""
        self._rows = []
        self.release()

    # -- rows ----------------------------------------------------------------------------------------------------------

    def append(self, row: Row, kept: int) -> None:
        self._rows.append(row)
        # keys and values of a row that is decoded ahead may be an older target's: they serve no other row
        self._held[len(self._rows) - 1] = () if row.ahead else row.request.prompt.token_ids

    def remove(self, place: int, last: int) -> None:
        row, mover = self._rows[place], self._rows[last]
        if not row.finite:
            self.wipe(place, 0)
        if place != last:
            self.copy(last, place, mover.kv_length)
            self._rows[place], self._held[place] = mover, self._held[last]
            if not mover.finite:  # what it leaves behind would wait there for the next row
                self.wipe(last, 0)
        self._rows.pop()

    def held(self, slot: int) -> tuple[int, ...]:
        """The prompt whose keys and values, but for its last token's, lie at the beginning of a slot, live or free; ()
        where there is none, or no such slot."""
        return self._held[slot] if slot < len(self._held) else ()

    # -- capacity ------------------------------------------------------------------------------------------------------

    def fits(self, slots: int, tokens: int) -> bool:
        """Whether `slots` rows, the longest of `tokens`, stay within the bound."""
        return slots * tokens <= self.bound_tokens

    def reserve(self, slots: int, tokens: int) -> None:
        """Make room for `slots` rows of `tokens`; the caller has asked `fits`. Grows ahead where the bound allows."""
        assert self.fits(slots, tokens), "the scheduler asks fits() first"
        assert slots >= len(self._rows), "live rows keep their slots"
        have = self.store.tokens
        if slots <= self.store.slots and tokens <= have:
            return
        # slots that a tail left empty are given up: to make them longer too would take longer than its rounds
        want = have if tokens <= have else -(-(tokens + tokens // 2) // _GRAIN) * _GRAIN
        self._resize(slots, min(want, self.bound_tokens // slots))

    def release(self) -> None:
        """Give the memory back (between a rollout and an update on the same device)."""
        assert not self._rows, "live rows keep their slots"
        self._resize(0, 0)

    def _resize(self, slots: int, tokens: int) -> None:
        self.store.resize(slots, tokens)
        held = [prompt if len(prompt) <= tokens else () for prompt in self._held[:slots]]
        self._held = held + [()] * (slots - len(held))
        if self.ledger:
            self.ledger.resized(slots, tokens)

    # -- contents ------------------------------------------------------------------------------------------------------

    def plan(self, first: int, lengths: Sequence[int], trees: TreeBatch, version: int) -> Any:
        """A pass of the target over slots first .. first + B, for `store.attend`."""
        if self.ledger:
            self.ledger.wrote(first, lengths, trees, version)
        return self.store.plan(first, lengths, trees.tokens.shape[1], trees.visible, trees.depths)

    def copy(self, source: int, target: int, length: int) -> None:
        self.store.copy(source, target, length)
        if self.ledger:
            self.ledger.copied(source, target, length)

    def read(self, slot: int, length: int) -> Tensor:
        """A copy in host memory."""
        return self.store.read(slot, length)

    def write(self, slot: int, values: Tensor) -> None:
        """What `read` gave, maybe of an older target: for a row that is decoded ahead."""
        assert self._rows[slot].ahead, "no token of this step may rest on an older target's keys and values"
        self.store.write(slot, values)

    def move(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
        self.store.move(slots, sources, targets)
        if self.ledger:
            self.ledger.moved(slots, sources, targets)

    def wipe(self, slot: int, start: int) -> None:
        self.store.wipe(slot, start)
        if start == 0:
            self._held[slot] = ()
        if self.ledger:
            self.ledger.wiped(slot, start)

    def check(self, version: int) -> None:
        """Where a ledger is kept: every slot holds what its row says, and a free one what `held` says."""
        if self.ledger:
            contexts = [() if row.ahead else row.context for row in self._rows] + self._held[len(self._rows) :]
            self.ledger.check([context[:-1] for context in contexts], version)
