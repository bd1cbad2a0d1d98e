"""tlt: faster RL training of reasoning LLMs without changing a single token.

The names in `__all__` are the public interface and follow semantic versioning. The command line uses them too. Each
name is imported at its first use, so that `import tlt` is fast."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlt.build import load_engine
    from tlt.commands.draft import train_drafter
    from tlt.config import Config, load_config
    from tlt.engine.engine import Engine
    from tlt.environments.tools import Tools
    from tlt.rl.policy import Policy
    from tlt.rl.sharded import make_policy
    from tlt.run.train import train
    from tlt.sampling import make_requests
    from tlt.types import Prompt, Request, Response, SamplingParams, TrainBatch

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Engine",
    "Policy",
    "Prompt",
    "Request",
    "Response",
    "SamplingParams",
    "Tools",
    "TrainBatch",
    "load_config",
    "load_engine",
    "make_policy",
    "make_requests",
    "train",
    "train_drafter",
]

_HOMES = {
    "tlt.build": ("load_engine",),
    "tlt.config": ("Config", "load_config"),
    "tlt.commands.draft": ("train_drafter",),
    "tlt.engine.engine": ("Engine",),
    "tlt.environments.tools": ("Tools",),
    "tlt.rl.sharded": ("make_policy",),
    "tlt.rl.policy": ("Policy",),
    "tlt.run.train": ("train",),
    "tlt.sampling": ("make_requests",),
    "tlt.types": ("Prompt", "Request", "Response", "SamplingParams", "TrainBatch"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tlt' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
