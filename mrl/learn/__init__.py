"""From scored sample groups to new weights: advantages, batches, log-probs, guards, updates."""
