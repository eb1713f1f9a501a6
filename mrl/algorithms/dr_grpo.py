"""Dr.GRPO (arXiv 2503.20783): GRPO with two biases removed.

Rewards are not divided by the std of the group, because the division would favour questions that
are almost always or almost never solved. The loss of a response is divided by a constant instead of
its length, because dividing by the length favours short correct and long incorrect responses.
"""

from mrl.algorithms import grpo
from mrl.algorithms.advantages import group_centred
from mrl.algorithms.aggregation import weights_by
from mrl.algorithms.ratio_loss import PPO_CLIP_KEYS

READS = PPO_CLIP_KEYS
CLIP_LOW, CLIP_HIGH = grpo.CLIP_LOW, grpo.CLIP_HIGH

advantages = group_centred
sequence_weights = weights_by("seq_mean_token_sum_norm")
loss = grpo.loss
