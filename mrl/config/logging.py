"""Configuration of the trackers that receive the metrics of a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from mrl.config.branch import Branch


class LoggingConfig(Branch):
    trackers: tuple[str, ...] = ("jsonl",)
    """Trackers that receive the metrics in addition to metrics.jsonl, which is always written:
    tensorboard, wandb, mlflow, or your own as `file.py:Class`. `logging: [jsonl, wandb]` is short
    for `logging.trackers`."""
    project: str = Field(default="mrl", min_length=1)
    """The project in Weights & Biases, and the experiment in MLflow."""
    name: str | None = Field(default=None, min_length=1)
    """The name of the run; null takes the name of the run folder."""
    samples_per_step: int = Field(default=4, ge=0)
    """Number of samples of a step that are sent to the trackers as a table; 0 sends no tables."""
    samples_every: int = Field(default=1, ge=1)
    """Number of steps between two tables of samples."""
    wandb_mode: Literal["online", "offline"] | None = None
    """`online` uploads to Weights & Biases, `offline` only writes files. Null takes the environment
    variable WANDB_MODE, or `online` if that is not set."""
    wandb_entity: str | None = None
    """The user or team in Weights & Biases that owns the project; null takes the account's default."""
    mlflow_tracking_uri: str | None = None
    """The MLflow server or database. Null takes the environment variable MLFLOW_TRACKING_URI, or
    mlflow.db in the run folder if that is not set."""

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, given: Any) -> Any:
        return {"trackers": given} if isinstance(given, (list, tuple)) else given

    @model_validator(mode="after")
    def _no_tracker_twice(self) -> LoggingConfig:
        twice = sorted({name for name in self.trackers if self.trackers.count(name) > 1})
        if twice:
            raise ValueError(f"trackers: got {twice} more than once, expected each once")
        return self
