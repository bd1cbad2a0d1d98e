"""Episodes against a slow reference: full passes of transformers' own model, one token at a time, without an engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import small
from pools import rollout_of
from small import PROMPTS, VOCAB, Reference, Target, build, oracle, plain_distribution

from tlt.config import EngineConfig
from tlt.data.tables import DataError
from tlt.draft.ahead import Ahead, AheadStore
from tlt.draft.features import Harvest
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.committing import Stops
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.environments.episodes import Episodes, ReplyRecord
from tlt.environments.instances import Environments, Turn, TurnText
from tlt.rewards.verdicts import Verdict
from tlt.types import Prompt, Reply, Request, Response, Row, SamplingParams

STOP, MOST, TURNS = 4, 48, 3
PARAMS = SamplingParams(max_new_tokens=MOST, stop_token_ids=(STOP,), continues=True)


def encode(text: str, last: int | None, *context: Any) -> list[int]:
    """Return tokens. The letters a to e are the tokens."""
    return [ord(letter) - 97 for letter in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


class Game:
    """Environment that replies with the model's text reversed. A turn of one token ends the game. For one prompt the
    game begins with a text."""

    def reset(self, prompt: Prompt) -> str | None:
        return "bad" if prompt.prompt_id else None

    def step(self, text: str) -> tuple[str, bool, float]:
        return text[::-1][:6], len(text) == 1, float(len(text))


class AtOnce:
    """Stand-in for a pool. It counts the calls. A reply arrives after it was polled `late` times."""

    def __init__(self, environment: Callable[[], Any], late: int = 0) -> None:
        self.environments, self.late, self.asked = Environments(environment, 60.0), late, 0
        self._looks: dict[Future[Verdict], int] = {}

    def submit(self, prompt: Prompt, turn: Turn, key: int) -> Future[Verdict]:
        self.asked += 1
        verdict: Future[Verdict] = Future()
        verdict.set_result(self.environments.answer_all([(prompt, turn)])[0])
        return verdict

    def result(self, verdict: Future[Verdict]) -> Verdict:
        return verdict.result()

    def ready(self, verdicts: Sequence[Future[Verdict]], seconds: float) -> set[Future[Verdict]]:
        for verdict in verdicts:
            self._looks[verdict] = self._looks.get(verdict, 0) + 1
        return {verdict for verdict in verdicts if self._looks[verdict] > self.late}

    def forget_keys(self) -> None: ...

    def close(self) -> None: ...


def episodes(pool: AtOnce, turns: int | None = TURNS) -> Episodes:
    return Episodes(pool, encode, decode, turns)  # type: ignore[arg-type]


def expected(target: Target, request: Request) -> tuple[Reference, list[Reply], float]:
    """Return the expected episode: argmax of log p + g, and the environment's text at its positions."""
    game, noise = Game(), small._noise_of(request)
    tokens, logprobs, replies, reward, begin, turns = [], [], [], 0.0, 0, 0

    def reply(text: str) -> None:
        replies.append(Reply(len(tokens), len(tokens) + len(text), text))
        tokens.extend(encode(text, None))
        logprobs.extend([0.0] * len(text))

    def ended(reason: str) -> tuple[Reference, list[Reply], float]:
        return Reference(tokens, logprobs, logprobs, reason), replies, reward

    if opening := game.reset(request.prompt):
        reply(opening)
        begin = len(tokens)
    while True:
        context = request.prompt.token_ids + tuple(tokens)
        distribution = plain_distribution(target.logits([context])[0], request.sampling)
        scores = [small._log(p) + g for p, g in zip(distribution, noise[len(tokens)], strict=True)]
        token = max(range(VOCAB), key=scores.__getitem__)
        tokens.append(token)
        logprobs.append(math.log(distribution[token]))
        if token != STOP:
            if len(tokens) == MOST:
                return ended("length")
            continue
        text, done, earned = game.step(decode(tokens[begin:]))
        reward, turns = reward + earned, turns + 1
        if done or turns == TURNS:
            return ended("stop" if done else "turns")
        if len(tokens) + len(text) >= MOST:
            return ended("reply")
        reply(text)
        begin = len(tokens)


TARGET = Target()
REQUESTS = small.make_requests(PROMPTS, [PARAMS], group=12)
DRAFTED = Strategy("", 6)


