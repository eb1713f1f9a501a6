"""This room makes new weights from scored groups: advantages, batches, log-probs, guards, updates."""
