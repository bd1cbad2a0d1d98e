"""Episodes: responses with several turns. After each turn of the model, the environment of the episode replies, and the
model continues the response.

The reward of an episode is the sum of the rewards of its turns. Its finish reason is one of these:
- `stop`: the environment ended the episode;
- `length`: the response reached rollout.max_new_tokens. The environment does not receive the unfinished turn;
- `turns`: the model had reward.turns turns;
- `reply`: a reply of the environment left no room for another token.

If an environment fails, the episode has no reward, and the outcome of the response names the reason. Without an
environment, one turn is the response.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tlt.data.continuation import ReplyContent, reply_text
from tlt.data.tables import DataError
from tlt.environments.instances import Turn, TurnText, written
from tlt.files import replace_text
from tlt.rewards.score_pool import ScorePool
from tlt.rewards.verdicts import LARGEST, FaultLog, Verdict
from tlt.types import Reply, Request, Response, Row

log = logging.getLogger(__name__)
NAME = "replies.jsonl"
Key = tuple[int, int, int]
"""(step, seed of the request, number of turns of the model before the reply)"""


class ReplyRecord:
    """Replies of environments by step, request and turn, in memory and, after a call of `keep`, in a file."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._known: dict[Key, tuple[str, Verdict]] = {}  # the model's text in that turn, and the reply to it
        self._seconds: dict[Key, float] = {}

    def find(self, step: int, seed: int, texts: tuple[str, ...]) -> Verdict | None:
        """Return the recorded reply of the environment to these turns of the model; None if there is none."""
        last, verdict = self._known.get((step, seed, len(texts)), ("", None))
        return verdict if last == _last(texts) else None

    def seconds(self, step: int, seed: int, texts: tuple[str, ...]) -> float:
        """Return the seconds that the environment took for a recorded reply; 0 if the reply was read from the file."""
        return self._seconds.get((step, seed, len(texts)), 0.0)

    def add(self, step: int, seed: int, texts: tuple[str, ...], verdict: Verdict, seconds: float = 0.0) -> None:
        key, known = (step, seed, len(texts)), (_last(texts), verdict)
        if self._known.get(key) == known:
            return
        self._put(key, *known)
        self._seconds[key] = seconds
        self._write(_line(key, *known))

    def _put(self, key: Key, text: str, verdict: Verdict) -> None:
        """Store a reply in memory. Remove replies to later turns, which belong to another conversation."""
        self._known[key] = text, verdict
        step, seed, turn = key
        for later in count(turn + 1):
            if self._known.pop((step, seed, later), None) is None:
                break

    def forget_before(self, step: int) -> None:
        """Remove the replies of steps before `step` from memory."""
        self._known = {key: known for key, known in self._known.items() if key[0] >= step}
        self._seconds = {key: seconds for key, seconds in self._seconds.items() if key[0] >= step}

    def saved(self, done: int) -> None:
        """Drop the replies of the first `done` steps, because a checkpoint of these steps was saved. Keep those of a
        later step that has begun, because a resumed run repeats it."""
        self.forget_before(done)
        self._write("".join(_line(key, *known) for key, known in self._known.items()), replaces=True)

    def open(self, path: Path, resume: bool) -> None:
        """Write replies to the file `path` from now on. If the run is resumed, first read the replies in the file,
        without an incomplete last line. Otherwise empty the file."""
        self.path = path
        lines = path.read_bytes().split(b"\n")[:-1] if resume and path.is_file() else []
        self._write("".join(f"{line.decode()}\n" for line in lines), replaces=True)
        for line in map(json.loads, lines):
            key = line.pop("step"), line.pop("seed"), line.pop("turn")
            self._put(key, line.pop("said"), Verdict(**line))

    def _write(self, text: str, replaces: bool = False) -> None:
        """Append `text` to the file. If `replaces`, the text replaces the file's content."""
        if not self.path:
            return
        try:
            if replaces:
                replace_text(self.path, text)
            else:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(text)
        except OSError as error:
            log.warning("%s cannot be written (%s); a resumed run calls environments again", self.path, error.strerror)
            self.path = None


def _line(key: Key, text: str, verdict: Verdict) -> str:
    step, seed, turn = key
    return json.dumps({"step": step, "seed": seed, "turn": turn, "said": text, **verdict._asdict()}) + "\n"


def _last(texts: tuple[str, ...]) -> str:
    return written(texts[-1]) if texts else ""


# -- recorded replies --------------------------------------------------------------------------------------------------


