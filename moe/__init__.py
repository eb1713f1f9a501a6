"""Routing traces, the experts that the rollout engine chose for each token: decoding, a compact form,
alignment to micro-batches, replay, and statistics."""