def check(responses: Sequence[Response]) -> None:
    by_seed = {response.request.seed: response for response in responses}
    assert len(by_seed) == len(REQUESTS)
    for request in REQUESTS:
        response, (reference, replies, reward) = by_seed[request.seed], expected(TARGET, request)
        assert response.token_ids == reference.token_ids
        assert response.finish_reason == reference.finish_reason
        assert response.replies == replies
        assert response.reward == pytest.approx(reward)
        assert response.logprobs == pytest.approx(reference.logprobs, abs=1e-9)
        assert len(response.proposed) == len(response.token_ids)
        written = [i for start, end, _ in replies for i in range(start, end)]
        assert [i for i, own in enumerate(response.mask) if not own] == written
        assert response.num_sampled == len(response.token_ids) - len(written)
        assert all(response.full_logprobs[i] == 0.0 for i in written)


def rollout(engine: Engine, turns: Episodes) -> list[Response]:
    return rollout_of(engine, turns).generate(REQUESTS, lambda response: None)[0]


def test_the_reference_has_every_finish_reason() -> None:
    found = [expected(TARGET, request) for request in REQUESTS]
    assert {reference.finish_reason for reference, _, _ in found} == {"stop", "length", "turns", "reply"}
    assert max(len(replies) for _, replies, _ in found) > 2