REPLY = "_"
"""letter that marks tokens of an environment's reply in `Response.proposed`"""
_AT_ONCE = 0.01  # seconds; a recorded reply that took less time is returned without a delay
_CHARACTERS = 200  # assumed maximum of characters per token, to refuse too long replies before they are encoded


class Turns:
    """Continuation of responses after a turn of the model. The driver of the rollout calls it. This class serves runs
    without an environment: each response is finished after a single turn."""

    step: int = 0
    """index of the current step, which is the number of updates of the policy so far"""
    opens: bool = False
    """whether an environment wrote the first tokens of a response; look-ahead is then not possible"""

    @property
    def awaits(self) -> bool:
        """Whether any response waits for a reply of its environment."""
        return False

    def begin(self, requests: Sequence[Request]) -> list[Row]:
        """Return a row for each request of a new rollout. A row contains the environment's first text, if there is
        one."""
        return [Row(request) for request in requests]

    def take(self, ended: Sequence[Response], seconds: float = 0.0) -> tuple[list[Response], list[Row]]:
        """Pass responses whose turn has ended to their environments. Return the finished responses, and the rows of
        responses that continue because a reply has arrived. If none has arrived, wait up to `seconds` for one."""
        return list(ended), []

    def record_replies(self, folder: Path, resume: bool) -> None:
        """Record the replies of environments in the folder of the run. If the run is resumed, load the replies since
        its last checkpoint. Otherwise delete recorded replies."""

    def saved(self, done: int) -> None:
        """Drop recorded replies of the first `done` steps, because a checkpoint of these steps was saved."""

    def close(self) -> None:
        """End the processes of the environments."""


@dataclass
class _Episode:
    texts: tuple[str, ...] = ()
    """text that the model generated in each finished turn"""
    replies: tuple[ReplyContent, ...] = ()
    """reply of the environment to each of these turns"""
    reward: float = 0.0
    """sum of the rewards of the turns so far"""
    scores: Mapping[str, float] = field(default_factory=dict)
    """latest scores that the environment recorded for the episode, by name"""
    seconds: float = 0.0
    """time in seconds that the environment took for its last reply"""


