"""Loader of environments of the package `verifiers` (0.4, its `verifiers.v1`), and of their prompts."""

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
    """Environment of verifiers with the tasks loaded so far."""

    def __init__(self, env: Any) -> None:
        self.env, taskset = env, env.taskset
        self.toolsets = [*taskset.toolsets(taskset.config), *taskset.task_type().toolsets(taskset.config.task)]
        self._tasks: list[Any] = []
        self._more: Iterator[Any] = iter(taskset)

    def tasks(self, count: int) -> list[Any]:
        """Return the first tasks, at most `count`."""
        self._tasks += islice(self._more, max(0, count - len(self._tasks)))
        return self._tasks[:count]


def loaded(config: DataConfig) -> Loaded:
    """Return the environment that a recipe names. Raises DataError."""
    assert config.environment, "the recipe has an environment of verifiers"
    return load(config.environment, json.dumps(config.environment_arguments, sort_keys=True))


@cache
def load(name: str, arguments: str) -> Loaded:
    """Return an environment by its name and the settings of its taskset as JSON. Raises DataError."""
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
    except Exception as error:  # of the environment's own code
        raise DataError(f"data.environment = {name!r} cannot be loaded ({type(error).__name__}: {error})") from error
    if needs:
        raise DataError(f"data.environment = {name!r} needs {needs[0]}, which tlt does not support: use another")
    return found


def _needs(found: Loaded) -> Iterator[str]:
    """Yield the features of verifiers that an environment needs and tlt does not support."""
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
    """Yield prompt and data of the first `data.size` tasks of `data.environment`. Raises DataError."""
    name, arguments = config.environment, json.dumps(config.environment_arguments, sort_keys=True)
    for task in loaded(config).tasks(config.size):
        data = {"environment": name, "arguments": arguments, "index": task.data.idx, "key": task.key}
        messages = [message.model_dump(exclude_none=True) for message in opening(task)]
        yield messages if config.chat else "\n\n".join(message["content"] for message in messages), data


def opening(task: Any) -> list[Any]:
    """Return the messages of verifiers with which a task begins."""
    import verifiers.v1 as vf

    prompt, system = task.data.prompt, task.data.system_prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    return [*([vf.SystemMessage(content=system)] if system else []), *messages]
