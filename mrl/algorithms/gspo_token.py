"""GSPO-token (arXiv 2507.18071 section 4.3): GSPO with token-level advantages.

The ratio of every token has the value of its sequence's ratio, but it has a gradient only with
respect to the log-prob of the token itself (eq. 14). If all tokens of a sequence have the same
advantage, the loss and its gradient are the same as in GSPO. With `algorithm.turn_rewards` the
advantages differ between turns, as in GRPO with process supervision (arXiv 2402.03300 section
4.1.3).
"""

from mrl.algorithms import gspo
from mrl.algorithms.advantages import group_normalised_turns

RATIO, CLIP_LOW, CLIP_HIGH = gspo.RATIO, gspo.CLIP_LOW, gspo.CLIP_HIGH
READS = (*gspo.READS, "turn_rewards")

advantages = gspo.advantages
turn_rewards = group_normalised_turns
sequence_weights = gspo.sequence_weights
loss = gspo.sequence_loss  # eq. 13
