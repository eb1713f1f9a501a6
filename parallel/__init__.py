"""The only room that knows Megatron: sizes, groups, models, weights, the train step, checkpoints.

Importing the package does not import Megatron, so that bad input is refused at once. It silences
KNOWN_WARNINGS, because every process that imports Megatron imports this package first.
"""

import logging
import warnings

KNOWN_WARNINGS = (
    ".*Apex is not installed.*",
    ".*Transformer Engine and Apex are not installed.*",
    ".*full scope is deprecated.*",
    ".*is deprecated. Please use `torch.distributed.*",
    "`load_state_dict` is deprecated and will be removed in future versions",
    ".*`sequence_parallel` is set to `True`, but tensor model parallel size is 1.*",
)
"""Megatron's, about things that mrl has decided: they would repeat on every rank."""


def _silence() -> None:
    for text in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    # It names an MoE layer of the spec that is not Megatron's own "unknown", once a layer.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)


_silence()


def prepare() -> None:
    """Call before the first import of Megatron, so that it is at home on a machine without CUDA."""
    from parallel import cpu_mode

    cpu_mode.enable()
