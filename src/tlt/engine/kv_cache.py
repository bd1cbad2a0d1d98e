"""Key-value cache of the target: contents, number and capacity of its slots, within a memory limit.

An active row uses the slot whose number is the row's place. Positions [0, length) of a slot are committed, and later
ones are free. All slots have the same capacity, which grows with the longest row. If the limit forbids that, the
scheduler preempts rows. In tests, a ledger of checksums finds writes to committed positions. `TurnStore` keeps keys and
values of episodes that wait for their next turn.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.attention.key_counts import rounded_down, rounded_up
from tlt.attention.slots import SlotAttention
from tlt.draft.features import FeatureWindow, SavedEntries
from tlt.models.decoder import Attend
from tlt.types import Row

_PRIME, _VERSION = 0x1E3779B97F4A7C15, 0x12B2AE3D27D4EB4F  # odd hash factors; sums and products wrap modulo 2^64
_MOST_BYTES = 1 << 30  # limit of host memory of a `TurnStore`
AUDIT = "TLT_AUDIT"
"""Environment variable. If it is 1, a ledger checks the contents of all slots after every round."""


class Ledger:
    """Checksums of all positions of all slots of the key-value cache."""

    def __init__(self) -> None:
        self.booked = torch.zeros(0, 0, dtype=torch.int64)  # [slots, tokens] checksums, 0: empty

    def resized(self, slots: int, tokens: int) -> None:
        old, self.booked = self.booked, torch.zeros(slots, tokens, dtype=torch.int64)
        r, t = min(slots, len(old)), min(tokens, old.shape[1])
        self.booked[:r, :t] = old[:r, :t]

    def wrote(self, first: int, lengths: Sequence[int], tokens: Tensor, version: int) -> None:
        """Record the new tokens [B, N] of a pass. A token's checksum is that of the last committed position, plus
        hashes of the new tokens up to this one."""
        committed, row = torch.tensor(lengths), torch.arange(first, first + len(lengths))
        before = torch.where(committed > 0, self.booked[row, (committed - 1).clamp(min=0)], _begin(version))
        positions = committed[:, None] + torch.arange(tokens.shape[1])
        self.booked[row[:, None], positions] = before[:, None] + _mixed(tokens, positions).cumsum(1)

    def copied(self, source: int, target: int, length: int) -> None:
        self.booked[target, :length] = self.booked[source, :length]

    def wiped(self, slot: int, start: int) -> None:
        self.booked[slot, start:] = 0

    def check(self, contexts: Sequence[Sequence[int]], version: int) -> None:
        """Raise AssertionError unless each slot s begins with the keys and values of the tokens `contexts[s]`."""
        for slot, context in enumerate(contexts):
            tokens = torch.tensor(context, dtype=torch.int64)
            want = _begin(version) + _mixed(tokens, torch.arange(len(tokens))).cumsum(0)
            wrong = (self.booked[slot, : len(tokens)] != want).nonzero()
            assert not len(wrong), f"slot {slot} has wrong keys and values from position {int(wrong[0])} on"


def _begin(version: int) -> Tensor:
    """Return the checksum of no tokens, for this target version."""
    return torch.tensor(version) * _VERSION


def _mixed(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return a hash of each token and its position. Sums of these hashes wrap modulo 2^64."""
    x = (tokens * 1_000_003 + positions + 1) * _PRIME
    return (x ^ (x >> 29)) * _PRIME


class Saved(NamedTuple):
    """Copy of a slot's keys and values in host memory."""

    values: Tensor
    booked: Tensor | None
    """checksums of the copied positions (`Ledger.booked`); None if there is no ledger"""