@pytest.mark.parametrize(("memory", "late"), [(None, 0), (150, 3)])
@pytest.mark.parametrize("drafter", ["none", "suffix", "oracle"])
def test_tokens_are_those_of_the_reference(
    drafter: str, memory: int | None, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a small cache preempts rows in the middle of a turn, and if replies are late."""
    monkeypatch.setattr("tlt.engine.scheduler._HEADROOM", 4)
    made = {"none": lambda: None, "suffix": lambda: SuffixDrafter(), "oracle": lambda: oracle(TARGET)}[drafter]()
    engine = build(TARGET, made, DRAFTED, max_rows=8, bound_tokens=memory)
    responses = rollout(engine, episodes(AtOnce(Game, late)))
    check(responses)
    assert engine.stats.tokens == sum(response.num_sampled for response in responses)
    assert engine.stats.preemptions > 0 or memory is None


@pytest.mark.parametrize("drafter", ["none", "learned"])
def test_keys_and_values_of_earlier_turns_are_not_computed_again(drafter: str) -> None:
    """Only replies are prefilled, and each prompt with its first text."""
    found = {}
    for continues in (True, False):
        engine = build(TARGET, small.learned(TARGET) if drafter == "learned" else None, DRAFTED)
        requests = [replace(request, sampling=replace(PARAMS, continues=continues)) for request in REQUESTS]
        turns = episodes(AtOnce(Game))
        responses, stats = rollout_of(engine, turns).generate(requests, lambda response: None)
        check(responses)
        found[continues] = stats.prefill_tokens
    replies = [reply for response in responses for reply in response.replies if reply.start]
    begun = [r for r in responses if r.replies and not r.replies[0].start]
    opened = sum(len(r.request.prompt.token_ids) + len(r.replies[0].text) - 1 for r in begun)
    prompts = {r.request.prompt.token_ids for r in responses if r not in begun}
    assert found[True] == opened + sum(len(p) - 1 for p in prompts) + sum(len(reply.text) for reply in replies)
    assert found[False] > 2 * found[True]


def test_replies_are_no_training_data_of_the_drafter() -> None:
    items: list[Harvest] = []
    drafter = small.learned(TARGET, window=8)
    config = EngineConfig(max_rows=64, prefill_tokens=2048)
    tuner = Fixed(small.strategy_for(drafter, DRAFTED))
    layout = drafter.options.layout
    engine = Engine(TARGET.decoder, config, [drafter], tuner, layout=layout, on_harvest=items.append)
    responses = rollout(engine, episodes(AtOnce(Game)))
    check(responses)
    prompts = [response.request.prompt.token_ids for response in responses]
    contexts = [[*prompt, *response.token_ids] for prompt, response in zip(prompts, responses, strict=True)]
    own = [[True] * len(prompt) + [*response.mask] for prompt, response in zip(prompts, responses, strict=True)]
    for item in items:
        follows = slice(item.start + 1, item.end + 1)
        places = [i for i, context in enumerate(contexts) if context[follows] == item.tokens.tolist()]
        assert any(all(own[i][follows]) for i in places), "all tokens are of the prompt or of the model"
    assert sum(len(item.tokens) for item in items) > 0.5 * sum(response.num_sampled for response in responses)


def test_a_look_ahead_draft_is_valid_across_turns_while_replies_agree() -> None:
    first = rollout(build(TARGET), episodes(AtOnce(Game)))
    engine = build(TARGET, tuner=Fixed(PLAIN._replace(ahead=16)))
    engine.store = AheadStore(10_000)
    engine.rollout = engine._new_rollout()
    again = rollout_of(engine, episodes(AtOnce(Game)))
    again.coordinator.idle.ahead.store.put(Ahead.of(response, 0, ended=True) for response in first)
    check(again.generate(REQUESTS, lambda response: None)[0])
    turns = sum(len(response.replies) + 1 for response in first)
    assert engine.stats.seen_ahead > 0.9 * engine.stats.tokens - turns
    assert engine.stats.row_passes < 1.5 * turns, "most turns are one pass"


def test_a_comparison_calls_the_environment_once_and_waits_twice() -> None:
    """Otherwise the second way to decode would look faster."""

    class Pool(AtOnce):
        def submit(self, prompt: Prompt, turn: Turn, key: int) -> Future[Verdict]:
            verdict: Future[Verdict] = Future()
            answer = super().submit(prompt, turn, key).result()
            Timer(0.3, verdict.set_result, [answer]).start()
            return verdict

        def ready(self, verdicts: Sequence[Future[Verdict]], seconds: float) -> set[Future[Verdict]]:
            return wait(verdicts, seconds, FIRST_COMPLETED).done

    pool, took, asked = Pool(Game), list[float](), list[int]()
    one = rollout_of(build(TARGET, SuffixDrafter(), DRAFTED), episodes(pool))
    for decode_all in (one.generate_plain, lambda *given: one.generate(*given)[0]):
        began = time.monotonic()
        check(decode_all(REQUESTS, lambda response: None))
        took.append(time.monotonic() - began)
        asked.append(pool.asked)
    assert min(took) > 0.3 * (1 + TURNS)
    assert asked[0] == asked[1]


def test_a_stop_string_begins_in_the_turn_that_it_ends() -> None:
    spelled: Any = SimpleNamespace(spell=lambda token: bytes([token]))
    stops = Stops(spelled)
    request = replace(REQUESTS[0], sampling=SamplingParams(stop_strings=("ab", "c")))
    row = Row(request, list(b"xabca"), replies=[Reply(1, 5, "abca")])
    for letter, reason in ((b"b", None), (b"a", None), (b"b", "stop")):
        assert stops.append(row, letter) == reason


class Says:
    """Environment that answers each turn with the next verdict."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = iter(verdicts)

    def answer_all(self, asked: Sequence[tuple[Prompt, Turn]]) -> list[Verdict]:
        return [next(self.verdicts)]


def saying(*verdicts: Verdict) -> AtOnce:
    pool = AtOnce(Game)
    pool.environments = Says(*verdicts)  # type: ignore[assignment]
    return pool


def said(row: Row, *tokens: int) -> Response:
    """Return the response in which these tokens and the end token follow those of the row."""
    all_tokens = [*row.tokens, *tokens, STOP]
    logprobs = [-1.0] * len(all_tokens)
    return Response(row.request, all_tokens, logprobs, logprobs, "stop", replies=row.replies)


def ended(*verdicts: Verdict, turns: int | None = TURNS) -> Response:
    """Return the finished episode, in which each turn of the model is one token and an end token."""
    found = episodes(saying(Verdict(0.0, reply=""), *verdicts), turns=turns)
    (row,) = found.begin(REQUESTS[:1])
    finished: list[Response] = []
    while not finished:
        finished, rows = found.take([said(row, 1)])
        row = rows[0] if rows else row
    assert not found.awaits
    return finished[0]


def test_scores_are_those_of_the_last_turn_and_none_of_an_episode_that_failed() -> None:
    counted = [Verdict(0.0, reply="a", scores={"calls": count}) for count in (1.0, 2.0)]
    assert ended(*counted, Verdict(0.0, scores={"calls": 3.0})).scores == {"calls": 3.0}
    assert ended(*counted, turns=2).scores == {"calls": 2.0}
    assert ended(*counted, Verdict(0.0, scores={"other": 1.0})).scores == {"other": 1.0}, "the others were removed"
    assert ended(*counted, Verdict(None, "error")).scores == {}


@pytest.mark.parametrize(
    ("verdicts", "reason", "reward"),
    [
        ([Verdict(0.5, reply="x" * 2**20)], "reply", 0.5),
        ([Verdict(0.5, reply="a" * (MOST - 2))], "reply", 0.5),
        ([Verdict(0.5, reply="a" * (MOST - 5)), Verdict(0.0)], "stop", 0.5),
    ],
)
def test_limits_end_an_episode_with_its_rewards_so_far(verdicts: list[Verdict], reason: str, reward: float) -> None:
    found = ended(*verdicts)
    assert (found.finish_reason, found.reward, found.outcome) == (reason, reward, "")
    assert len(found.token_ids) <= MOST


def test_a_first_text_leaves_room_for_a_token() -> None:
    (row,) = episodes(saying(Verdict(0.0, reply="ab" * MOST))).begin(REQUESTS[:1])
    assert row.tokens == [0, 1] * (MOST // 2 - 1) + [0]
    assert row.room == 1


def test_an_environment_that_begins_the_conversation_is_known() -> None:
    """Look-ahead then skips requests of coming steps, because their first text is not known."""
    found = episodes(AtOnce(Game))
    found.begin([request for request in REQUESTS if not request.prompt.prompt_id])
    assert not found.opens
    found.begin(REQUESTS)
    assert found.opens


def test_a_failed_environment_leaves_no_reward_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    assert ended(Verdict(3e38, reply="a"), Verdict(3e38)).outcome == "not a number", "beyond float32"
    found = ended(Verdict(1.0, reply="a"), Verdict(None, "error", "KeyError: 'bonus'"))
    assert (found.reward, found.outcome) == (None, "error")
    assert "KeyError: 'bonus'" in caplog.text


def test_a_late_reply_to_an_interrupted_rollout_is_dropped() -> None:
    found = episodes(AtOnce(Game, late=1))
    (row,) = found.begin(REQUESTS[:1])
    assert (found.take([said(row, 1, 2)]), found.awaits) == (([], []), True)
    found.begin(REQUESTS[:1])
    assert (found.take([]), found.take([]), found.awaits) == (([], []), ([], []), False)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_environment_that_failed_to_begin_is_not_called_again(reason: str) -> None:
    """It might succeed then, and the episode would continue without its first text."""
    pool = saying(Verdict(None, "timeout", "slow"), Verdict(1.0))
    found = episodes(pool)
    (row,) = found.begin(REQUESTS[:1])
    ((response,), _) = found.take([replace(said(row, 1), finish_reason=reason)])
    assert (response.outcome, response.reward, pool.asked) == ("timeout", None, 1)


def test_the_first_turn_begins_with_the_prefill() -> None:
    pool, told = AtOnce(Game), list[Turn]()
    submit = pool.submit
    pool.submit = lambda prompt, turn, key: (told.append(turn), submit(prompt, turn, key))[1]  # type: ignore[method-assign]
    found = episodes(pool)
    (row,) = found.begin([replace(REQUESTS[0], prompt=replace(REQUESTS[0].prompt, prefill="so "))])
    for _ in range(2):
        _, (row,) = found.take([said(row, 1, 2)])
    assert told[-1].texts == ("so bce", "bce")


def test_a_reply_is_encoded_in_its_conversation() -> None:
    """`encode` gets the prompt's messages and the earlier turns. Messages are shown as their texts."""
    own = {"role": "assistant", "content": ""}
    replies = ["ab", [own, {"role": "tool", "content": "c"}, {"role": "tool", "content": "d"}], "e"]
    pool = saying(Verdict(0.0, reply=""), *(Verdict(0.0, reply=reply) for reply in replies))
    given = []

    def in_context(reply: Any, last: int | None, *context: Any) -> list[int]:
        given.append((reply, last, *context))
        return [0]

    found = Episodes(pool, in_context, decode, None)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "?"}]
    request = replace(REQUESTS[0], prompt=replace(REQUESTS[0].prompt, messages=messages, prefill="so "))
    (row,) = found.begin([request])
    for token in (1, 2, 3):
        _, (row,) = found.take([said(row, token)])
    texts = ["so be", "ce", "de"]
    earlier = list(zip(texts, replies, strict=True))
    assert given == [(reply, STOP, messages, tuple(earlier[:i])) for i, reply in enumerate(replies)]
    assert [reply.text for reply in row.replies] == ["ab", "c\nd", "e"]


