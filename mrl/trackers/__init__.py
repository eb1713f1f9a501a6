"""Trackers copy metrics.jsonl to TensorBoard, Weights & Biases, MLflow, or a user-defined service."""

from mrl.trackers.check import check_trackers
from mrl.trackers.trackers import Trackers

__all__ = ["Trackers", "check_trackers"]
