"""Options that users of other frameworks look for."""

from __future__ import annotations

import json

import pytest

from tests.users.things import User, thing


@thing("I let the learning rate decay along a cosine to a lowest value.")
def decay_the_learning_rate(user: User) -> str:
    keys = ("optimizer.lr_decay_style=cosine", "optimizer.min_lr=1e-3", "train.num_steps=3")
    user.train("run", *keys, "train.num_steps_per_rollout=1")
    lines = (user.folder / "run/metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["lr"] for line in lines]
    assert rates == pytest.approx([3e-3, 2.5e-3, 1.5e-3]), rates
    return f"lr {rates}"
