"""The same tokens through the trainer's Megatron model: what each module gives them, two ways.

By itself, from the embedding on; and op by op, each given what the *engine's* op before it gave, so
that a difference is the op's own and not inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.routes import Replay
from mrl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mrl.types import MicroBatch, Sample, VersionSpan
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.logprobs import LogprobHead
from parallel.mesh import Mesh, init_mesh
from parallel.model import unwrap
from parallel.packing import WeightedSample, pack
from parallel.policy import Policy


def join_mesh() -> Mesh:
    """Return the mesh of the one rank that calls; it is made once."""
    return init_mesh(ParallelDims.create(ParallelConfig(), 1), 0)


def make_policy(folder: Path, mesh: Mesh, true_on_policy: bool) -> Policy:
    model = ModelConfig(path=str(folder), dtype="float32")
    return Policy(
        HfModel.read(folder),
        mesh,
        model,
        OptimizerConfig(),
        recompute=False,
        temperature=1.0,
        true_on_policy=true_on_policy,
        logprob_chunk_tokens=0,  # the recorder compares logits
    )


def packed(sequences: Sequence[tuple[Tensor, int]]) -> MicroBatch:
    """Pack sequences, given as (token_ids i64[T], P), into one micro-batch."""
    return pack(
        [WeightedSample(_sample(ids, prompt_len), 0.0, 0.0) for ids, prompt_len in sequences]
    )


def _sample(ids: Tensor, prompt_len: int) -> Sample:
    return Sample(
        group_id=0,
        token_ids=ids,
        prompt_len=prompt_len,
        loss_mask=torch.arange(len(ids)) >= prompt_len,
        rollout_logprobs=torch.zeros(len(ids)),
        weight_versions=(VersionSpan(0, prompt_len, len(ids)),),
        finish_reason="length",
    )


def evaluate(
    policy: Policy, sequences: Sequence[tuple[Tensor, int]], temperature: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs f32[T] and native routes i64[T, L, K] of each, all packed into one micro-batch."""
    head = LogprobHead(temperature, policy.mesh.tp)
    output = policy.forward_only([packed(sequences)], Replay.off, head=head)
    native = output.native_routes[0]
    routes = torch.stack([native[number] for number in sorted(native)], 1)  # pyright: ignore[reportArgumentType]
    lengths = [len(ids) for ids, _ in sequences]
    return list(output.logprobs[0].split(lengths)), list(routes.split(lengths))


class Recorder:
    """Hooks on a policy's modules; `tensors` holds the last pass, by the engine side's names of ops."""

    def __init__(self, policy: Policy) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.attention_options: dict[str, Any] = {}
        self.chunk: Any = unwrap(policy.chunks[0])
        config = self.chunk.config
        self.query_groups, self.heads = config.num_query_groups, config.num_attention_heads
        self._note(self.chunk.embedding, "embedding")
        layers = self.chunk.decoder.layers
        for i, layer in enumerate(layers):
            attention = layer.self_attention
            self._note(layer.input_layernorm, f"{i} input norm", before=f"{i - 1} residual 2")
            self._note(attention.linear_qkv, f"{i} qkv", self.engine_order)
            self._note(attention.q_layernorm, f"{i} q norm")
            self._note(attention.k_layernorm, f"{i} k norm")
            self._note(attention.linear_proj, f"{i} o_proj", before=f"{i} attention")
            self._note(layer.pre_mlp_layernorm, f"{i} post norm", before=f"{i} residual 1")
            layer.mlp.router.register_forward_hook(self._router_hook(i, layer.mlp.router))
        core = layers[-1].self_attention.core_attention
        core.register_forward_pre_hook(self._core_hook(len(layers) - 1), with_kwargs=True)
        final = f"{len(layers) - 1} residual 2"
        self._note(self.chunk.decoder.final_layernorm, "final norm", before=final)
        self._note(self.chunk.output_layer, "logits")

    def engine_order(self, mixed: Tensor) -> Tensor:
        """Reorder Megatron's [..., g x (queries of the group, key, value)] to SGLang's
        [..., q | k | v].
        """
        per_group = self.heads // self.query_groups
        split = mixed.reshape(*mixed.shape[:-1], self.query_groups, per_group + 2, -1)
        parts = split.split([per_group, 1, 1], dim=-2)
        return torch.cat([part.flatten(-3) for part in parts], dim=-1)

    def _note(
        self,
        module: Any,
        op: str,
        change: Callable[[Tensor], Tensor] = lambda x: x,
        before: str | None = None,
    ) -> None:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            self.tensors[op] = flat(change(output))
            if before is not None:
                self.tensors[before] = flat(inputs[0])

        module.register_forward_hook(hook)

    def _router_hook(self, i: int, router: Any) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            weights, chosen = output
            self.tensors[f"{i} router logits"] = flat(router.gating(inputs[0]))
            self.tensors[f"{i} router ids"] = chosen.float()
            self.tensors[f"{i} router weights"] = weights.detach().clone()

        return hook

    def _core_hook(self, i: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, options: dict[str, Any]) -> None:
            self.attention_options = options
            self.tensors[f"{i} q rope"] = flat(inputs[0])
            self.tensors[f"{i} k rope"] = flat(inputs[1])

        return hook


