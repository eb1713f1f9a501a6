"""Save and load token records: the values that trainer and engine computed for the tokens of a step.

OUTPUT_DIR/tokens/step_000012.safetensors contains the tensors of a record under their field names, and
the other fields as JSON in the header. Nothing is pickled.

Dimensions: S samples, N tokens (all samples concatenated, prompts included), L MoE layers, K experts
per token.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mrl.errors import InputError
from mrl.system.files import replaced
from mrl.system.json_text import check_kinds, parse_row

FORMAT = "mrl-tokens-1"


@dataclass(frozen=True)
class TokenRecord:
    """Tokens of a step, with the values that trainer and engine computed for them before the update.

    Index t of a per-token field belongs to token t. Log-probs are 0 outside of the loss tokens.
    """

    step: int
    version: int
    """The version of the trainer's weights."""
    temperature: float
    """The sampling temperature, at which trainer and engine should both compute their log-probs."""
    routing_replay: str
    """The recipe's `moe.routing_replay`, which says which routes the trainer replays: `off` (none),
    `r2` (those of the trainer's own log-prob pass) or `r3` (the engine's)."""
    layer_numbers: tuple[int, ...]
    """Megatron's 1-based number of each of the L MoE layers; empty without routes."""
    num_experts: int
    """The number of experts of a MoE layer; 0 without routes."""
    num_samples_of_step: int
    """The number of samples of the step, of which the record may hold only some."""
    sample_ids: Tensor
    """i64[S]: for each sample, the 0-based number of its line in rollouts/step_*.jsonl, ascending."""
    cu_seqlens: Tensor
    """i64[S+1]: the index of each sample's first token; the last entry is N."""
    token_ids: Tensor
    """i64[N]: the token ids."""
    loss_mask: Tensor
    """bool[N]: true for the loss tokens."""
    rollout_logprobs: Tensor
    """f32[N]: the engine's log-probs."""
    old_logprobs: Tensor
    """f32[N]: the trainer's log-probs before the update."""
    entropy: Tensor
    """f32[N]: the entropy of the trainer's distribution, in nats; 0 outside of the loss tokens."""
    advantages: Tensor
    """f32[N]: the advantage of each token; 0 outside of the loss tokens."""
    weight_versions: Tensor
    """i32[N]: the version of the weights that sampled the token; -1 if the policy did not sample it."""
    ref_logprobs: Tensor | None = None
    """f32[N]: the log-probs of the frozen reference model; None without a reference."""
    expert_ids: Tensor | None = None
    """i16[N, L, K]: the experts that the engine chose; -1 if no route was captured for the token.
    `expert_ids`, `native_ids` and `margins` are None if no routes were captured at all."""
    native_ids: Tensor | None = None
    """i16[N, L, K]: the experts that the trainer's router would choose."""
    margins: Tensor | None = None
    """f32[N, L]: the K-th highest minus the (K+1)-th highest score. The scores are those by
    which the trainer's router selects experts: logits, or probabilities plus the expert bias."""
    pieces: Mapping[int, str] = field(default_factory=dict)
    """The text of each token id in the record."""

    @property
    def num_samples(self) -> int:
        """The number S of samples."""
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        """The number N of tokens."""
        return len(self.token_ids)

    def sample(self, i: int) -> slice:
        """Return the slice of the per-token fields that belongs to the i-th sample of the record."""
        return slice(int(self.cu_seqlens[i]), int(self.cu_seqlens[i + 1]))


_TENSORS = tuple(f.name for f in dataclasses.fields(TokenRecord) if "Tensor" in str(f.type))
_OPTIONAL = tuple(f.name for f in dataclasses.fields(TokenRecord) if f.default is None)
_PLAIN = ("step", "version", "temperature", "routing_replay", "layer_numbers", "num_experts",
          "num_samples_of_step", "pieces")  # fmt: skip


def save_tokens(path: Path, record: TokenRecord) -> None:
    """Write `record` to `path` atomically. Its tensors must be on the CPU."""
    values = {name: getattr(record, name) for name in _TENSORS}
    tensors = {name: v.contiguous() for name, v in values.items() if v is not None}
    plain = {name: getattr(record, name) for name in _PLAIN}
    plain["pieces"] = {str(k): text for k, text in record.pieces.items()}
    with replaced(path) as partial:
        save_file(tensors, partial, {"format": FORMAT, "record": json.dumps(plain)})