def test_a_reply_that_the_template_refuses_ends_its_episode(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(*given: Any) -> list[int]:
        raise DataError("the template refuses it")

    found = Episodes(saying(Verdict(0.0, reply=""), Verdict(1.0, reply="a")), refuses, decode, None)  # type: ignore[arg-type]
    (row,) = found.begin(REQUESTS[:1])
    ((response,), rows) = found.take([said(row, 1)])
    assert (response.outcome, response.reward, rows) == ("error", None, [])
    assert "the template refuses it" in caplog.text


def kept(path: Path, resume: bool = False) -> ReplyRecord:
    record = ReplyRecord()
    record.open(path, resume=resume)
    return record


def test_replies_are_recorded_once_and_read_without_a_torn_line(tmp_path: Path) -> None:
    messages = [{"role": "tool", "name": "f", "tool_call_id": "1", "content": "é\n"}]
    verdicts = [Verdict(0.0, reply="é\n"), Verdict(0.5, reply=messages), Verdict(None, "crash", "why")]
    turns = [(), ("a",), ("a", "b")]
    path = tmp_path / "replies.jsonl"
    record = kept(path)
    for said, verdict in zip(turns, verdicts, strict=True):
        for _ in range(2):
            record.add(3, 2**64 - 1, said, verdict)
    assert len(path.read_bytes().splitlines()) == 3, "each is recorded once"
    with path.open("ab") as file:
        file.write(b'{"step": 3, "se')
    kept(path, resume=True).add(3, 7, (), verdicts[0])  # behind the torn line
    again = kept(path, resume=True)
    assert [again.find(3, 2**64 - 1, said) for said in turns] == verdicts
    assert again.find(3, 7, ()) == verdicts[0]
    assert again.find(3, 2**64 - 1, ("another",)) is None, "the model said something else"
    assert again.find(3, 2**64 - 1, (TurnText("a", "a<eos>"),)) is None, "with another special token"
    assert again.find(4, 2**64 - 1, ("a",)) is None, "another step"
    again.forget_before(4)
    assert again.find(3, 2**64 - 1, ("a",)) is None


def test_a_process_killed_while_it_rewrites_the_file_loses_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "replies.jsonl"
    kept(path).add(3, 7, (), Verdict(0.5, reply="a"))
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            kept(path)  # a new run empties the file
    (tmp_path / "replies.jsonl.partial").write_text('{"step": 3, "se', encoding="utf-8")
    for _ in range(2):
        assert kept(path, resume=True).find(3, 7, ()) == Verdict(0.5, reply="a")


def test_a_recorded_reply_to_another_conversation_is_not_used(tmp_path: Path) -> None:
    """A resumed run may say something else in an early turn, and the same in a later one."""
    record = kept(tmp_path / "replies.jsonl")
    for said in (("a",), ("a", "b"), ("a", "b", "c"), ("x",)):
        record.add(3, 7, said, Verdict(0.5, reply=said[0]))
    for one in (record, kept(tmp_path / "replies.jsonl", resume=True)):
        assert one.find(3, 7, ("x",)) == Verdict(0.5, reply="x")
        assert one.find(3, 7, ("x", "b")) is one.find(3, 7, ("x", "b", "c")) is None


def test_replies_that_were_not_read_are_removed(tmp_path: Path) -> None:
    """They are of another environment, and another resume would read them."""
    for seed in (1, 2):
        kept(tmp_path / "replies.jsonl").add(3, seed, (), Verdict(0.0, reply="a"))
    again = kept(tmp_path / "replies.jsonl", resume=True)
    assert [again.find(3, seed, ()) for seed in (1, 2)] == [None, Verdict(0.0, reply="a")]
