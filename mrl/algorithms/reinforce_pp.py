"""REINFORCE++ (arXiv 2501.03262): rewards normalised over the complete step, PPO's clip, no critic.

`advantages` returns the rewards unchanged. Because `WHITENS` is set, `mrl.learn.advantages`
normalises them by their mean and std over the loss tokens of the step. With `kl_in: reward`, which
the paper uses with the estimator k1, the KL penalty of each token is subtracted before this
normalisation.
"""

from __future__ import annotations

from mrl.algorithms import gae, grpo
from mrl.algorithms.advantages import raw_rewards
from mrl.algorithms.aggregation import weights_by

WHITENS = True
READS = (*grpo.READS, "turn_rewards")
CLIP_LOW, CLIP_HIGH = grpo.CLIP_LOW, grpo.CLIP_HIGH

advantages = raw_rewards
sequence_weights = weights_by("token_mean")
token_advantages = gae.monte_carlo
loss = grpo.loss
