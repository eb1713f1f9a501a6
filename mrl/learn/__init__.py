"""Train on scored groups: advantages, micro-batches, passes before the update, guards and updates."""
