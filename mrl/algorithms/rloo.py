"""RLOO (arXiv 2402.14740): REINFORCE with the mean of the group's other samples as the baseline.

The gradient is the advantage times `grad log p(response)`, where the log-prob of the response is a
sum over its tokens. PPO's clip limits later updates on the same rollout; it has no effect on the
first update.
"""

from mrl.algorithms import grpo
from mrl.algorithms.advantages import leave_one_out
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.ratio_loss import PPO_CLIP_KEYS

READS = PPO_CLIP_KEYS
CLIP_LOW, CLIP_HIGH = grpo.CLIP_LOW, grpo.CLIP_HIGH

advantages = leave_one_out
sequence_weights = weights_by("seq_mean_token_sum")
loss = grpo.loss
