"""Zero-variance groups, by hand."""

from __future__ import annotations

import torch

from mrl.algorithms.signal import zero_variance_metrics

NAN = float("nan")


def test_zero_variance_groups_are_counted_by_their_cause() -> None:
    groups = [[0.0, 0.0], [1.0, 1.0], [0.5, 0.5], [0.0, 1.0], [NAN, 1.0], [NAN, NAN], [0.2, 0.2]]
    found = zero_variance_metrics([torch.tensor(group) for group in groups])
    assert found == {
        "reward/zero_signal_groups": 6.0,
        "reward/zero_signal/unscored": 2.0,
        "reward/zero_signal/best": 1.0,
        "reward/zero_signal/worst": 1.0,
        "reward/zero_signal/equal": 2.0,
    }
    same = zero_variance_metrics([torch.ones(4), torch.ones(4)])
    assert same["reward/zero_signal/equal"] == 2.0  # neither solved nor out of reach: one reward
