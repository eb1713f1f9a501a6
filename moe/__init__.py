"""Decode, pack and replay routing traces, which record the experts that the rollout engine chose
for each token. Also compare these choices with those of the trainer's routers."""
