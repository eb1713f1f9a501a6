"""Requests before they are sent, and log-probs of whole sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.rollout.base import Request
from mrl.rollout.sglang.server import Server


def check_requests(requests: Sequence[Request], context_len: int) -> None:
    """Raises ValueError for a request that is empty, has another's id, or is too long."""
    seen: set[str] = set()
    for request in requests:
        name, num_tokens = request.request_id, request.token_ids.numel()
        new = request.sampling.max_new_tokens
        if name in seen:
            raise ValueError(f"{name}: two requests have this id, expected one")
        seen.add(name)
        if not num_tokens:
            raise ValueError(f"{name}: the prompt has no tokens, expected at least 1")
        if num_tokens + new > context_len:
            raise ValueError(
                f"{name}: {num_tokens} prompt tokens + {new} new tokens exceed the context of "
                f"{context_len}"
            )


def sequence_logprobs(
    server: Server,
    sequences: Sequence[Tensor],
    vocab_size: int,
    adapter: str | None = None,
    *,
    timeout_s: float | None = None,
) -> list[Tensor]:
    """Return log-probs f32[T] of sequences i64[T] under the server's weights; 0 for the first token.

    `vocab_size` is that of the model. `adapter` is the name of the one in force; None is the base.
    `timeout_s` as in `Server.post`.
    """
    body: dict[str, Any] = {
        "input_ids": [sequence.tolist() for sequence in sequences],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if adapter is not None:
        body["lora_path"] = adapter
    answers = server.post("/generate", body, timeout_s=timeout_s)
    found = []
    for sequence, answer in zip(sequences, answers, strict=True):
        entries = answer["meta_info"]["input_token_logprobs"]
        # SGLang calls the last id of the vocabulary 0 (logprob_result_processor.py).
        names = [0 if token == vocab_size - 1 else token for token in sequence.tolist()]
        if [entry[1] for entry in entries] != names:
            raise RuntimeError(
                "sequence_logprobs: the log-probs belong to other tokens than those sent"
            )
        # The first token has none; any other without one is NaN.
        values = [math.nan if entry[0] is None else entry[0] for entry in entries[1:]]
        found.append(torch.tensor([0.0, *values]))
    return found