def load_tokens(path: Path) -> TokenRecord:
    """Load a record that `save_tokens` wrote.

    Raises InputError if the file cannot be read, is damaged, or is not such a record.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"token record {path}: {reason}; give a file of RUN/tokens/") from None
    except SafetensorError as error:
        raise InputError(f"token record {path}: not a safetensors file ({error})") from None
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"token record {path}: format is {metadata.get('format')!r}, expected {FORMAT!r}"
        )
    try:
        plain = parse_row(metadata.get("record", ""))
        check_kinds(plain, _KINDS)
    except ValueError as error:
        raise InputError(f"token record {path}: its header is damaged: {error}") from None
    missing = sorted(({*_TENSORS, *_PLAIN} - {*_OPTIONAL}) - (tensors.keys() | plain.keys()))
    if missing:
        raise InputError(f"token record {path}: lacks {', '.join(missing)}; it is incomplete")
    unknown = sorted((tensors.keys() - {*_TENSORS}) | (plain.keys() - {*_PLAIN}))
    if unknown:
        raise InputError(
            f"token record {path}: has {', '.join(unknown)}, which this version of mrl does not know"
        )
    try:
        plain["layer_numbers"] = tuple(map(operator.index, plain["layer_numbers"]))
        plain["pieces"] = {int(k): str(text) for k, text in plain["pieces"].items()}
        record = TokenRecord(**plain, **tensors)
        _check(record)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"token record {path}: it is damaged ({error}); `mrl replay` writes it again if rollouts "
            "were saved"
        ) from None
    return record


_KINDS = {
    **dict.fromkeys(("step", "version", "num_experts", "num_samples_of_step"), "whole"),
    **{"temperature": "number", "routing_replay": "text", "layer_numbers": "list"},
    "pieces": "object",
}
_DTYPES = {
    **dict.fromkeys(("sample_ids", "cu_seqlens", "token_ids"), torch.int64),
    **dict.fromkeys(("expert_ids", "native_ids"), torch.int16),
    **{"loss_mask": torch.bool, "weight_versions": torch.int32},
}
"""The dtypes of the tensors that are not float32."""


def _check(record: TokenRecord) -> None:
    """Raise ValueError if a field has a wrong dtype, shape or range, or if a route field is missing.

    A record must have all three route fields or none of them.
    """
    routed = [record.expert_ids, record.native_ids, record.margins]
    if len({tensor is None for tensor in routed}) > 1:
        raise ValueError("some of its fields of routes are missing")
    size, num_layers = len(record.token_ids), len(record.layer_numbers)
    topk = record.expert_ids.shape[-1] if record.expert_ids is not None else 0
    shapes: dict[str, tuple[int, ...]] = {
        "sample_ids": (record.num_samples,),
        "cu_seqlens": (record.num_samples + 1,),
        "margins": (size, num_layers),
        **dict.fromkeys(("expert_ids", "native_ids"), (size, num_layers, topk)),
    }
    for name in _TENSORS:
        tensor: Tensor | None = getattr(record, name)
        if tensor is None:
            continue
        wanted = _DTYPES.get(name, torch.float32), shapes.get(name, (size,))
        if (tensor.dtype, tuple(tensor.shape)) != wanted:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {wanted[0]} {list(wanted[1])}"
            )
    ends, ids, num_experts = record.cu_seqlens, record.sample_ids, record.num_experts
    if int(ends[0]) or int(ends[-1]) != size or bool((ends.diff() < 1).any()):
        raise ValueError(f"cu_seqlens does not increase from 0 to the {size} tokens")
    if len(ids) and (bool((ids.diff() < 1).any()) or int(ids[0]) < 0):
        raise ValueError("sample_ids does not increase from 0")
    if len(ids) and int(ids[-1]) >= record.num_samples_of_step:
        raise ValueError(
            f"sample {int(ids[-1])}, expected less than {record.num_samples_of_step}, the samples of "
            "the step"
        )
    for name in ("expert_ids", "native_ids"):
        experts: Tensor | None = getattr(record, name)
        if experts is not None and experts.numel():
            low, high = int(experts.min()), int(experts.max())
            if low < -1 or high >= num_experts:
                raise ValueError(f"{name} are {low} to {high}, of {num_experts} experts")
