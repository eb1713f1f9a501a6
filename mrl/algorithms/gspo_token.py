"""GSPO-token (arXiv 2507.18071 section 4.3): GSPO whose tokens may have advantages of their own.

The ratio of a token has the value of the sequence's and the gradient of its own log-prob (eq. 14), so
with one advantage a sequence it is GSPO, value and gradient.
"""

from mrl.algorithms import gspo

RATIO, CLIP_LOW, CLIP_HIGH = gspo.RATIO, gspo.CLIP_LOW, gspo.CLIP_HIGH
READS = gspo.READS

advantages = gspo.advantages
sequence_weights = gspo.sequence_weights
loss = gspo.sequence_loss  # eq. 13
