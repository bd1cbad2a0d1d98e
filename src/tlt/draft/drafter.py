"""The drafter protocol. A new drafter is one file that gives log q for the nodes of a level; the tree does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tlt.types import Request


@dataclass
class Node:
    """A node of a draft tree about to be expanded: the tokens from the root (the last committed one, not listed) down
    to it."""

    request: Request
    committed: Sequence[int]
    """the response so far, the root last"""
    path: tuple[int, ...]
    state: Any = None
    """whatever the drafter keeps to continue from here"""


class Candidates(NamedTuple):
    """log q of the next token at M nodes. `ids` [M, K] lists the tokens that `log_q` [M, K] speaks of (None: the whole
    vocabulary, in order); pad with -inf. `states[m][k]` is handed to the child node if candidate k is taken."""

    ids: Tensor | None
    log_q: Tensor
    states: Sequence[Sequence[Any]] | None = None
    kinds: Sequence[int] | None = None
    """a class of guess for each node, calibrated apart (how long the match was, say)"""


class Drafter(Protocol):
    """One level of all rows at a time. Calls come in the order open, (commit, predict)*, close for each request."""

    name: str

    def open(self, request: Request, committed: Sequence[int]) -> None:
        """A request starts, or comes back after a preemption with the tokens it had."""
        ...

    def commit(self, request: Request, tokens: Sequence[int]) -> None:
        """The engine committed these tokens."""
        ...

    def close(self, request: Request) -> None:
        """The request is finished or preempted."""
        ...

    def predict(self, nodes: Sequence[Node]) -> Candidates:
        """log q, under the request's sampling law, of what follows each node. May list nothing for a node."""
        ...
