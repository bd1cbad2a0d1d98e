"""Loader of environments of the package `verifiers` (version 0.4, module `verifiers.v1`) and of their prompts."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

from tlt.config import DataConfig
from tlt.data.tables import DataError
from tlt_rl import install_hint

Message = dict[str, Any]


class Loaded:
    """Environment of the package verifiers, with its tool sets and the tasks that have been loaded so far."""

    def __init__(self, env: Any) -> None:
        self.env, taskset = env, env.taskset
        self.toolsets = [*taskset.toolsets(taskset.config), *taskset.task_type().toolsets(taskset.config.task)]
        self._tasks: list[Any] = []
        self._more: Iterator[Any] = iter(taskset)

    def tasks(self, count: int) -> list[Any]:
        """Return the first `count` tasks of the environment, or all tasks if it has fewer."""
        self._tasks += islice(self._more, max(0, count - len(self._tasks)))
        return self._tasks[:count]


def loaded(config: DataConfig) -> Loaded:
    """Return the environment of verifiers that data.environment names. Raises DataError."""
    assert config.environment, "the recipe has an environment of verifiers"
    return load(config.environment, json.dumps(config.environment_arguments, sort_keys=True))


@cache
def load(name: str, arguments: str) -> Loaded:
    """Load an environment of verifiers by its name. `arguments` has the settings of its taskset as JSON text. Raises
    DataError if it cannot be loaded, or if it needs features that tlt does not support."""
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError:
        raise DataError(f"data.environment needs the package verifiers: {install_hint('verifiers')}") from None
    settings: dict[str, Any] = {"taskset": {"id": name, **json.loads(arguments)}}
    try:
        agents = agent_config_fields(resolve_env_config(settings))
        no_program = {agent: {"harness": {"id": "null"}} for agent in agents}
        found = Loaded(load_environment(resolve_env_config(settings | no_program)))
        needs = [*_needs(found), *(["several models"] if len(agents) > 1 else [])]
    except Exception as error:  # an error in the code of the environment
        raise DataError(f"data.environment = {name!r} cannot be loaded ({type(error).__name__}: {error})") from error
    if needs:
        raise DataError(f"data.environment = {name!r} needs {needs[0]}, which tlt does not support: use another one")
    return found


def _needs(found: Loaded) -> Iterator[str]:
    """Yield a description of each feature of verifiers that an environment needs but tlt does not support."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls
    from verifiers.v1.utils.decorators import discover_decorated

    kind = found.env.taskset.task_type()
    if kind.NEEDS_CONTAINER or kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize:
        yield "a container or sandbox (NEEDS_CONTAINER, setup or finalize)"
    if type(found.env).start is not vf.Env.start:
        yield "a service of its own (start)"
    if any(state_cls(type(toolset)) is not vf.State for toolset in found.toolsets):
        yield "a state that its tools share"
    for task in found.tasks(1):
        if task.data.prompt is None:
            yield "a user who opens the conversation (a task without a prompt)"
        if task.hooks("stop") or discover_decorated(task, "intercept"):
            yield "hooks of the agent (stop or intercept)"
        hooks = [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
        runtimes = [inspect.signature(hook).parameters.get("runtime") for hook in hooks]
        if any(runtime and runtime.default is inspect.Parameter.empty for runtime in runtimes):
            yield "a sandbox for its rewards (runtime)"


def rows(config: DataConfig) -> Iterator[tuple[str | list[Message], dict[str, Any]]]:
    """Yield (prompt, data for its environment) for the first data.size tasks of data.environment. The prompt is a list
    of messages if data.chat is true, else text. Raises DataError."""
    name, arguments = config.environment, json.dumps(config.environment_arguments, sort_keys=True)
    for index, task in enumerate(loaded(config).tasks(config.size)):
        data = {"environment": name, "arguments": arguments, "index": index, "key": task.key}
        messages = [message.model_dump(exclude_none=True) for message in opening(task)]
        yield messages if config.chat else "\n\n".join(message["content"] for message in messages), data


def opening(task: Any) -> list[Any]:
    """Return the first messages of a task, as objects of verifiers: its system message, if any, and its prompt."""
    import verifiers.v1 as vf

    prompt, system = task.data.prompt, task.data.system_prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    return [*([vf.SystemMessage(content=system)] if system else []), *messages]
