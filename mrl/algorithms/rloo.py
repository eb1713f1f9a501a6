"""RLOO (arXiv 2402.14740): REINFORCE with the mean of the group's other samples as the baseline.

The policy gradient of a response is its advantage times `grad log p(response)`, where the log-prob
of the response is the sum over its tokens. PPO's clip affects only later updates on the same
rollout, because in the first update all ratios are 1.
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
