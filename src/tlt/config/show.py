"""Configuration as TOML: the default recipe with an explanation of every field, or a recipe with all values."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tlt.config.section import is_state, section_of
from tlt.config.sections import Config

SECTIONS: dict[str, type[BaseModel]] = {
    name: section for name, field in Config.model_fields.items() if (section := section_of(field))
}
_WIDTH = 100


def commented(section: str | None = None) -> str:
    """Return the default recipe, or one section of it, as TOML with an explanation of each field. It is a valid recipe
    when the required fields are set."""
    names = [section] if section else list(SECTIONS)
    return "\n\n".join("\n".join(_commented(name, SECTIONS[name])) for name in names) + "\n"


def resolved(config: Config) -> str:
    """Return every field of a recipe as TOML. A comment shows the default of each field that differs from it."""
    return "\n\n".join("\n".join(_resolved(name, getattr(config, name))) for name in SECTIONS) + "\n"


def _commented(path: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"[{path}]"
    if about := vars(model).get("__doc__"):
        yield from (*(f"# {line}" for line in textwrap.wrap(about, _WIDTH)), "")
    tables: list[str] = []
    for name, field in model.model_fields.items():
        if is_state(field):
            continue
        if table := _table_of(field):
            tables += ["", *_note(field), f"# [[{path}.{name}]]"]
            for each, entry in table.model_fields.items():
                tables += [*_note(entry), f"# {_assignment(each, entry)}"]
            continue
        if inner := section_of(field):
            tables += ["", *_commented(f"{path}.{name}", inner)]
            continue
        yield from _note(field)
        left_out = field.is_required() or _default(field) is None
        yield f"# {_assignment(name, field)}" if left_out else _assignment(name, field)
    yield from tables


def _resolved(path: str, values: BaseModel) -> Iterator[str]:
    yield f"[{path}]"
    tables: list[str] = []
    for name, field in type(values).model_fields.items():
        value = getattr(values, name)
        if is_state(field):
            continue
        if _table_of(field):
            for each in value:
                given = each.model_dump(exclude_unset=True)
                tables += ["", f"[[{path}.{name}]]", *(f"{key} = {_toml(v)}" for key, v in given.items())]
        elif section_of(field):
            tables += ["", *_resolved(f"{path}.{name}", value)]
        elif value is not None:
            default = None if field.is_required() else _default(field)
            differs = not field.is_required() and value != default
            was = "not set" if default is None else _toml(default)
            yield f"{name} = {_toml(value)}" + (f"  # default: {was}" if differs else "")
        elif not field.is_required() and _default(field) is not None:
            yield f"# {name} is not set"
    yield from tables


def _note(field: FieldInfo) -> list[str]:
    """Return TOML comment lines with the explanation of a configuration field and its choices."""
    text = " ".join((field.description or "").split())
    choices = [json.dumps(choice) for choice in _choices(field.annotation)]
    missing = [choice for choice in choices if json.loads(choice) not in text] if choices else []
    if missing:
        text = f"{text} One of {', '.join(choices)}.".strip()
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]


def _choices(annotation: Any) -> Sequence[Any]:
    """Return the choices of all `Literal` types in a type annotation."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section class of a field that is a list of tables; None for other fields."""
    inner = get_args(field.annotation)
    return inner[0] if inner and isinstance(inner[0], type) and issubclass(inner[0], BaseModel) else None


def _assignment(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return f"{name} =  (required)"
    default = _default(field)
    return f"{name} =  (not set)" if default is None else f"{name} = {_toml(default)}"


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool | int) else repr(value)
