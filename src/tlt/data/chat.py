"""Prompts that are lists of messages, and the tokenizer's chat template, which converts them to text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

from tlt.config import DataConfig
from tlt.data.tables import NO_TEMPLATE, DataError
from tlt.files import parse_json

Messages = list[dict[str, Any]]

_TEXT_PARTS = ("text", "input_text", "output_text")


# -- messages of a file's row ------------------------------------------------------------------------------------------


def messages_of(question: Any, where: str) -> Messages | None:
    """Return a prompt's messages in the format of TRL, verl and OpenAI. Return None if the prompt is not a list of
    messages. In the result, the content of a message is a text. Raises DataError if a message has other content, such
    as an image. `where` names the row in the error."""
    if isinstance(question, str):
        question = _parsed(question)
    if not isinstance(question, Sequence) or isinstance(question, str) or not question:
        return None
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and m.keys() & _CARRIES for m in question):
        return None
    return [_with_text(message, f"{where}, message {number}") for number, message in enumerate(question)]


_CARRIES = {"content", "tool_calls"}


def _parsed(text: str) -> Any:
    """Parse messages that are JSON text, as in tables without nested columns. Return None for other text."""
    if not (text.lstrip().startswith("[") and '"role"' in text):
        return None
    try:
        return parse_json(text)
    except ValueError:
        return None


def text_of(messages: Messages) -> str:
    """Return the contents of the messages as one text, for display and for comparing prompts."""
    return "\n".join(message["content"] for message in messages)


def _with_text(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message whose content is a text. Keys without a value are left out, because templates may write `None`.
    Raises DataError for other content. `where` names the message in the error."""
    content = message.get("content")
    message = {key: value for key, value in message.items() if value is not None}
    if isinstance(content, list) and content:
        texts = [_text_of(part, where) for part in content]
        if len(texts) > 1:
            raise DataError(f"{where} has {len(texts)} parts: join them, because templates differ in how they do")
        return message | {"content": texts[0]}
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message | {"content": content or ""}
    raise DataError(f"{where} ({message['role']}) has no text: its content is {content!r:.60}")


def _text_of(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise DataError(f"{where} has a part of type {kind!r:.60}, but tlt trains on text only: remove such rows")


# -- the template ------------------------------------------------------------------------------------------------------


class ChatTemplate:
    """Chat template of a tokenizer. All prompts are rendered with the same date and time. Each new sequence of roles is
    tested when it first occurs, because templates silently drop messages that they do not support."""

    def __init__(self, tokenizer: Any, config: DataConfig) -> None:
        """Store the template and its arguments. Raise DataError if the tokenizer has no chat template, or if the
        template does not use an argument of data.chat_arguments."""
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(NO_TEMPLATE)
        self.tokenizer, self.arguments = tokenizer, config.chat_arguments
        self.now = datetime.fromisoformat(config.now) if config.now else datetime.now()
        self._tried: set[tuple[Any, ...]] = set()
        self._refuse_unread_arguments()

    def render(self, turns: Messages) -> str:
        """Return the text of a prompt, given as messages. If the last message has the role assistant, the text ends
        with that message, and the response continues it. Raises DataError if the template does not support the
        messages."""
        shape = tuple((turn["role"], *sorted(key for key, value in turn.items() if value)) for turn in turns)
        if shape not in self._tried:
            self._refuse_dropped(turns)
            self._tried.add(shape)
        return self._to_continue(turns) if turns[-1]["role"] == "assistant" else self.apply(turns)

    def apply(self, turns: Messages) -> str:
        """Return the text that the template writes for messages, without checking them. Raises DataError."""
        try:
            with _fixed_time(self.now):
                return self.tokenizer.apply_chat_template(
                    turns, add_generation_prompt=turns[-1]["role"] != "assistant", tokenize=False, **self.arguments
                )
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(f"the tokenizer's chat template refuses a prompt: {error}") from None

    def _to_continue(self, turns: Messages) -> str:
        """Return the text of the messages up to the end of the last message, which the response continues. The option
        `continue_final_message` of transformers is not used, because it loses white space if the template trims
        messages."""
        content = turns[-1]["content"]
        text = self.apply([*turns[:-1], turns[-1] | {"content": content + _mark(0)}])
        whole, mark, _ = text.rpartition(_mark(0))
        if not mark or not _bare(whole).endswith(_bare(content)):
            raise DataError(
                f"the chat template changes a prompt's last message ({content[:40]!r}, of the role assistant), which "
                "the response must continue unchanged: write the message in the data as the template renders it"
            )
        return whole

    def _refuse_unread_arguments(self) -> None:
        from jinja2 import meta
        from transformers.utils import chat_template_utils

        asked = self.arguments.get("chat_template"), self.arguments.get("tools")
        template = self.tokenizer.get_chat_template(*asked)
        try:
            # compiled by transformers, because it adds tags to the template language of jinja2
            environment = cast(Any, chat_template_utils)._compile_jinja_template(template).environment
        except Exception as error:
            raise DataError(f"the tokenizer's chat template is not valid: {error}") from None
        read = meta.find_undeclared_variables(environment.parse(template)) | {"chat_template"}
        for name in self.arguments.keys() - read:
            if name == "tools":
                raise DataError("the chat template does not show tools to the model: use a model whose template does")
            raise DataError(
                f"the chat template does not read {name} of data.chat_arguments, but {', '.join(sorted(read))}: "
                "correct or remove it"
            )

    def _refuse_dropped(self, turns: Messages) -> None:
        """Raise DataError if the template leaves out the content, the tool calls or the tools of a message. It may
        leave out reasoning and text next to a tool call, because models are trained with templates that do so."""
        plain = self.apply(turns)
        marked = [
            turn if turn.get("tool_calls") else turn | {"content": turn["content"] + _mark(i)}
            for i, turn in enumerate(turns)
        ]
        text = self.apply(marked)
        for i, turn in enumerate(turns):
            which = f"the {turn['role']} message {turn['content'][:40]!r}"
            if _mark(i) not in text and not turn.get("tool_calls"):
                raise DataError(
                    f"the tokenizer's chat template leaves out {which}: move its text into a message that the "
                    "template keeps, or use another template"
                )
            for key in ("tool_calls", "tools"):
                without = [*turns[:i], {k: v for k, v in turn.items() if k != key}, *turns[i + 1 :]]
                if turn.get(key) and self._writes(without, plain):
                    raise DataError(
                        f"the tokenizer's chat template leaves out the {key} of {which}: remove the rows that have "
                        f"{key}, or use another template"
                    )

    def _writes(self, turns: Messages, text: str) -> bool:
        """Return whether the template writes exactly this text for the messages. Return False if it refuses them."""
        try:
            return self.apply(turns) == text
        except DataError:
            return False


def _mark(place: int) -> str:
    return f"zq{place}qz"


def _bare(text: str) -> str:
    return "".join(text.split())


@contextmanager
def _fixed_time(now: datetime) -> Iterator[None]:
    """Make `strftime_now` in chat templates use the time `now` until the `with` block ends. This replaces the clock in
    a module of transformers, because transformers does not accept functions as arguments of templates."""
    from transformers.utils import chat_template_utils  # slow to import

    module: Any = chat_template_utils
    clock = module.datetime
    module.datetime = SimpleNamespace(now=lambda: now)
    try:
        yield
    finally:
        module.datetime = clock