class KVCache:
    """Per-row store of keys and values. Only this class changes the slots of `store`."""

    def __init__(self, store: SlotAttention, bound_tokens: int) -> None:
        self.store, self.bound_tokens = store, bound_tokens
        self.ledger = Ledger() if os.environ.get(AUDIT) == "1" else None
        self._rows: list[Row] = []
        self._held: list[tuple[int, ...]] = []

    def clear(self) -> None:
        """Drop all rows and prompts. The slots of rows are set to zero, because an interrupted rollout may have left
        values that are not finite."""
        for slot in range(len(self._rows)):
            self.wipe(slot, 0)
        self._rows, self._held = [], [()] * self.store.slots

    # -- rows ----------------------------------------------------------------------------------------------------------

    def append(self, row: Row, kept: int) -> None:
        self._rows.append(row)
        self._held[len(self._rows) - 1] = row.request.prompt.token_ids

    def remove(self, place: int, last: int) -> None:
        row, mover = self._rows[place], self._rows[last]
        if not row.finite:
            self.wipe(place, 0)
        if place != last:
            self.copy(last, place, mover.kv_length)
            self._rows[place], self._held[place] = mover, self._held[last]
            if not mover.finite:  # the moved row's values also stay in slot `last`, which a later row will use
                self.wipe(last, 0)
        self._rows.pop()

    def held(self, slot: int) -> tuple[int, ...]:
        """Return the prompt whose keys and values are at the beginning of a slot, active or free; () if there is none.
        Those of the prompt's last token may be missing."""
        return self._held[slot] if slot < len(self._held) else ()

    # -- capacity ------------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        return sum(layer.nbytes for layer in self.store.memory)

    def fits(self, slots: int, tokens: int) -> bool:
        """Return whether `slots` slots of `tokens` tokens each are within the memory limit. The capacity of a slot is
        rounded up: see `key_counts`."""
        return slots * rounded_up(tokens, self.store.key_counts) <= self.bound_tokens

    def reserve(self, slots: int, tokens: int) -> None:
        """Make room for `slots` rows of `tokens` tokens each. The caller must have checked `fits`. If the limit allows,
        more is reserved."""
        assert self.fits(slots, tokens), "call fits first"
        assert slots >= len(self._rows), "active rows keep their slots"
        have = self.store.tokens
        if slots <= self.store.slots and tokens <= have:
            return
        # free slots are dropped: near the end of a rollout, growing them would take longer than the rounds
        counts = self.store.key_counts
        want = have if tokens <= have else rounded_up(tokens + tokens // 2, counts)
        self._resize(slots, min(want, rounded_down(self.bound_tokens // slots, counts)))

    def release(self) -> None:
        """Free the memory of the cache, between a rollout and an update on the same device."""
        assert not self._rows, "active rows keep their slots"
        self._resize(0, 0)

    def _resize(self, slots: int, tokens: int) -> None:
        self.store.resize(slots, tokens)
        held = [prompt if len(prompt) <= tokens else () for prompt in self._held[:slots]]
        self._held = held + [()] * (slots - len(held))
        if self.ledger:
            self.ledger.resized(slots, tokens)

    # -- contents ------------------------------------------------------------------------------------------------------

    def note_pass(self, first: int, lengths: Sequence[int], tokens: Tensor, version: int) -> None:
        """Record a target pass over the new tokens [B, N] of slots [first, first + B) in the ledger, if there is
        one."""
        if self.ledger:
            self.ledger.wrote(first, lengths, tokens, version)

    def draft_pass(self, depth: int) -> tuple[Tensor, Attend]:
        """Return the positions [B, 1] of one draft token per active row, and their attention function. The function
        stores their keys and values behind the committed ones: see `DraftCache`."""
        assert depth >= 0, "committed positions are the target's"
        lengths = [row.kv_length + depth for row in self._rows]
        if self.ledger:
            for slot, length in enumerate(lengths):
                self.ledger.wiped(slot, length)
        positions = torch.tensor(lengths, device=self.store.memory[0].device)[:, None]
        return positions, partial(self.store.attend, self.store.plan(0, lengths, 1))

    def wipe_drafts(self) -> None:
        """Set the keys and values after the committed positions to zero, in the slots of all active rows."""
        for slot, row in enumerate(self._rows):
            self.wipe(slot, row.kv_length)

    def copy(self, source: int, target: int, length: int) -> None:
        self.store.copy(source, target, length)
        if self.ledger:
            self.ledger.copied(source, target, length)

    def save(self, slot: int, length: int) -> Saved:
        """Return a copy of a slot's first `length` positions in host memory. `restore` accepts it."""
        booked = self.ledger.booked[slot, :length].clone() if self.ledger else None
        return Saved(self.store.read(slot, length), booked)

    def restore(self, slot: int, saved: Saved) -> None:
        """Write a copy that `save` returned to a slot. The target's version must be the same."""
        self.store.write(slot, saved.values)
        if self.ledger and saved.booked is not None:
            self.ledger.booked[slot, : len(saved.booked)] = saved.booked

    def wipe(self, slot: int, start: int) -> None:
        self.store.wipe(slot, start)
        if start == 0:
            self._held[slot] = ()
        if self.ledger:
            self.ledger.wiped(slot, start)

    def check(self, version: int) -> None:
        """If there is a ledger, raise AssertionError unless each active slot has the keys and values of its row, and
        each free slot has the keys and values of the prompt `held(slot)`."""
        if self.ledger:
            contexts = [row.context for row in self._rows] + self._held[len(self._rows) :]
            self.ledger.check([context[:-1] for context in contexts], version)


# -- keys and values between turns -------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    context: tuple[int, ...]
    """tokens of the prompt and the response whose keys and values are kept"""
    saved: Saved
    entries: SavedEntries | None
    """entries of the row in the feature window; None if there is no window"""

    @property
    def bytes(self) -> int:
        return self.saved.values.nbytes + (self.entries.features.nbytes if self.entries else 0)


class TurnStore:
    """Per-row store. If a row leaves the batch and its episode may continue, its keys and values are copied to host
    memory. So are the hidden states that the drafter reads.

    If the copies take more than 1 GiB, the oldest ones are dropped. The store exists for one rollout, so the target's
    version does not change.
    """

    def __init__(self, cache: KVCache, window: FeatureWindow | None) -> None:
        self.cache, self.window, self.bytes = cache, window, 0
        self._rows: list[Row] = []
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by seed

    def append(self, row: Row, kept: int) -> None:
        self._rows.append(row)

    def remove(self, place: int, last: int) -> None:
        """Copy the row's keys and values if its episode may continue. The row table calls this store first, so they
        still exist."""
        row = self._rows[place]
        if row.request.sampling.continues and row.finite and row.tokens and not row.ahead:
            self._keep(place, row)
        self._rows[place] = self._rows[last]
        self._rows.pop()

    def _keep(self, place: int, row: Row) -> None:
        entries = self.window.save(place) if self.window else None
        kept = _Kept(row.context[:-1], self.cache.save(place, row.kv_length), entries)
        if row.request.seed in self._kept:
            self._drop(row.request.seed)
        self._kept[row.request.seed] = kept
        self.bytes += kept.bytes
        while self.bytes > _MOST_BYTES:
            self._drop(next(iter(self._kept)))

    def known(self, row: Row) -> int:
        """Return the number of the row's first tokens whose keys and values are stored."""
        kept = self._kept.get(row.request.seed)
        return len(kept.context) if kept and row.context[: len(kept.context)] == kept.context else 0

    def restore(self, place: int, row: Row) -> None:
        """Copy the row's stored keys and values to its new place, and drop the stored copy."""
        kept = self._drop(row.request.seed)
        self.cache.restore(place, kept.saved)
        if self.window and kept.entries:
            self.window.restore(place, kept.entries)

    def _drop(self, seed: int) -> _Kept:
        kept = self._kept.pop(seed)
        self.bytes -= kept.bytes
        return kept
