"""A real SGLang server on the toy model: what each of its modules gives every token of a sequence.

SGLang's own dumps (`debug_tensor_dump_output_folder`) hold the outputs of the leaf modules, a file a
forward pass. Its rotary embedding is one module for all layers, so of that only the last layer's is
there; the logits of a pass are in the file of the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mrl.config import ModelConfig, RolloutConfig
from mrl.engines.base import Completion, EngineConfig, Request, SamplingParams
from mrl.engines.sglang.engine import Engine

PROMPT_LEN, NUM_NEW = 21, 24
BATCH = 16
TEMPERATURE = 0.8


@dataclass(frozen=True)
class EngineRun:
    """An engine run holds T tokens of one greedy request, its prompt in one pass and then a token a
    pass; and a batch.
    """

    token_ids: Tensor
    """i64[T]."""
    logprobs: Tensor
    """f32[T], at temperature 1; 0 on the prompt."""
    tensors: dict[str, Tensor]
    """The outputs by op ("3 post norm", layers from 0): [T-1, ...]; of "logits" only the last T - P
    rows.
    """
    alone_in_batch: Tensor
    """f32[T]: the same request's log-probs among BATCH others."""
    batch: list[tuple[Tensor, int, Tensor, Tensor]]
    """Sampled at TEMPERATURE: token_ids i64[T], P, log-probs f32[T], expert ids i64[T-1, L, K]."""


def run_engine(folder: Path, scratch: Path, true_on_policy: bool) -> EngineRun:
    """Start a server on the model in `folder`, generate, stop it, read its dumps."""
    scratch.mkdir(parents=True)
    dumps = scratch / "dumps"
    engine = Engine(
        EngineConfig(
            model=ModelConfig(path=str(folder), dtype="float32"),
            rollout=RolloutConfig(
                max_response_len=NUM_NEW,
                max_total_tokens=4096,
                true_on_policy=true_on_policy,
                server_args={"debug_tensor_dump_output_folder": str(dumps)},
            ),
            log_path=scratch / "engine.log",
        )
    )
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, 96, (BATCH + 1, PROMPT_LEN), generator=generator)
    greedy = SamplingParams(NUM_NEW, NUM_NEW, temperature=0.0)
    sampled = SamplingParams(NUM_NEW, NUM_NEW, temperature=TEMPERATURE)
    single = Request("single", prompts[0], 0, greedy)
    others = [Request(str(i), prompts[i], i, sampled) for i in range(1, BATCH + 1)]
    engine.start()
    try:
        [alone] = engine.endpoint.generate([single])
        mixed = {c.request_id: c for c in engine.endpoint.generate([single, *others])}
    finally:
        engine.stop()
    again = mixed.pop("single")
    if not torch.equal(again.output_ids, alone.output_ids):
        raise RuntimeError("the engine gave one greedy request two answers")
    ids = torch.cat([prompts[0], alone.output_ids])
    passes = [torch.load(f, weights_only=True) for f in sorted(dumps.rglob("Pass*.pt"))]
    return EngineRun(
        token_ids=ids,
        logprobs=_padded(alone),
        # One pass a new token; one more that nobody asked for may follow, and then the batch's.
        tensors=_joined(passes, NUM_NEW, len(ids) - 1),
        alone_in_batch=_padded(again),
        batch=[_sample(request, mixed[request.request_id]) for request in others],
    )


def _padded(completion: Completion) -> Tensor:
    return torch.cat([torch.zeros(PROMPT_LEN), completion.logprobs])


def _sample(request: Request, completion: Completion) -> tuple[Tensor, int, Tensor, Tensor]:
    assert completion.routing is not None
    ids = torch.cat([request.token_ids, completion.output_ids])
    routes = completion.routing.expert_ids.long()
    return ids, PROMPT_LEN, _padded(completion), routes


def _joined(passes: list[dict], num_passes: int, num_rows: int) -> dict[str, Tensor]:
    """The rows of the first `num_passes`, in order."""
    tensors = {"embedding": _rows(passes[:num_passes], "model.embed_tokens")}
    num_layers = sum(f"model.layers.{i}.mlp.gate" in passes[0] for i in range(1000))
    for i in range(num_layers):
        prefix = f"model.layers.{i}."
        for op, name, part in (
            ("qkv", "self_attn.qkv_proj", None),
            ("attention", "self_attn.attn", None),
            ("o_proj", "self_attn.o_proj", None),
            ("post norm", "post_attention_layernorm", 0),
            ("residual 1", "post_attention_layernorm", 1),
            ("router logits", "mlp.gate", None),
        ):
            tensors[f"{i} {op}"] = _rows(passes[:num_passes], prefix + name, part)
        for op in ("q norm", "k norm"):
            flat = _rows(passes[:num_passes], f"{prefix}self_attn.{op.replace(' ', '_')}")
            tensors[f"{i} {op}"] = flat.reshape(num_rows, -1)
        first = i == 0  # it has no residual yet
        norm = prefix + "input_layernorm"
        tensors[f"{i} input norm"] = _rows(passes[:num_passes], norm, None if first else 0)
        weights, ids, logits = (
            _rows(passes[:num_passes], prefix + "mlp.topk", k) for k in range(3)
        )
        zeros = torch.zeros_like(logits)
        tensors[f"{i} router ids"] = zeros.scatter(1, ids.long(), 1.0)
        tensors[f"{i} router weights"] = zeros.scatter(1, ids.long(), weights)
        after = f"model.layers.{i + 1}.input_layernorm" if i + 1 < num_layers else "model.norm"
        tensors[f"{i} residual 2"] = _rows(passes[:num_passes], after, 1)
    last = f"model.layers.{num_layers - 1}.self_attn.rotary_emb"
    for k, op in enumerate(("q rope", "k rope")):
        tensors[f"{num_layers - 1} {op}"] = _rows(passes[:num_passes], last, k)
    tensors["final norm"] = _rows(passes[:num_passes], "model.norm", 0)
    tensors["logits"] = _rows(passes[1 : num_passes + 1], "logits_processor")
    if any(len(x) != num_rows for op, x in tensors.items() if op != "logits"):
        raise RuntimeError(f"the engine's dumps do not hold {num_rows} rows of every module")
    return tensors


def _rows(passes: list[dict], name: str, part: int | None = None) -> Tensor:
    return torch.cat([p[name] if part is None else p[name][part] for p in passes])
