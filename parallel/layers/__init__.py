"""Layers that mrl puts into Megatron's models: attention, experts, dispatch, head, balancing."""