def flat(x: Tensor) -> Tensor:
    """Return a copy of [n, 1, ...], [1, n, ...] or [n, ...] as [n, all the rest]."""
    x = x.detach()
    if x.dim() >= 3 and x.shape[0] == 1:
        x = x[0]
    return x.reshape(x.shape[0], -1).clone()


@torch.no_grad()
def own_ops(recorder: Recorder, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Apply each op of the trainer to what the engine's op before it gave; call after a pass of T
    tokens.

    Rows [T-1, ...]; the rotary embedding alone has none (Megatron applies it inside its attention).
    """
    chunk, out = recorder.chunk, {}
    layers = chunk.decoder.layers
    for i, layer in enumerate(layers):
        attention = layer.self_attention
        before = theirs["embedding"] if i == 0 else theirs[f"{i - 1} residual 2"]
        out[f"{i} input norm"] = layer.input_layernorm(before)
        out[f"{i} qkv"] = recorder.engine_order(attention.linear_qkv(theirs[f"{i} input norm"])[0])
        q, k, _ = _heads(recorder, theirs[f"{i} qkv"])
        out[f"{i} q norm"] = attention.q_layernorm(q).flatten(1)
        out[f"{i} k norm"] = attention.k_layernorm(k).flatten(1)
        out[f"{i} o_proj"] = attention.linear_proj(theirs[f"{i} attention"])[0]
        out[f"{i} residual 1"] = before + theirs[f"{i} o_proj"]
        out[f"{i} post norm"] = layer.pre_mlp_layernorm(theirs[f"{i} residual 1"])
        inner = theirs[f"{i} post norm"].unsqueeze(1)
        out[f"{i} router logits"] = flat(layer.mlp.router.gating(inner))
        # Ids and weights are those of these logits.
        weights, chosen = layer.mlp.router.routing(theirs[f"{i} router logits"].unsqueeze(1))
        out[f"{i} router ids"], out[f"{i} router weights"] = chosen.float(), weights
        out[f"{i} residual 2"] = theirs[f"{i} residual 1"] + flat(layer.mlp(inner)[0])
    out[f"{len(layers) - 1} attention"] = _last_attention(recorder, theirs, len(layers) - 1)
    out["final norm"] = chunk.decoder.final_layernorm(theirs[f"{len(layers) - 1} residual 2"])
    logits = chunk.output_layer(theirs["final norm"].unsqueeze(1), weight=None)[0]
    out["logits"] = flat(logits)[-len(theirs["logits"]) :]
    return out


def _heads(recorder: Recorder, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups = recorder.heads, recorder.query_groups
    size = qkv.shape[1] // (heads + 2 * groups)
    q, k, v = qkv.view(len(qkv), -1, size).split([heads, groups, groups], dim=1)
    return q, k, v


def _last_attention(recorder: Recorder, theirs: dict[str, Tensor], i: int) -> Tensor:
    _, _, v = _heads(recorder, theirs[f"{i} qkv"])
    q, k = (theirs[f"{i} {op}"].view(len(v), -1, v.shape[2]) for op in ("q rope", "k rope"))
    # The pass had one token more, which no key of these sees.
    q, k, v = (torch.cat([x, x[-1:]]) for x in (q, k, v))
    core = recorder.chunk.decoder.layers[i].self_attention.core_attention
    return core(q, k, v, **recorder.attention_options)[:-1]
