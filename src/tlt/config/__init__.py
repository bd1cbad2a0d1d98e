"""Configuration of a run, in sections such as [model] and [train]. An unknown key is an error that names the nearest
known key.

This package imports neither torch nor transformers, so that errors in a recipe are reported at once."""

from tlt.config.data import DataConfig, TaskConfig
from tlt.config.recipe import (
    ConfigError,
    config_of_run,
    load_config,
    load_generation,
    parse_config,
    parse_section,
    section_of,
)
from tlt.config.rewards import RewardConfig, RewardTerm
from tlt.config.sections import (
    ClusterConfig,
    Config,
    DrafterTrainConfig,
    EngineConfig,
    EvalConfig,
    GenerationConfig,
    ModelConfig,
    RolloutConfig,
    SpeculationConfig,
    TrainConfig,
)

__all__ = [
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DrafterTrainConfig",
    "EngineConfig",
    "EvalConfig",
    "GenerationConfig",
    "ModelConfig",
    "RewardConfig",
    "RewardTerm",
    "RolloutConfig",
    "SpeculationConfig",
    "TaskConfig",
    "TrainConfig",
    "config_of_run",
    "load_config",
    "load_generation",
    "parse_config",
    "parse_section",
    "section_of",
]