class Episodes(Turns):
    def __init__(
        self,
        pool: ScorePool,
        encode: Callable[..., Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        most_turns: int | None,
    ) -> None:
        """Store the pool of environment processes and the functions that convert text.

        `encode` returns the token ids of a reply, as `Continuation` does. `decode` returns the text of a turn's token
        ids, as `TurnText` if it has special tokens. `most_turns` is reward.turns, the maximum number of turns in an
        episode; None means no limit."""
        self.pool, self.encode, self.decode, self.most_turns = pool, encode, decode, most_turns
        self.record = ReplyRecord()
        self._rollout = 0  # number of the rollout
        self._episodes: dict[int, _Episode] = {}  # unfinished episodes, by seed
        self._asked: dict[Future[Verdict], Response] = {}  # responses that wait for a reply of their environment
        self._faults = FaultLog()

    @property
    def awaits(self) -> bool:
        return bool(self._asked)

    def begin(self, requests: Sequence[Request]) -> list[Row]:
        """Begin the episodes of a rollout. Wait for the first text of each environment. Return a row per request."""
        self._rollout += 1
        self.record.forget_before(self.step)
        self.pool.forget_keys()
        self._asked = {}
        self._episodes = {request.seed: _Episode() for request in requests}
        verdicts = [self._ask(request, ()) for request in requests]
        return [self._opened(request, self.pool.result(v)) for request, v in zip(requests, verdicts, strict=True)]

    def take(self, ended: Sequence[Response], seconds: float = 0.0) -> tuple[list[Response], list[Row]]:
        finished: list[Response] = []
        rows: list[Row] = []
        for response in ended:
            first = self.record.find(self.step, response.request.seed, ())
            if response.finish_reason == "stop" or (first and first.outcome):
                self._turn_ended(response)
            else:
                finished.append(self._finished(response))
        for verdict in self.pool.ready(self._asked, seconds) if self._asked else ():
            response = self._asked.pop(verdict)
            row = self._continued(response, verdict.result())
            if row:
                rows.append(row)
            else:
                finished.append(self._finished(response))
        return finished, rows

    def record_replies(self, folder: Path, resume: bool) -> None:
        self.record.open(folder / NAME, resume)

    def saved(self, done: int) -> None:
        self.record.saved(done)

    def close(self) -> None:
        self.pool.close()

    # -- a turn --------------------------------------------------------------------------------------------------------

    def _ask(self, request: Request, texts: tuple[str, ...]) -> Future[Verdict]:
        """Return a future with the environment's reply to these turns.

        If the reply is recorded, the environment is not called. A recorded reply arrives after the time that the
        environment took for it, so that comparisons of decoding methods are fair. If `reset` failed, the failure is the
        reply."""
        first = self.record.find(self.step, request.seed, ())
        known = first if first and first.outcome else self.record.find(self.step, request.seed, texts)
        if known:
            return _after(self.record.seconds(self.step, request.seed, texts), known)
        episode, began = self._episodes[request.seed], time.monotonic()
        verdict = self.pool.submit(request.prompt, Turn(self._rollout, request.seed, texts), key=request.seed)
        verdict.add_done_callback(lambda _: setattr(episode, "seconds", time.monotonic() - began))
        return verdict

    def _opened(self, request: Request, verdict: Verdict) -> Row:
        """Return the row of a new episode, with the first text of the environment. If the environment failed, the
        episode ends after the first turn of the model."""
        self.record.add(self.step, request.seed, (), verdict, self._episodes[request.seed].seconds)
        row = Row(request)
        if verdict.reply:
            self.opens = True
            tokens = self.encode(verdict.reply, None)[: request.sampling.max_new_tokens - 1]
            _append(row, tokens, reply_text(verdict.reply))
        return row

    def _turn_ended(self, response: Response) -> None:
        request, episode = response.request, self._episodes[response.request.seed]
        prefill = "" if episode.texts else request.prompt.prefill
        text = self.decode(response.token_ids[response.turn :])
        episode.texts = (*episode.texts, TurnText(prefill + text, prefill + written(text)))
        self._asked[self._ask(request, episode.texts)] = response

    def _continued(self, response: Response, verdict: Verdict) -> Row | None:
        """Add the environment's reply to a response. Return the row that continues it, or None if it is finished."""
        request, episode = response.request, self._episodes[response.request.seed]
        self.record.add(self.step, request.seed, episode.texts, verdict, episode.seconds)
        if verdict.outcome or verdict.reward is None:
            response.outcome = verdict.outcome
            self._faults.log(response, verdict.detail)
            return None
        episode.reward += verdict.reward
        episode.scores = verdict.scores
        if verdict.reply is None:
            return None
        if len(episode.texts) == self.most_turns:
            response.finish_reason = "turns"
            return None
        room, text = request.sampling.max_new_tokens - len(response.token_ids), reply_text(verdict.reply)
        earlier = tuple(zip(episode.texts, episode.replies, strict=False))
        episode.replies = (*episode.replies, verdict.reply)
        fits = len(text) < _CHARACTERS * room
        try:
            context = response.token_ids[-1], request.prompt.messages, earlier
            tokens = self.encode(verdict.reply, *context) if fits else ()
        except DataError as error:
            response.outcome = "error"
            self._faults.log(response, str(error))
            return None
        if not fits or len(tokens) >= room:
            response.finish_reason = "reply"
            return None
        row = _row_of(response)
        _append(row, tokens, text)
        return row

    def _finished(self, response: Response) -> Response:
        episode = self._episodes.pop(response.request.seed)
        if not response.outcome and not abs(episode.reward) <= LARGEST:
            response.outcome = "not a number"
            self._faults.log(response, f"the sum of its rewards is {episode.reward}")
        if not response.outcome:
            response.reward, response.scores = episode.reward, dict(episode.scores)
        return response


def _after(seconds: float, verdict: Verdict) -> Future[Verdict]:
    """Return a future that gets this verdict after a delay of `seconds`."""
    found: Future[Verdict] = Future()
    if seconds < _AT_ONCE:
        found.set_result(verdict)
    else:
        timer = threading.Timer(seconds, found.set_result, [verdict])
        timer.daemon = True
        timer.start()
    return found


def _row_of(response: Response) -> Row:
    """Return a row with the tokens of a response, so that the engine can continue to decode it."""
    return Row(
        response.request,
        list(response.token_ids),
        list(response.logprobs),
        list(response.full_logprobs),
        decoded=response.decoded,
        proposed=response.proposed,
        replies=list(response.replies),
    )


def _append(row: Row, tokens: Sequence[int], text: str) -> None:
    """Append the tokens of a reply to a row. They get log-prob 0, and the drafter is not trained on them."""
    start = len(row.tokens)
    row.tokens += tokens
    row.logprobs += [0.0] * len(tokens)
    row.full_logprobs += [0.0] * len(tokens)
    row.proposed += REPLY * len(tokens)
    row.replies.append(Reply(start, len(row.tokens), text))
    row.harvested = row.kv_length
