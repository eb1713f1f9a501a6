"""The recipe: one YAML file plus dotted `key=value` overrides, read into frozen objects.

An unknown key is an error, and the message suggests a known key. Each section of a recipe is a
subclass of `Branch`.
"""

from mrl.config.algorithm import AlgorithmConfig, MaskConfig
from mrl.config.branch import Branch
from mrl.config.critic import CriticConfig
from mrl.config.data import DataConfig, SourceConfig
from mrl.config.diagnosis import DiagnosisConfig
from mrl.config.evaluation import EvalConfig, EvalSetConfig
from mrl.config.guards import GuardConfig
from mrl.config.load import dump_recipe, load_recipe, load_service
from mrl.config.logging import LoggingConfig
from mrl.config.lora import LoraConfig
from mrl.config.recipe import DebugConfig, Recipe
from mrl.config.reward import RewardConfig
from mrl.config.rollout import EnvironmentConfig, RolloutConfig, SharedRolloutConfig
from mrl.config.service import ServiceConfig
from mrl.config.training import (
    CheckpointConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    ParallelConfig,
    SftConfig,
    TrainConfig,
)

__all__ = [
    "AlgorithmConfig",
    "Branch",
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "DebugConfig",
    "DiagnosisConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalSetConfig",
    "GuardConfig",
    "LoggingConfig",
    "LoraConfig",
    "MaskConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Recipe",
    "RewardConfig",
    "RolloutConfig",
    "ServiceConfig",
    "SftConfig",
    "SharedRolloutConfig",
    "SourceConfig",
    "TrainConfig",
    "dump_recipe",
    "load_recipe",
    "load_service",
]
