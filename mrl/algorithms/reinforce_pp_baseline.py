"""REINFORCE++-baseline (arXiv 2501.03262): the group's mean is taken off first, then the step's std.

The paper adds `kl_estimator: k2` to the loss.
"""

from __future__ import annotations

from mrl.algorithms import grpo
from mrl.algorithms.advantages import centred_then_batch_normalised
from mrl.algorithms.aggregation import weights_by

READS = grpo.READS

advantages = centred_then_batch_normalised
sequence_weights = weights_by("token_mean")
loss = grpo.loss
