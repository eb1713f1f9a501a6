"""Dr.GRPO (arXiv 2503.20783) is GRPO without its two biases.

No division by the group's std, which favours questions that are almost always or never solved, and a
constant in the place of each answer's length, which favours short right and long wrong answers.
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
