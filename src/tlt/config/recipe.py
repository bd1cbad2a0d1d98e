"""Reader and writer of recipes: TOML and `--section.key value` overrides become a validated configuration, which can be
shown as TOML, with an explanation of every field."""

from __future__ import annotations

import difflib
import glob
import json
import math
import os
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import date, time
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tlt.config.section import Section, is_state
from tlt.config.section import section_of as section_class
from tlt.config.sections import Config, GenerationConfig
from tlt.files import decoded, errors_as, is_text

S = TypeVar("S", bound=BaseModel)
_WIDTH = 100  # of comments, in characters
_FORMS = {"list_type": '["a", "b"]', "dict_type": '{ name = "a" }'}
"""error of pydantic for a field that needs a list or a table -> example of its form in TOML"""


class ConfigError(ValueError):
    """Error in the configuration. The message is one sentence that names the key and the remedy."""


def load_config(recipe: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML recipe, apply `--section.key value` overrides, and validate. If `recipe` is None, start from the
    defaults. Raises ConfigError."""
    if recipe is None:
        return _resolve_paths(parse_config(_overridden({}, overrides), source="the command line"), Path())
    path = Path(recipe)
    if not path.is_file():
        raise ConfigError(
            f"there is no recipe at {path}: give the path of a TOML file, such as recipes/quickstart.toml"
        )
    with errors_as(ConfigError, f"{path} is not valid TOML"):
        tree = tomllib.loads(decoded(path.read_bytes()))
    _overridden(tree, overrides)
    _refuse_state(tree)
    source = f"{path} or the command line" if overrides else str(path)
    return _resolve_paths(parse_config(tree, source), path.parent)


def config_of_run(tree: Mapping[str, Any], overrides: Sequence[str], **sections: Mapping[str, Any]) -> Config:
    """Return the configuration of a run, which `tree` has, with other values: first fields of `sections`, then
    `--section.key value` overrides. Raises ConfigError."""
    changed = {**tree, **{name: {**tree[name], **values} for name, values in sections.items()}}
    return parse_config(_overridden(deepcopy(changed), overrides), "the command line")


def load_generation(model: str, overrides: Sequence[str]) -> tuple[GenerationConfig, dict[str, Any]]:
    """Return the configuration of `tlt generate`, and the fields of [data] that were given, not yet validated. Without
    a drafter it is `suffix`, or the learned one if its folder is given. Raises ConfigError."""
    tree = _overridden({"model": {"path": model}}, overrides)
    data, speculation = tree.pop("data", {}), tree.setdefault("speculation", {})
    speculation.setdefault("drafter", "eagle" if speculation.get("path") else "suffix")
    return parse_section(GenerationConfig, tree, "the command line"), data


def _refuse_state(tree: dict[str, Any]) -> None:
    for section, field in Config.model_fields.items():
        for name, inner in (section_class(field) or Section).model_fields.items():
            if is_state(inner) and isinstance(tree.get(section), dict) and name in tree[section]:
                raise ConfigError(f"{section}.{name} is set by the run: remove it")


def _overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for key, text in _pairs(overrides):
        _assign(tree, key, text)
    return tree


def _resolve_paths(config: Config, recipe_folder: Path) -> Config:
    """Resolve the relative paths of a configuration: first in the recipe's folder, then in the working directory."""

    def resolve(path: str) -> str:
        if any(char < " " for char in path):  # as in "C:\new", which TOML reads as a line break
            raise ConfigError(
                f"the path {path!r} has a control character: put a path that contains '\\' in single quotes"
            )
        near_recipe = recipe_folder / path
        with errors_as(ConfigError, f"{path[:80]} is not a valid path"):
            is_there = not Path(path).is_absolute() and (near_recipe.exists() or bool(glob.glob(str(near_recipe))))
            return os.path.normpath(near_recipe) if is_there else path

    paths = (("model", "path"), ("data", "path"), ("speculation", "path"), ("eval", "path"), ("reward", "folder"))
    found = {}
    for section, field in paths:
        values = getattr(config, section)
        if path := getattr(values, field):
            found[section] = values.model_copy(update={field: resolve(path)})
    return config.model_copy(update=found)


def parse_config(tree: dict[str, Any], source: str = "configuration") -> Config:
    """Validate a nested dict from TOML or JSON. Raises ConfigError on the first error. The error names `source`, such
    as the recipe's path."""
    return parse_section(Config, tree, source)


def parse_section(section: type[S], tree: dict[str, Any], source: str) -> S:
    """Validate one section, given as a nested dict. `source` is as in `parse_config`. Raises ConfigError on the first
    error."""
    for key, fault in _no_values(tree):
        raise ConfigError(f"{source}: {key}: {fault}")
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_sentence(error, section)}") from None


def section_of(section: type[S], values: S | Mapping[str, Any] | None, name: str) -> S:
    """Return a validated section. `values` is a section already, a mapping of its fields, or None for the defaults.
    Errors begin with `name`. Raises ConfigError."""
    return values if isinstance(values, section) else parse_section(section, dict(values or {}), name)


