"""Continuation of a response after a turn of the model: replies in the form that the chat template gives them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

from tlt.data.chat import ChatTemplate, Messages
from tlt.data.tables import DataError
from tlt.spelling import Detokenizer

ReplyContent = str | Messages
"""Reply of an environment: a text, or a list of messages. The first message may be the model's turn with its tool
calls."""
_MARK = "zqqz"
_USER = {"role": "user", "content": "-"}


class Call(NamedTuple):
    """Tool call of the model."""

    name: str
    arguments: dict[str, Any]
    id: str = "000000001"  # Mistral's templates take 9 letters or digits only
    error: str = ""
    """reason why the call cannot be carried out; empty if it can"""

    def result(self, content: str) -> dict[str, Any]:
        """Return the message with the result of the call."""
        return {"role": "tool", "name": self.name, "tool_call_id": self.id, "content": content}


def calling(*calls: Call) -> dict[str, Any]:
    """Return the message of a turn in which the model calls tools."""
    found = [{"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
    return {"role": "assistant", "content": "", "tool_calls": found}


def reply_text(reply: ReplyContent) -> str:
    """Return the text of a reply. Several messages are joined by newlines."""
    if isinstance(reply, str):
        return reply
    return "\n".join(message["content"] for message in reply if message["role"] != "assistant")


class Continuation:
    """Encoder of an environment's replies. It renders the whole conversation, and encodes what the chat template writes
    after the model's last turn. Tokens that the model has generated are not encoded again."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None) -> None:
        """Store the tokenizer and its chat template. If `template` is None, replies are appended as they are. Raises
        DataError if the template leaves replies out."""
        self.tokenizer, self.template = tokenizer, template
        self._spell = Detokenizer(tokenizer).spell
        self._special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        longest_first = sorted(self._special.values(), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        shown: Any = template.arguments.get("tools") if template else None
        self.tools: list[dict[str, Any]] = [tool.get("function", tool) for tool in shown or ()]
        self._role = "tool" if self.tools else "user"
        self._kept = set[tuple[Any, ...]]()  # roles of replies that the template writes, and whether calls precede them
        if template:
            self._refuse_dropped_replies()

    def __call__(
        self,
        reply: ReplyContent,
        last: int | None,
        before: Sequence[dict[str, Any]] = (),
        turns: Sequence[tuple[str, ReplyContent]] = (),
    ) -> list[int]:
        """Return the token ids of a reply.

        `last` is the token before the reply. If it is None, the reply opens the response and is encoded without the
        chat template. `before` has the messages of the prompt. `turns` has the earlier turns of the episode: the
        model's text, and the reply to it. Names of special tokens in the reply are encoded as ordinary text. Raises
        DataError if the template refuses the reply or leaves a message of it out."""
        if self.template is None or last is None:
            return self._follow(reply_text(reply), split_special_tokens=True)
        if before and before[-1]["role"] == "assistant":  # the first turn continues this message
            before = before[:-1]
        earlier = [*before, *(message for text, its in turns for message in self._turn(text, its))] or [_USER]
        mark, gap = _unused(2, json.dumps(reply, ensure_ascii=False))
        turn, *replies = self._apart(self._turn("", reply), gap)
        self._refuse_dropped(earlier, turn, replies, mark)
        text = self._after(earlier, turn, replies, mark)
        end = self._special.get(last, "")
        closing = self.end if text.startswith(self.end) else ""
        if end and 0 <= (place := text.find(end)) <= len(closing):  # the model has generated the end itself
            text = text[place + len(end) :]
        first, *others = text.split(gap)
        # after a special token, because a tokenizer may put a space before the first word of a text
        anchor = end or self.tokenizer.eos_token or ""
        tokens = self._encode(anchor + first)[len(self._encode(anchor)) :]
        return [*tokens, *(token for part in others for token in self._follow(part))]

    def written(self, turn: dict[str, Any]) -> str:
        """Return the text that the template writes for a turn of the model."""
        begun, whole = self._apply([_USER]), self._apply([_USER, turn])
        return whole[_shared(begun, whole) :]

    def _after(self, before: Messages, turn: dict[str, Any], replies: Messages, mark: str) -> str:
        """Return the text that the template writes after the content or the last tool call of the model's turn. It ends
        with the beginning of the model's next turn. `mark` is a text that the replies do not contain."""
        own = _marked(turn, mark)
        text = self._apply([*before, own, *replies])
        if mark not in text:  # the template does not write calls
            own = _marked({}, mark)
            text = self._apply([*before, own, *replies])
        rest = text.rpartition(mark)[2]
        if not own.get("tool_calls"):
            return rest
        alone = self._apply([_USER, own]).rpartition(mark)[2].removesuffix(self.end)
        return rest[_shared(alone, rest) :]  # without the rest of the call

    @cached_property
    def end(self) -> str:
        """Text that the template writes after the content of a turn of the model."""
        return self._apply([_USER, _marked({}, _MARK)]).rpartition(_MARK)[2]

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template takes the arguments of a call only as JSON text, as that of DeepSeek V3 does."""
        assert self.template
        try:
            self.template.apply([_USER, calling(Call("f", {"x": _MARK}))])
        except DataError:
            return True
        return False

    def _apply(self, messages: Messages) -> str:
        assert self.template
        if any(message.get("tool_calls") for message in messages) and self._takes_text:
            messages = [_with_text(message) for message in messages]
        return self.template.apply(messages)

    def _turn(self, text: str, reply: ReplyContent) -> Messages:
        """Return the messages of a turn: the model's message, and the reply to it."""
        replies = [{"role": self._role, "content": reply}] if isinstance(reply, str) else reply
        begins = bool(replies) and replies[0]["role"] == "assistant"
        return [*replies] if begins else [{"role": "assistant", "content": text}, *replies]

    def _apart(self, value: Any, gap: str) -> Any:
        """Return messages in which `gap` is inside each name of a special token, so that it is not encoded as one."""
        if isinstance(value, str):
            return self._names.sub(lambda found: f"{found[0][0]}{gap}{found[0][1:]}", value)
        if isinstance(value, dict):
            return {key: self._apart(each, gap) for key, each in value.items()}
        return [self._apart(each, gap) for each in value] if isinstance(value, list) else value

    def _encode(self, text: str, **options: Any) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]

    def _follow(self, text: str, **options: Any) -> list[int]:
        """Return the token ids of a text that follows another one. If the tokenizer puts a space before the first word
        of a text, encode it after a line break, and leave out the tokens of the line break."""
        first = text if options else self._names.split(text, 1)[0]  # a tokenizer may strip texts next to special tokens
        for before in ("", "\n"):
            tokens = self._encode(before + text, **options)[len(self._encode(before, **options)) :]
            if b"".join(map(self._spell, tokens)).startswith(first.encode()):
                return tokens
        return self._encode(text, **options)

    def _refuse_dropped(self, before: Messages, turn: dict[str, Any], replies: Messages, mark: str) -> None:
        """Raise DataError if the template leaves out messages of these roles, which many do with roles that they do not
        know, or if the last message is not to the model."""
        roles = tuple(message["role"] for message in replies)
        if (shape := (*roles, bool(turn.get("tool_calls")))) in self._kept:
            return
        if not roles or roles[-1] == "assistant":
            raise DataError("a reply must end with a message to the model, such as one of the role user")
        marked = [message | {"content": f"{_MARK}{i}"} for i, message in enumerate(replies)]
        text = self._after(before, turn, marked, mark)
        if lost := [role for i, role in enumerate(roles) if f"{_MARK}{i}" not in text]:
            raise DataError(
                f"the tokenizer's chat template leaves out the {lost[0]} message of a reply: use a role that it writes "
                f"there, such as {self._role}"
            )
        self._kept.add(shape)

    def _refuse_dropped_replies(self) -> None:
        """Raise DataError if the template leaves out a reply. Some templates write the result of a tool only after a
        call of it."""
        call = Call(self.tools[0]["name"], {}) if self.tools else Call("", {})
        tries = [[_marked({}, "-"), {"role": self._role, "content": _MARK}]]
        tries += [[_marked(calling(call), "-"), call.result(_MARK)]] if self.tools else []
        if not any(self._writes(turn) for turn in tries):
            raise DataError(
                f"the tokenizer's chat template writes no {self._role} message after a response: use another template"
            )

    def _writes(self, turn: Messages) -> bool:
        try:
            return _MARK in self._apply([_USER, *turn])
        except DataError:
            return False


def _marked(turn: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return the model's turn with `mark` as its content. If it has tool calls, `mark` is the argument of each, because
    some templates write either the content or the calls."""
    calls = [call | {"function": call["function"] | {"arguments": {"x": mark}}} for call in turn.get("tool_calls", ())]
    return turn | {"content": "", "tool_calls": calls} if calls else {"role": "assistant", "content": mark}


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which the arguments of tool calls are JSON text."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return message | {"tool_calls": calls} if calls else message


def _shared(one: str, other: str) -> int:
    """Return the length of the beginning that two texts share."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _unused(number: int, text: str) -> list[str]:
    """Return this number of different words that the text does not contain."""
    return list(islice((word for word in (f"zq{i}qz" for i in count()) if word not in text), number))
