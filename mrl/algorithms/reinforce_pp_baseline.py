"""REINFORCE++-baseline (arXiv 2501.03262): subtract from each reward the mean of its group, then
normalise over the step.

As in REINFORCE++, the mean and the std of the step are taken over its loss tokens (`WHITENS`). The
paper also adds a KL term to the loss (`kl_estimator: k2`), which is off by default here.
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
