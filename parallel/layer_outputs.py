"""This module records what each layer of this rank returns, to see where two passes differ first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from parallel.model import unwrap


class LayerOutputs:
    """A context in which the hidden states of the first micro-batch are recorded, by Megatron's 1-based
    layer number.

    n rows of this rank (under sequence and context parallelism its own), h hidden size.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.layers = [layer for chunk in chunks for layer in unwrap(chunk).decoder.layers]
        self.states: dict[int, Tensor] = {}
        """[n, h] each, on the CPU: they are as large as the activations of a forward."""

    def __enter__(self) -> LayerOutputs:
        self._hooks = [layer.register_forward_hook(self._note) for layer in self.layers]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, layer: Any, inputs: Any, output: Any) -> None:
        if layer.layer_number not in self.states:
            hidden = output[0] if isinstance(output, tuple) else output
            self.states[layer.layer_number] = hidden.detach().flatten(0, 1).to("cpu", copy=True)
