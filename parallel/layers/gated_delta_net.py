"""Gated delta nets (arXiv 2412.06464): linear attention whose state is updated by the delta rule.

Megatron has this layer (`megatron.core.ssm.gated_delta_net`), but it refuses packed sequences, and
needs flash-linear-attention. This one takes packed batches. Convolution and state are reset at the
start of each sequence: the sequences of a bucket (`parallel.layers.attention`) are a batch of the delta
rule.

Tensor-parallel ranks have a part of the key heads each, with the value heads that belong to them. Every
rank holds the whole of the small parameters and uses the elements of its own heads; Megatron sums their
gradients over the ranks (`sequence_parallel`).

Dimensions: n packed tokens, b sequences of a bucket, s length of its longest, g key heads of this rank,
G of the model, r value heads of a key head, h = g r, d and e sizes of keys and values, H hidden size,
c = 2 g d + h e channels of the convolution, w its width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from parallel.layers.attention import PackedSequences
from parallel.layers.delta_rule import gated_delta_rule
from parallel.layers.latent_attention import ReplicatedLinear


@dataclass
class GatedDeltaNetSubmodules:
    """The linear layers that Megatron builds for one implementation."""

    linear_qkvz: Any
    """Projects onto queries, keys, values and output gates, split by rows over ranks."""
    linear_out: Any
    """Projects the outputs of all heads onto the hidden size, split by columns over ranks."""


def gated_delta_net_spec(attention: Any) -> ModuleSpec:
    """Return the spec of a gated delta net with the linear layers of `attention`, the submodules of a
    self-attention's spec."""
    return ModuleSpec(
        GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(attention.linear_qkv, attention.linear_proj),
    )


