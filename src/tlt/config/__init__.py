"""Configuration: each field in one section. Unknown keys are refused with the nearest name.

It imports neither torch nor transformers, so that errors are reported at once."""

from tlt.config.data import DataConfig, TaskConfig
from tlt.config.recipe import ConfigError, load_config, parse_config, parse_section, section_of
from tlt.config.rewards import RewardConfig, RewardTerm
from tlt.config.sections import (
    ClusterConfig,
    Config,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from tlt.config.speculation import DrafterTrainConfig, SpeculationConfig

__all__ = [
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DrafterTrainConfig",
    "EngineConfig",
    "EvalConfig",
    "ModelConfig",
    "RewardConfig",
    "RewardTerm",
    "RolloutConfig",
    "SpeculationConfig",
    "TaskConfig",
    "TrainConfig",
    "load_config",
    "parse_config",
    "parse_section",
    "section_of",
]
