"""Merge an adapter into the weights of its base, one tensor at a time, without Megatron."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mrl.config.adapter import Adapter
from mrl.errors import InputError
from parallel.architectures.base import Rule, name_pattern
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.expected_tensors import check_tensors
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors, check_sizes
from parallel.lora.rules import adapted, adapter_pair


def merged_tensors(
    saved: SavedTensors, model: HfModel, adapter: Adapter, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor of the base in `dtype`, with the adapter's update added, layer by
    layer.

    `saved` is the checkpoint that holds the adapter's A and B. The base is first rounded to `dtype`,
    as in training. The sum is computed in fp32 and rounded again, so the bits are equal to those of
    a merged `Policy.export` of one process. Megatron's buffers (expert biases) stay in fp32.

    Raises InputError if the folder of the base holds another model or lacks a tensor.
    """
    there = HfModel.read(model.path, model.named)
    if different := model.differences(there):
        raise InputError(
            f"{model.path} is not the base of the adapter: {', '.join(different)} (here: what the run "
            "had); give the base model's folder with --model PATH"
        )
    with HfTensors(model) as base:
        check_sizes(model, base)
        check_tensors(model, base)
        for layer, expert, name, rule, hf in sorted(
            _places(base, model), key=lambda place: place[:3]
        ):
            # Megatron keeps buffers in fp32.
            own = base[name].to(torch.float32 if rule.is_buffer else dtype)
            if hf in adapted(rule, adapter):
                a, b = (
                    saved[f"model.{one.megatron.format(layer=layer, expert=expert)}"].float()
                    for one in adapter_pair(rule, hf, adapter)
                )
                own = (own.float() + (b @ a) * adapter.scale).to(dtype)
            yield name, own


def _places(base: HfTensors, model: HfModel) -> Iterator[tuple[int, int, str, Rule, str]]:
    """Yield (layer, expert, HF name, rule, HF name with placeholders as in the rule) for every
    tensor of the base. `layer` is -1 for a tensor outside the layers, and `expert` is -1 for a
    tensor that is not an expert's."""
    table = model.architecture.rules(model.config)
    patterns = [(name_pattern(hf), rule, hf) for rule in table for hf in rule.hf]
    for name in base.names:
        for pattern, rule, hf in patterns:
            found = pattern.fullmatch(name)
            if found is None:
                continue
            place = found.groupdict()
            layer, expert = int(place.get("layer", -1)), int(place.get("expert", -1))
            if layer < model.sizes.num_layers:  # layers of multi-token prediction come after these
                yield layer, expert, name, rule, hf
