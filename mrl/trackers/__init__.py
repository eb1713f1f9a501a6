"""Trackers get what metrics.jsonl holds: TensorBoard, Weights & Biases, MLflow, or a user's own."""

from mrl.trackers.check import check_trackers
from mrl.trackers.trackers import Trackers

__all__ = ["Trackers", "check_trackers"]
