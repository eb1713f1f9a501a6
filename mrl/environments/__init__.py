"""Environments of multi-turn rollouts, one per file. A recipe names its environment (see base.py).

`mrl.environments.runner` runs episodes in worker processes that can be killed.
"""

from mrl.environments.base import (
    Environment,
    Message,
    Observation,
    StepResult,
    environment_names,
    resolve_environment,
)

# EnvironmentRunner is not here: workers import this package, and start faster without it.
__all__ = [
    "Environment",
    "Message",
    "Observation",
    "StepResult",
    "environment_names",
    "resolve_environment",
]