def _no_values(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, error) for each value that TOML or a command line may contain but no field allows."""
    if isinstance(tree, float) and not math.isfinite(tree):
        yield key, f"must be a finite number (got {tree})"
    if isinstance(tree, int) and abs(tree) >= 2**63:
        yield key, "must be a number of at most 63 bits"
    if isinstance(tree, (date, time)):
        yield key, f"must be in quotes, as text (got {tree})"
    if isinstance(tree, str) and not (is_text(tree) and "\0" not in tree):
        yield key, f"must be text (got {tree!a})"
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        yield from _no_values(value, f"{key}.{name}".lstrip("."))


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str]]:
    words: list[str] = []
    for word in overrides:
        words += word.split("=", 1) if word.startswith("--") and "=" in word else [word]
    pairs = list(zip(words[::2], words[1::2], strict=False))
    if len(words) % 2:
        flag = next((flag for flag, value in pairs if value.startswith("--")), words[-1])
        _refuse_no_field(flag)
        raise ConfigError(f"{flag} has no value: give it as --section.key value")
    for flag, _ in pairs:
        _refuse_no_field(flag)
    return [(flag[2:], value) for flag, value in pairs]


def _refuse_no_field(flag: str) -> None:
    """Raise ConfigError if an option is not of the form --section.key."""
    if flag.startswith("--") and "." in flag:
        return
    meant = " or ".join(f"--{key}" for key in _fields_like(flag.lstrip("-").replace("-", "_")))
    hint = f"did you mean {meant}?" if meant else "--help shows the options, and a field is --section.key value"
    raise ConfigError(f"unknown option {flag}: {hint}")


def _assign(tree: dict[str, Any], dotted: str, text: str) -> None:
    *sections, key = keys = dotted.split(".")
    node, value = tree, _typed(text, _annotation(keys))
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--{dotted}: {section} is a value, not a section")
    node[key] = value


def _typed(text: str, annotation: Any) -> Any:
    """Return the value of an override: the text parsed as TOML. If it is not TOML (a bare word), or if a field of type
    str would get another type, return the text itself. For an optional field an empty text means None."""
    if not text and type(None) in get_args(annotation):
        return None
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text
    return text if annotation in (str, str | None) and not isinstance(value, str) else value


def _annotation(keys: Sequence[str]) -> Any:
    """Return the type of the field that these keys lead to; None if there is no such field."""
    found: Any = Config
    for key in keys:
        field = getattr(found, "model_fields", {}).get(key)
        found = field.annotation if field else None
    return found


def _sentence(error: ValidationError, section: type[BaseModel]) -> str:
    fault = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        *table, name = map(str, fault["loc"])
        return f"unknown key {where}{_hint(name, table, _fields_at(section, fault['loc'][:-1]))}"
    if fault["type"] == "missing":
        return f"{where} is missing: set it in the recipe or give --{where} VALUE"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] in _FORMS and isinstance(fault["input"], str):
        is_table = _table_of(_annotation(where.split(".")))
        form = '[{ name = "a" }]' if is_table else _FORMS[fault["type"]]
        message += f" in TOML, such as --{where} '{form}'"
    return (
        f"{where}: {message[0].lower()}{message[1:]} (got {json.dumps(fault['input'], default=str)})"
        if where and fault["type"] != "value_error"
        else message
    )


def _hint(name: str, table: Sequence[str], known: Sequence[str]) -> str:
    """Return the end of the error for the unknown key `name`: the field that it may mean, or the `known` keys of its
    table. `table`: keys that lead to the table."""
    if elsewhere := [key for last, key in _fields_by_name(Config) if last == name]:
        return f": the field is {' or '.join(elsewhere)}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f": did you mean {'.'.join([*table, near[0]])}?" if near else f"; known here: {', '.join(known)}"


def _fields_like(name: str) -> list[str]:
    """Return the dotted names of the fields that the user may mean by `name`, which has no section and may be
    misspelled."""
    names = list(_fields_by_name(Config))
    near = difflib.get_close_matches(name, [last for last, _ in names], n=1)
    return sorted((key for last, key in names if last in near), key=lambda key: key.count("."))


def _fields_by_name(model: type[BaseModel], table: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, dotted name) of each field, such as ("steps", "train.steps")."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields_by_name(field.annotation, f"{table}{name}.")
        elif not is_state(field):
            yield name, table + name


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    for name in (part for part in location if isinstance(part, str)):
        annotation: Any = model.model_fields[name].annotation
        model = _table_of(annotation) or annotation
    return list(model.model_fields)


# -- a recipe as TOML --------------------------------------------------------------------------------------------------


SECTIONS: dict[str, type[BaseModel]] = {
    name: section for name, field in Config.model_fields.items() if (section := section_class(field))
}


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
        if table := _table_of(field.annotation):
            tables += ["", *_note(field), f"# [[{path}.{name}]]"]
            for each, entry in table.model_fields.items():
                tables += [*_note(entry), f"# {_assignment(each, entry)}"]
            continue
        if inner := section_class(field):
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
        if _table_of(field.annotation):
            for each in value:
                given = each.model_dump(exclude_unset=True)
                tables += ["", f"[[{path}.{name}]]", *(f"{key} = {_toml(v)}" for key, v in given.items())]
        elif section_class(field):
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


def _table_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class of a field that is a list of tables; None for other fields."""
    return next((p for p in get_args(annotation) if isinstance(p, type) and issubclass(p, BaseModel)), None)


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
