"""REINFORCE++-baseline (arXiv 2501.03262): subtract the group's mean, then normalise over the step.

The step's mean and std are taken over its loss tokens, as in REINFORCE++ (`WHITENS`). The paper
also adds a KL term with `kl_estimator: k2` to the loss.
"""

from __future__ import annotations

from mrl.algorithms import grpo
from mrl.algorithms.advantages import group_centred
from mrl.algorithms.aggregation import weights_by

WHITENS = True
READS = grpo.READS
CLIP_LOW, CLIP_HIGH = grpo.CLIP_LOW, grpo.CLIP_HIGH

advantages = group_centred
sequence_weights = weights_by("token_mean")
loss = grpo.loss
