"""The complete recipe, composed of its sections."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from mrl.config.algorithm import AlgorithmConfig
from mrl.config.asynchronous import AsyncConfig
from mrl.config.branch import Branch
from mrl.config.critic import CriticConfig
from mrl.config.data import ENVIRONMENT_TASKS, DataConfig
from mrl.config.diagnosis import DiagnosisConfig
from mrl.config.evaluation import EvalConfig
from mrl.config.guards import GuardConfig
from mrl.config.logging import LoggingConfig
from mrl.config.lora import LoraConfig
from mrl.config.profiling import ProfileConfig
from mrl.config.reward import Rewards
from mrl.config.rollout import EnvironmentConfig, RolloutConfig
from mrl.config.training import (
    CheckpointConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    ParallelConfig,
    SftConfig,
    TrainConfig,
)
from mrl.config.watch import WatchConfig


class DebugConfig(Branch):
    save_rollouts: bool = False
    """Write all tensors of each rollout to rollouts/step_*.safetensors, so that another run can train
    on them with `load_rollouts`."""
    load_rollouts: str | None = None
    """The `rollouts` folder of another run. The run trains on these rollouts and starts no engine."""
    rollout_only: bool = False
    """Generate and score samples, but do not train."""


class Recipe(Branch):
    model_config = ConfigDict(serialize_by_alias=True)  # `async` is a Python keyword

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """Train low-rank updates of the model instead of its weights; see docs/lora.md."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of Megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig,
    under their own names, for policy and critic; see docs/megatron.md."""
    rollout: RolloutConfig
    asynchronous: AsyncConfig = Field(default=AsyncConfig(), alias="async")
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    moe: MoeConfig = MoeConfig()
    eval: EvalConfig = EvalConfig()
    guards: GuardConfig = GuardConfig()
    watch: WatchConfig = WatchConfig()
    reward: Rewards | None = None
    """The reward for the samples: a file of mrl/rewards/, `file.py:func`, `package.module:func`,
    the address of a reward server (`http://host:port`) or a reward model (`reward_model:folder`).
    It may also be a list of these with weights; the reward is then their weighted sum. See
    docs/rewards.md."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for one call of the reward function, in seconds. A call that takes longer is
    killed, and its samples are masked."""
    environment: EnvironmentConfig | None = None
    """The environment with which the policy interacts over several turns. It replaces `reward`, except
    for `environment.mcp`."""
    data: DataConfig
    sft: SftConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    diagnosis: DiagnosisConfig = DiagnosisConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: ProfileConfig = ProfileConfig()
    debug: DebugConfig = DebugConfig()
    output_dir: str = Field(min_length=1)
    """The run folder. If it contains a run, that run is resumed."""
    seed: int = 0
    """Seed of the order of the prompts, of the sampling, and of all other random numbers."""

    @model_validator(mode="before")
    @classmethod
    def _tasks_as_data(cls, tree: Any) -> Any:
        """Take the tasks of `environment.verifiers` if no data is given."""
        if not isinstance(tree, dict) or not isinstance(tree.get("environment"), dict):
            return tree
        data = tree.get("data") or {}
        is_open = isinstance(data, dict) and not (data.get("path") or data.get("sources"))
        if tree["environment"].get("verifiers") and is_open:
            return {**tree, "data": {**data, "path": ENVIRONMENT_TASKS}}
        return tree

    @field_validator("seed")
    @classmethod
    def _fits_generators(cls, value: int) -> int:
        if abs(value) > 2**62:
            raise ValueError("expected a number of at most 62 bits, as random generators take")
        return value

    @property
    def longest_wait_s(self) -> float:
        """Timeout in seconds for a rank that waits for another rank: 600, plus the larger of
        `rollout.start_timeout_s` and `(3 + number of evaluation sets) x rollout.request_timeout_s`."""
        num_calls = 3 + len(self.eval.sets)
        return 600 + max(self.rollout.start_timeout_s, num_calls * self.rollout.request_timeout_s)

    @property
    def captures_routes(self) -> bool:
        """Whether the engine returns the experts that its router chose for each token."""
        return self.moe.routing_replay == "r3" or self.diagnosis.capture_routes
