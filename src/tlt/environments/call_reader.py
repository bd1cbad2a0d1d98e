"""Tool calls in a turn of the model. transformers finds them by a response template, and parses them.

https://huggingface.co/docs/transformers/chat_response_parsing describes response templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tlt.data.continuation import Call, Continuation, calling
from tlt.data.tables import DataError
from tlt.files import is_text

Form = Mapping[str, Any]
"""response template of transformers"""

_REASONING_END = re.compile(r"</think>|\[/THINK\]")
# what may be left of a call without its arguments; a second end tag of an argument is not, because it may be its text
_CLOSING = re.compile(r"(?:[\s,]|</(?!parameter|arg_)[^<>]*>)*")
_TAG = re.compile(r"<[^\s<>={}\"]{2,}|\[[A-Z_]+\]")


def _form(**calls: Any) -> Form:
    return {"start_anchor": "\0", "fields": {"content": {"repeats": True}, "tool_calls": {"repeats": True, **calls}}}


_OBJECT = (  # the beginning of a call, or of a list of calls
    r"\[?\s*\{\s*(?:[\"'](?:type|id)[\"']\s*:\s*[\"'][^\"']*[\"']\s*,\s*)*"
    r"[\"'](?:name|function|parameters|arguments)[\"']\s*:"
)
_ARGUMENTS = r"[\"'](?:parameters|arguments)[\"']\s*:"  # JSON without them is an answer
_PYTHON = r"\[\s*[A-Za-z_][\w.]*\(\s*\w+\s*="  # calls in the syntax of Python are not read, but are no answers
_NAMED = {"name": "{name}", "arguments": "{content}"}
FORMS = (
    _form(  # Qwen3-Coder and Qwen 3.5, Nemotron 3
        open_pattern=r"<(?:tool_call>\s*<)?function=(?P<name>[^<>\s]+)>",
        close_pattern=r"</function>\s*(?:</tool_call>|(?=<|$))",
        content="xml-inline",
        # a value ends at the next parameter, so that one without its end tag is left over
        content_args={
            "tag_pattern": r"<parameter=(?P<key>[^<>\s]+)>\n?"
            r"(?P<value>(?:(?!<parameter=|</parameter>).)*?)\n?</parameter>"
        },
        transform=_NAMED,
    ),
    _form(  # GLM 4.5
        open_pattern=r"<tool_call>\s*(?P<name>[\w.-]+)(?=\s*<arg_key>|\s*</tool_call>)",
        close="</tool_call>",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>"
            r"(?P<value>(?:(?!<arg_key>|</arg_value>).)*?)</arg_value>"
        },
        transform=_NAMED,
    ),
    _form(  # Qwen 2.5 and 3, Hermes, SmolLM3
        open_pattern="<tool_call>",
        close_pattern=r"(?<=[\]}]\s{0,9})</tool_call>|</tool_call>(?=\s*(?:<|$))",  # arguments may contain the tag
        content="json",
    ),
    _form(  # Mistral's tokenizers since version 11; version 11 writes the id of a call too
        open_pattern=r"(?:\[TOOL_CALLS\]\s*+|^)(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>\w+)|(?P<id>))"
        r"(?:\[ARGS\])?(?=\{\s*[\"}])",
        close_pattern=r"(?=\[TOOL_CALLS\])|</s>|$",
        content="json",
        transform=_NAMED | {"id": "{id}"},
    ),
    _form(  # Llama 3, and Mistral before version 11
        open_pattern=rf"(?:\[TOOL_CALLS\]|<\|python_tag\|>)\s*+(?={_OBJECT}|{_PYTHON})"
        rf"|^(?:(?={_PYTHON})|(?={_OBJECT})(?=.*{_ARGUMENTS}))"
        rf"|[\s`](?=[\[{{])(?={_OBJECT})(?=.{{0,1000}}{_ARGUMENTS})",
        close_pattern=r"(?:<[^<>\s]*>\s*)*$",
        content="json",
    ),
)
"""forms of calls that are known without a response template of the model"""
MARKS = ("<tool_call", "</tool_call", "<function=", "</function", "<parameter=", "[TOOL_CALLS", "<|python_tag|")
"""texts that occur only in calls"""


@dataclass(frozen=True)
class CallReader:
    """Reader of the tool calls in a turn of the model. Without `form`, all forms in `FORMS` are read."""

    form: Form | None = None
    marks: tuple[str, ...] = MARKS
    """texts that occur only in calls"""
    example: str = ""
    """a call as the chat template writes it"""
    several: bool = True
    """whether the chat template writes several calls in a turn"""
    fault: str = ""
    """reason why calls cannot be read"""

    def __call__(self, text: str) -> list[Call]:
        """Return the calls in the text of a turn, special tokens included. Calls inside the reasoning are left out. A
        turn that looks like a call, but is not one in the form of the model, is a call with an error."""
        turn, forms = text.strip(), (self.form,) if self.form else FORMS
        if not any(_field(form).open_re.match(turn) for form in forms):  # an argument may contain the tag too
            turn = _REASONING_END.split(turn, 1)[-1].strip()
        for form in forms:
            calls, rest = found_in(turn, form)
            if len(calls) > 1 and not self.several:
                return [malformed("the chat template has one call in a turn")]
            if calls:
                return calls + [self._unread] * any(mark in rest for mark in self.marks)
        if any(mark in turn for mark in self.marks) or (self.form and any(found_in(turn, form)[0] for form in FORMS)):
            return [self._unread]
        return []

    @property
    def _unread(self) -> Call:
        form = f", as {self.example}" if self.example else ""
        return malformed(f"the call is not in the form of the chat template{form}")


def found_in(turn: str, form: Form) -> tuple[list[Call], str]:
    """Return the calls of a form in a turn, and the rest of the text."""
    from transformers.utils.chat_parsing import ResponseParser  # its import takes seconds

    field = _field(form)
    captures = {name: f"{{{name}}}" for name in field.open_re.groupindex}
    # the parser finds calls as text, because a malformed one would raise and hide the others
    tags = {key: value for key, value in form["fields"]["tool_calls"].items() if key.startswith(("open", "close"))}
    as_text = {**tags, "repeats": True, "content_args": {"strip": False}, "transform": ["{content}", captures]}
    fields = {name: {**each, "optional": True} for name, each in form["fields"].items()} | {"tool_calls": as_text}
    parser = ResponseParser({**form, "fields": fields}, prefix="")
    regions = [event for event in (*parser.feed(turn), *parser.finalize()[1]) if event["type"] == "region_close"]
    bodies = [region["value"] for region in regions if region["field"] == "tool_calls"]
    calls = [call for body, captured in bodies for call in _parsed(body, captured, field)]
    return calls, "\n".join(region["value"] for region in regions if region["field"] == "content")


def _field(form: Form) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(dict(form)).fields["tool_calls"]


def _parsed(body: str, captured: dict[str, str], field: Any) -> list[Call]:
    """Parse the text between two tags, which has one call or several. `field` is that of a response template."""
    import regex
    from transformers.utils.chat_parsing.content_parsers import process_field

    try:
        if field.content == "json" and not field.content_args:
            json.loads(body, object_pairs_hook=_without_repeats)
        value = process_field(body, field, captured)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"the call is not JSON: {error.__cause__ or error}"
        return [malformed(f"{reason:.300}", captured.get("name", "unknown"))]
    if field.content == "xml-inline":
        pattern = regex.compile(field.content_args["tag_pattern"], regex.DOTALL)
        left, names = pattern.sub("", body), [found["key"] for found in pattern.finditer(body)]
        if not _CLOSING.fullmatch(left):
            return [malformed(f"the call has text outside its arguments: {left.strip()!r:.100}", captured["name"])]
        if len(set(names)) < len(names) and not field.content_args.get("merge_duplicates"):
            return [malformed("the call has an argument twice", captured["name"])]
    return [_call(each) for each in (value if isinstance(value, list) else [value])]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _call(value: Any) -> Call:
    """Return the call that parsed JSON describes."""
    value = value if isinstance(value, dict) else {}
    found = value["function"] if isinstance(value.get("function"), dict) else value
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
    others = {*value, *found} - {
        "name",
        "id",
        "type",
        "function",
        "arguments" if "arguments" in found else "parameters",
    }
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return malformed('a call is a JSON object with "name" and "arguments"')
    if others:  # they may be arguments
        return malformed(f'a call is a JSON object with "name" and "arguments", without {min(others)!r:.100}', name)
    if not is_text(json.dumps([name, arguments], ensure_ascii=False)):  # a tool may return its argument
        return malformed("the call has a lone surrogate, which is not valid text")
    given = value.get("id") or found.get("id")
    return Call(name, arguments, given if isinstance(given, str) and is_text(given) else "")


def malformed(error: str, name: str = "unknown") -> Call:
    """Return a call that cannot be carried out."""
    return Call(name, {}, "", error)


def numbered(calls: Sequence[Call], before: int) -> list[Call]:
    """Give an id to each call that has none. `before` is the number of earlier calls in the episode."""
    return [call if call.id else call._replace(id=f"{before + i:09}") for i, call in enumerate(calls, 1)]


def converted(value: Any, hint: TypeAdapter[Any]) -> Any:
    """Convert an argument to its type hint. If it is text that does not fit, read it as JSON, because arguments in
    tags are always text. Raises ValidationError."""
    try:
        return hint.validate_python(value)
    except ValidationError:
        if isinstance(value, str):
            with suppress(ValidationError):
                return hint.validate_json(value)
        raise


# -- the form of the model ---------------------------------------------------------------------------------------------


def call_reader(template: Continuation) -> CallReader:
    """Return the reader for a model. It has the response template of the model's tokenizer, or the form in `FORMS` that
    its chat template writes. A call of each tool is rendered and read back. If that fails, the reader has a `fault`."""
    if not template.tools:
        return CallReader()
    asked = [Call(tool["name"], _arguments(tool)) for tool in template.tools]
    try:
        plain = template.written({"role": "assistant", "content": "-"})
        texts = [_REASONING_END.split(template.written(calling(call)))[-1].strip() for call in asked]
        form = _form_of(texts, asked, getattr(template.tokenizer, "response_template", None))
    except DataError as error:
        return CallReader(fault=f"{error}")
    except ImportError:
        return CallReader(fault="calls of tools need transformers 5.13 or later: pip install -U transformers")
    if not form:
        return CallReader(
            fault=f"tlt cannot read calls in the form of the model's chat template, {texts[0]!r:.200}: use a model of "
            "docs/environments.md, or set response_template in tokenizer_config.json (see the documentation of "
            "transformers on response parsing; trl.chat_template_utils.add_response_schema has some)"
        )
    marks = {*MARKS, *_TAG.findall(texts[0])} - {*_TAG.findall(plain)}
    example = texts[0].removesuffix(template.end.strip()).strip()
    return CallReader(form, tuple(sorted(marks)), example, _writes_two(template, asked[0]))


def _form_of(texts: Sequence[str], asked: Sequence[Call], own: Form | None) -> Form | None:
    """Return the form in which each of these texts is the call. The response template `own` is tried first."""
    for form in (*([own] if own else []), *FORMS):
        if all(_is_read(text, form, call) for text, call in zip(texts, asked, strict=True)):
            return form
    return None


def _writes_two(template: Continuation, call: Call) -> bool:
    try:
        return bool(template.written(calling(call, call._replace(id="000000002"))))
    except DataError:
        return False


def _arguments(tool: dict[str, Any]) -> dict[str, Any]:
    """Return an example of the arguments of a tool, of the types in its JSON schema."""
    values = {"integer": 7, "number": 0.5, "boolean": True, "array": [], "object": {}}
    properties = tool.get("parameters", {}).get("properties", {})
    return {
        name: schema["enum"][0] if schema.get("enum") else values.get(str(schema.get("type")), 'say "é"')
        for name, schema in properties.items()
    }


def _is_read(text: str, form: Form, call: Call) -> bool:
    """Return whether this call alone is found in the text. Arguments that are text are converted to their types."""
    try:
        ((name, arguments, _, error),) = found_in(text, form)[0]
        found = {key: converted(value, TypeAdapter(type(call.arguments[key]))) for key, value in arguments.items()}
    except (ValueError, LookupError, AttributeError, TypeError):  # other calls, or a response template without calls
        return False
    return (name, found, error) == (call.name, call.arguments, "")
