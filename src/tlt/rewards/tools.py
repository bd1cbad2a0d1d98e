"""Python functions as tools of the model: an environment that carries out the tool calls in the model's turns."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, ClassVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tlt.config import Config
from tlt.files import is_text
from tlt.rewards.answers import RewardError
from tlt.rewards.isolated import Answering, IsolatedScore
from tlt.rewards.scores import imported
from tlt.rewards.verdicts import Verdict
from tlt.types import Prompt

_REASONING_END = "</think>"
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)  # Qwen, Hermes, SmolLM3
_BARE = re.compile(r'\[?\s*\{\s*"name"')  # Llama 3, Mistral; their markers are special tokens and not in texts
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)  # Qwen3-Coder, inside the tags
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*)", re.DOTALL)


class MalformedCall(ValueError):
    """Error for a tool call that cannot be carried out. The message is returned to the model."""


class Tools:
    """Environment with Python functions that the model may call as tools. A turn without a call is the answer, and ends
    the episode.

    A subclass lists its functions in `tools` and has a method `score`. Each function needs type hints and a docstring
    with a section `Args:`, because the chat template shows them to the model. The functions called in a turn share the
    timeout `reward.timeout_seconds`.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()

    @classmethod
    def schemas(cls, config: Config) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools, in the format that chat templates of transformers take."""
        from transformers.utils.chat_template_utils import get_json_schema  # its import takes seconds

        return [get_json_schema(function) for function in cls.tools]

    def score(self, prompt: Any, answer: str) -> float:
        """Return the reward of the episode. `answer` is the text of the model's last turn, which calls no tool.
        Subclasses implement it."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score(prompt, answer) -> float")

    def reset(self, prompt: Any) -> None:
        self.prompt = prompt
        self.scores = {"tool_calls": 0.0, "malformed_calls": 0.0, "failed_calls": 0.0}

    def step(self, text: str) -> tuple[str, bool, float]:
        """Carry out the tool calls in the text of a turn. Return (results, done, reward).

        The results are joined by newlines. If there are no calls, the episode is done and `score` gives the reward.
        Else the reward is 0."""
        calls = calls_in(text)
        if not calls:
            return "", True, self.score(self.prompt, text)
        return "\n".join(map(self._result, calls)), False, 0.0

    def _result(self, call: str) -> str:
        """Carry out a tool call and return its result as text. Errors are counted, and returned as text."""
        self.scores["tool_calls"] += 1
        try:
            name, given = parsed(call)
            function = self._function(name)
            arguments = checked(function, given)
        except MalformedCall as error:
            self.scores["malformed_calls"] += 1
            return f"Error: {error}"
        try:
            result = function(**arguments)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            if not is_text(text):
                raise ValueError("the result has a lone surrogate, which is not valid text")
            return text
        except Exception as error:
            self.scores["failed_calls"] += 1
            return f"Error: {type(error).__name__}: {error}".encode(errors="replace").decode()

    def _function(self, name: str) -> Callable[..., Any]:
        for function in self.tools:
            if function.__name__ == name:
                return function
        known = ", ".join(function.__name__ for function in self.tools)
        raise MalformedCall(f"there is no tool {name!r:.100}: the tools are {known}")


def calls_in(text: str) -> list[str]:
    """Return the texts of the tool calls in a turn of the model. Calls inside its reasoning are left out.

    Text between <tool_call> and </tool_call> is a call. If there are no such tags, a turn that begins with a JSON
    object whose first key is "name", or with a list of such objects, consists of calls."""
    turn = text.rpartition(_REASONING_END)[2]
    if tagged := _TAGGED.findall(turn):
        return tagged
    if not _BARE.match(bare := turn.strip()):
        return []
    try:
        found = json.loads(bare)
        return [json.dumps(each) for each in (found if isinstance(found, list) else [found])]
    except (ValueError, RecursionError):
        return [bare]


def parsed(call: str) -> tuple[str, dict[str, Any]]:
    """Parse the text of a tool call. Return the name of the function and its arguments. Raises MalformedCall."""
    if written := _FUNCTION.fullmatch(call):
        # one search in each part, because a pattern with both tags takes quadratic time on many open tags
        found = map(_PARAMETER.search, written[2].split("</parameter>")[:-1])
        return written[1], {match[1]: match[2].removesuffix("\n") for match in found if match}
    try:
        found = json.loads(call)
        valid = is_text(json.dumps(found, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"the call is not JSON: {error}") from None
    name = found.get("name") if isinstance(found, dict) else None
    arguments = found.get("arguments", found.get("parameters", {})) if isinstance(found, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise MalformedCall('a call is a JSON object with "name" and "arguments"')
    if not valid:  # a tool may return its argument, and a reply must be valid text
        raise MalformedCall("the call has a lone surrogate, which is not valid text")
    return name, arguments


def checked(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Validate the arguments of a tool call, and convert them to the function's type hints. Raises MalformedCall."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise MalformedCall(f"{function.__name__}: {error}") from None
    hints, found = get_type_hints(function), dict(arguments)
    for name in arguments.keys() & hints.keys():
        try:
            found[name] = _converted(arguments[name], TypeAdapter(hints[name]))
        except ValidationError as error:
            raise MalformedCall(f"{function.__name__}: {name}: {error.errors()[0]['msg']}") from None
    return found


def _converted(value: Any, hint: TypeAdapter[Any]) -> Any:
    """Convert an argument to its type hint. If it is text that does not fit, read it as JSON, because parameters in
    tags are always text. Raises ValidationError."""
    try:
        return hint.validate_python(value)
    except ValidationError:
        if isinstance(value, str):
            with suppress(ValidationError):
                return hint.validate_json(value)
        raise


def with_tools(config: Config) -> Config:
    """Return the configuration with the schemas of its environment's tools in data.chat_arguments, so that the chat
    template shows them. The schemas are read in a separate process, because the environment is user code. Raises
    RewardError."""
    if not (config.reward.environment and config.data.chat) or "tools" in config.data.chat_arguments:
        return config
    isolated = IsolatedScore(config, opens=_open_schemas)
    try:
        verdict = isolated.score_all([(Prompt(-1, "", ()), None)])[0]
    finally:
        isolated.close()
    if verdict.reply is None:
        raise RewardError(
            f"the tools of reward.environment = {config.reward.environment!r} cannot be read ({verdict.detail}): "
            "correct the environment, or raise reward.memory_mb or reward.timeout_seconds"
        )
    schemas = json.loads(verdict.reply)
    arguments = config.data.chat_arguments | ({"tools": schemas} if schemas else {})
    return config.model_copy(update={"data": config.data.model_copy(update={"chat_arguments": arguments})})


def _open_schemas(config: Config, columns: Collection[str]) -> tuple[Answering, bool]:
    """Load the environment. Return a function whose verdict has the JSON schemas of the environment's tools as its
    reply. Return also False, because the function takes one request at a time. Raises RewardError."""
    name = config.reward.environment
    assert name, "the recipe has an environment"
    made: Any = imported(name, config.reward.folder, "reward.environment", "module:Class")
    schemas = json.dumps(made.schemas(config) if hasattr(made, "schemas") else [])
    return lambda asked: [Verdict(0.0, reply=schemas)], False