class GatedDeltaNet(torch.nn.Module):
    """The linear attention of one decoder layer, in the place of Megatron's self-attention."""

    def __init__(
        self,
        config: Any,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.config, self.layer_number = config, layer_number
        self.tp_group: Any = parallel_state.get_tensor_model_parallel_group()
        self.num_ranks, self.rank = self.tp_group.size(), self.tp_group.rank()
        self.key_size, self.value_size = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_heads = config.linear_num_key_heads // self.num_ranks
        self.ratio = config.linear_num_value_heads // config.linear_num_key_heads
        keys = config.linear_num_key_heads * self.key_size
        values = config.linear_num_value_heads * self.value_size
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.linear_qkvz = build_module(
            submodules.linear_qkvz, config.hidden_size, 2 * keys + 2 * values, **common,
            init_method=config.init_method, gather_output=False, skip_bias_add=False,
            tp_comm_buffer_name="qkv",
        )  # fmt: skip
        # Two columns a value head: cheaper to gather its output than its input once more.
        self.linear_ba = ReplicatedLinear(
            config.hidden_size, 2 * config.linear_num_value_heads, config
        )
        self.linear_out = build_module(
            submodules.linear_out, values, config.hidden_size, **common,
            init_method=config.output_layer_init_method, input_is_parallel=True,
            skip_bias_add=True, tp_comm_buffer_name="proj",
        )  # fmt: skip
        self.conv_weight = self._whole((2 * keys + values, 1, config.linear_conv_kernel_dim))
        self.dt_bias = self._whole((config.linear_num_value_heads,))
        self.A_log = self._whole((config.linear_num_value_heads,))
        self.norm_weight = self._whole((self.value_size,))

    def _whole(self, shape: tuple[int, ...]) -> torch.nn.Parameter:
        """Return a parameter of ones that every rank holds completely."""
        ones = torch.ones(shape, dtype=self.config.params_dtype, device=torch.get_default_device())
        parameter = torch.nn.Parameter(ones)
        setattr(parameter, "sequence_parallel", self.config.sequence_parallel)  # noqa: B010
        return parameter

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *args: Any,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Map hidden states [n / TP, 1, H] to [n / TP, 1, H], and None in place of a bias.

        Raises ValueError for a batch that is not packed, or in which a rank lacks the earlier rows of
        a sequence: under context parallelism, and where sequences share rows.
        """
        packed = packed_seq_params
        if packed is None or packed.layout is None or packed.context is None:
            raise ValueError("GatedDeltaNet takes packed batches, got none")
        if packed.context.places is not None:
            raise ValueError(
                "GatedDeltaNet takes whole sequences: no context parallelism and no shared prefixes"
            )
        projected, _ = self.linear_qkvz(hidden_states)
        query, key, value, gate = self._by_head(projected.squeeze(1))
        write, decay = self._write_and_decay(hidden_states)
        mixed = torch.cat([x.flatten(1) for x in (query, key, value)], -1)
        out = self._in_buckets(mixed, write, decay, packed)
        out = self._normalise(out, gate.reshape_as(out)).flatten(1)
        return self.linear_out(out.unsqueeze(1))[0], None

    def _by_head(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split [n, rows] into queries and keys [n, g, d], values and gates [n, g, r e]."""
        values = self.ratio * self.value_size
        sizes = [self.key_size, self.key_size, values, values]
        return x.unflatten(-1, (self.key_heads, -1)).split(sizes, -1)

    def _write_and_decay(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return beta [n, h] and the logs of the decays f32[n, h] of this rank's value heads."""
        both, _ = self.linear_ba(hidden_states)
        if self.config.sequence_parallel:
            both = gather_from_sequence_parallel_region(both, group=self.tp_group)
        both = self._own(both.squeeze(1).unflatten(-1, (-1, 2 * self.ratio)), 1)
        beta, step = (x.flatten(1) for x in both.chunk(2, -1))
        rate, bias = self._own(self.A_log, 0).float().exp(), self._own(self.dt_bias, 0)
        return beta.sigmoid(), -rate * F.softplus(step.float() + bias)

    def _own(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of `x` along `dim`, of which heads are the leading factor."""
        return x.chunk(self.num_ranks, dim)[self.rank]

    def _conv_weight(self) -> Tensor:
        """Return the weights [c, 1, w] of this rank's channels: those of its queries, its keys and its
        values, which are in this order in the whole weight."""
        keys = self.key_heads * self.key_size * self.num_ranks
        parts = self.conv_weight.split([keys, keys, len(self.conv_weight) - 2 * keys])
        return torch.cat([self._own(part, 0) for part in parts])

    def _in_buckets(
        self, mixed: Tensor, write: Tensor, decay: Tensor, packed: PackedSequences
    ) -> Tensor:
        """Return the delta rule's outputs [n, h, e], for mixed [n, c] before the convolution, write
        and decay [n, h]."""
        layout, weight = packed.layout, self._conv_weight()
        assert layout is not None
        laid = [layout.lay_out(x) for x in (mixed, write, decay)]
        outputs, start = [], 0
        for bucket in packed.buckets:
            rows = slice(start, start + math.prod(bucket.shape))
            x, beta, g = (each[rows].unflatten(0, bucket.shape) for each in laid)
            outputs.append(self._attend(causal_convolution(x, weight), beta, g).flatten(0, 1))
            start = rows.stop
        return layout.take_back(torch.cat(outputs) if len(outputs) > 1 else outputs[0])

    def _attend(self, x: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """Return the outputs [b, s, h, e] of x [b, s, c] after the convolution."""
        keys = self.key_heads * self.key_size
        query, key, value = x.split([keys, keys, x.shape[-1] - 2 * keys], -1)
        query, key = (
            part.unflatten(-1, (self.key_heads, -1)).repeat_interleave(self.ratio, 2)
            for part in (query, key)
        )
        value = value.unflatten(-1, (self.key_heads * self.ratio, -1))
        return gated_delta_rule(query, key, value, decay, beta)

    def _normalise(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise each head of x [n, h, e] (RMSNorm), and multiply it by the SiLU of its gate."""
        wide = x.float()
        wide = wide * torch.rsqrt(
            wide.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon
        )
        normalised = self.norm_weight * wide.to(x.dtype)
        return (normalised * F.silu(gate.float())).to(x.dtype)


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Return the SiLU of the depthwise convolution of x [b, s, c] with `weight` [c, 1, w]. A token sees
    itself and the w - 1 tokens before it; before a sequence's start there are zeros."""
    width, length = weight.shape[-1], x.shape[1]
    mixed = F.conv1d(x.mT, weight, padding=width - 1, groups=len(weight))
    return F.silu(mixed[..., :length]).mT
