"""Python functions as tools of the model: an environment that carries out the tool calls in the model's turns."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tlt.config import Config
from tlt.data.continuation import Call, calling, reply_text
from tlt.environments.call_reader import CallReader, converted, numbered
from tlt.environments.instances import ReplyText, written
from tlt.files import is_text
from tlt.rewards.answers import RewardError
from tlt.rewards.isolated import Answering, IsolatedScore
from tlt.rewards.scores import imported
from tlt.rewards.verdicts import Verdict
from tlt.types import Prompt


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
    call_reader: ClassVar[CallReader] = CallReader()
    """reader of the calls that the model writes; a run sets it to that of its model"""

    @classmethod
    def schemas(cls) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools, in the format that chat templates of transformers take. Raises
        ValueError if the class has no `score`, if two tools have the same name, or if a tool cannot be called with the
        arguments in its schema."""
        from transformers.utils.chat_template_utils import get_json_schema  # its import takes seconds

        if (cls.score, cls.step) == (Tools.score, Tools.step):
            raise ValueError(f"{cls.__name__} has no reward: give it a method score(prompt, answer) -> float")
        names = [function.__name__ for function in cls.tools]
        if several := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{cls.__name__} has several tools of the name {several[0]}: rename all but one")
        schemas = [get_json_schema(function) for function in cls.tools]
        for function, name, schema in zip(cls.tools, names, schemas, strict=True):
            try:
                inspect.signature(function).bind(**schema["function"]["parameters"]["properties"])
            except TypeError as error:
                raise ValueError(
                    f"the tool {name} of {cls.__name__} cannot be called ({error}): write a function outside the class"
                ) from None
        return schemas

    def score(self, prompt: Any, answer: str) -> float:
        """Return the reward of the episode. `answer` is the text of the model's last turn, which calls no tool.
        Subclasses implement it."""
        raise NotImplementedError

    def reset(self, prompt: Any) -> None:
        self.prompt = prompt
        self.scores = {"tool_calls": 0.0, "malformed_calls": 0.0, "failed_calls": 0.0}

    def step(self, text: str) -> tuple[str, bool, float]:
        """Carry out the tool calls in the text of a turn. Return (results, done, reward).

        The results are joined by newlines. If there are no calls, the episode is done and `score` gives the reward.
        Else the reward is 0."""
        calls = numbered(self.call_reader(written(text)), int(self.scores["tool_calls"]))
        if not calls:
            return "", True, self.score(self.prompt, text)
        results = [call.result(self._result(call)) for call in calls]
        return ReplyText("\n".join(each["content"] for each in results), [calling(*calls), *results]), False, 0.0

    def _result(self, call: Call) -> str:
        """Carry out a tool call and return its result as text. Errors are counted, and returned as text."""
        self.scores["tool_calls"] += 1
        try:
            if call.error:
                raise MalformedCall(call.error)
            function = self._function(call.name)
            arguments = checked(function, call.arguments)
        except MalformedCall as error:
            self.scores["malformed_calls"] += 1
            return f"Error: {error}"
        try:
            result = function(**arguments)
            if inspect.isawaitable(result):
                result = _runner.run(_awaited(result))
            text = result if isinstance(result, str) else _json(result)
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


_runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # one event loop, because clients belong to one


async def _awaited(result: Any) -> Any:
    return await result


def _json(result: Any) -> str:
    """Return a result as JSON, or as str() writes it if JSON has no form for it, such as for a number of numpy."""
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def checked(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Validate the arguments of a tool call, and convert them to the function's type hints. Raises MalformedCall."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise MalformedCall(f"{function.__name__}: {error}") from None
    hints, found = get_type_hints(function), dict(arguments)
    for name in arguments.keys() & hints.keys():
        try:
            found[name] = converted(arguments[name], TypeAdapter(hints[name]))
        except ValidationError as error:
            raise MalformedCall(f"{function.__name__}: {name}: {error.errors()[0]['msg']}") from None
    return found


def with_tools(config: Config) -> Config:
    """Return the configuration with the schemas of its environment's tools in data.chat_arguments, so that the chat
    template shows them. The schemas are read in a separate process, because the environment is user code. Raises
    RewardError, also if data.chat_arguments has other tools."""
    if not (config.reward.environment and config.data.chat):
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
    schemas = json.loads(reply_text(verdict.reply))
    if schemas and config.data.chat_arguments.get("tools", schemas) != schemas:
        raise RewardError(
            f"data.chat_arguments.tools would hide the tools of reward.environment = {config.reward.environment!r}: "
            "remove it"
        )
    arguments = config.data.chat_arguments | ({"tools": schemas} if schemas else {})
    return config.model_copy(update={"data": config.data.model_copy(update={"chat_arguments": arguments})})


def _open_schemas(config: Config, columns: Collection[str]) -> tuple[Answering, bool]:
    """Load the environment. Return a function whose verdict has the JSON schemas of the environment's tools as its
    reply. Return also False, because the function takes one request at a time. Raises RewardError."""
    name = config.reward.environment
    assert name, "the recipe has an environment"
    made: Any = imported(name, config.reward.folder, "reward.environment", "module:Class")
    schemas = json.dumps(made.schemas() if hasattr(made, "schemas") else [])
    return lambda asked: [Verdict(0.0, reply=schemas)], False
