"""Dr.GRPO (arXiv 2503.20783): GRPO without its two biases.

It does not divide rewards by the group's std, because that favours questions that are almost always
or almost never solved. It divides the loss by a constant instead of the length of each response,
because dividing by the length favours short correct responses and long incorrect ones.
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
