"""GSPO-token (arXiv 2507.18071 section 4.3): GSPO whose tokens may have advantages of their own.

The ratio of a token has the value of the sequence's and the gradient of its own log-prob (eq. 14), so
with one advantage a sequence it is GSPO, value and gradient. They have advantages of their own with
`algorithm.turn_rewards`: those of GRPO with process supervision (arXiv 2402.03300 section 4.1.3).
"""

from mrl.algorithms import gspo
from mrl.algorithms.advantages import group_normalised_turns

RATIO, CLIP_LOW, CLIP_HIGH = gspo.RATIO, gspo.CLIP_LOW, gspo.CLIP_HIGH
READS = (*gspo.READS, "turn_rewards")

advantages = gspo.advantages
turn_rewards = group_normalised_turns
sequence_weights = gspo.sequence_weights
loss = gspo.sequence_loss  # eq. 13
