"""The only room that knows Megatron: sizes, groups, models, weights, the train step, checkpoints.

Importing the package imports neither torch.distributed state nor Megatron; its modules do.
"""
