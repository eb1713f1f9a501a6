"""Holds the environments of multi-turn rollouts: one file each, found by name. See base.py.

`mrl.environments.runner` keeps their episodes in killable worker processes.
"""

from mrl.environments.base import (
    Environment,
    Message,
    Observation,
    StepResult,
    environment_names,
    resolve_environment,
)

# Not EnvironmentRunner: user code imports this package, and the workers start faster without.
__all__ = [
    "Environment",
    "Message",
    "Observation",
    "StepResult",
    "environment_names",
    "resolve_environment",
]
