"""Decode, pack and replay routing traces, which record the experts that the rollout engine chose for
each token, and compare them with the choices of the trainer's routers."""
