"""All code that uses Megatron: layouts, models, weights, training steps, checkpoints.

Importing this package does not import Megatron, so mrl can refuse bad input quickly. The import
does silence the warnings in KNOWN_WARNINGS, because every process that uses Megatron imports this
package first.
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
"""Patterns for Megatron's warnings about choices that mrl makes on purpose. Every rank would repeat
these warnings."""


def _silence() -> None:
    for text in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    # It warns of an "Unknown MLP type" for every MoE layer whose class is not Megatron's own.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)


_silence()


def prepare() -> None:
    """Prepare this process for Megatron, with or without CUDA. Call this before Megatron's first
    import."""
    from parallel import cpu_mode

    cpu_mode.enable()
