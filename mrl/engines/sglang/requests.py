"""Checks requests before they are sent, and asks for log-probs of whole sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.engines.base import Request, SamplingParams
from mrl.engines.sampling import check_sampling_params
from mrl.engines.sglang.connection import ServerConnection
from mrl.engines.top_logprobs import TopLogprobs
from mrl.errors import InputError

RESERVED_TOKENS = 7
"""SGLang's context is longer than the recipe's by this many tokens, because SGLang reserves them.

With a `context_length` of C tokens and a KV cache of M tokens SGLang 0.5.20 accepts prompts of at most
min(C, M) - 7 (`tp_worker.get_worker_info`, `utils.validate_input_length`), and it silently lowers
`max_new_tokens` so that prompt and answer have at most min(C, M) - 2 together
(`Scheduler.init_req_max_new_tokens`)."""


def longest_in_cache(kv_tokens: int, page_size: int = 1) -> int:
    """Return the most tokens, prompt and answer, that SGLang accepts with a KV cache of `kv_tokens`.

    A prompt uses whole pages of the cache, and one more page is reserved for the answer.
    """
    return max(0, kv_tokens - max(RESERVED_TOKENS, 2 * page_size + 1))


def check_requests(
    requests: Sequence[Request], *, context_len: int, cache_len: int, vocab_size: int
) -> None:
    """Raise ValueError for a request that the engine would refuse or cut short, or that would crash it:
    one that is empty, repeats an id, is too long, or has tokens or sampling parameters that do not fit
    the model.

    `cache_len` is the most tokens of one request that the KV cache holds.
    """
    seen: set[str] = set()
    checked: set[SamplingParams] = set()
    for request in requests:
        name, num_tokens = request.request_id, request.token_ids.numel()
        new = request.sampling.max_new_tokens
        if name in seen:
            raise ValueError(f"{name}: two requests have this id, expected one")
        seen.add(name)
        if not num_tokens:
            raise ValueError(f"{name}: the prompt has no tokens, expected at least 1")
        if num_tokens + new > context_len:
            raise InputError(
                f"{name}: {num_tokens} prompt tokens + {new} new tokens exceed the context of "
                f"{context_len}"
            )
        if num_tokens + new > cache_len:
            raise InputError(
                f"{name}: {num_tokens} prompt tokens + {new} new tokens exceed the {cache_len} that "
                "the engine's KV cache holds of one request; raise rollout.max_total_tokens or "
                "rollout.mem_fraction_static, or ask for less"
            )
        low, high = int(request.token_ids.min()), int(request.token_ids.max())
        if low < 0 or high >= vocab_size:
            raise InputError(
                f"{name}: token {low if low < 0 else high}, expected 0 to {vocab_size - 1}: the model "
                f"has {vocab_size} tokens"
            )
        if request.sampling not in checked:
            check_sampling_params(request.sampling, vocab_size, f"{name}: ")
            checked.add(request.sampling)


def check_sequences(sequences: Sequence[Tensor], longest: int) -> None:
    """Raise InputError for a sequence i64[T] that is empty or has more than `longest` tokens."""
    for sequence in sequences:
        if not 0 < sequence.numel() <= longest:
            raise InputError(
                f"sequence_logprobs: a sequence of {sequence.numel()} tokens, expected 1 to {longest}, "
                "which the engine's context and its KV cache hold"
            )


def top_logprobs(
    connection: ServerConnection,
    sequences: Sequence[Tensor],
    vocab_size: int,
    num_top: int,
    adapter: str | None = None,
    *,
    timeout_s: float | None = None,
) -> list[TopLogprobs]:
    """Return log-probs f32[T] of sequences i64[T] under the server's weights, and the `num_top`
    likeliest tokens in the place of each token. The first token gets 0 and has no others.

    `adapter` is SGLang's name of the adapter to use; None is the base model. `timeout_s` is passed to
    `ServerConnection.post`.
    """
    body: dict[str, Any] = {
        "input_ids": [sequence.tolist() for sequence in sequences],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if num_top:
        body["top_logprobs_num"] = num_top
    if adapter is not None:
        body["lora_path"] = adapter
    answers = connection.post("/generate", body, timeout_s=timeout_s)
    found: list[TopLogprobs] = []
    for sequence, answer in zip(sequences, answers, strict=True):
        entries = answer["meta_info"]["input_token_logprobs"]
        # SGLang reports the last id of the vocabulary as 0 (logprob_result_processor.py).
        names = [0 if token == vocab_size - 1 else token for token in sequence.tolist()]
        if [entry[1] for entry in entries] != names:
            raise RuntimeError(
                "sequence_logprobs: the log-probs belong to other tokens than those sent"
            )
        # The first token has no log-prob. If any other has none, it becomes NaN.
        values = [math.nan if entry[0] is None else entry[0] for entry in entries[1:]]
        tops = answer["meta_info"].get("input_top_logprobs") if num_top else None
        likeliest = [
            [(int(token), float(logprob)) for logprob, token, *_ in each]
            for each in (tops or [])[1:]
        ]
        if num_top and len(likeliest) != len(values):
            raise RuntimeError(
                f"top_logprobs: the server returned {len(likeliest)} lists for {len(values)} tokens"
            )
        found.append((torch.tensor([0.0, *values]), likeliest))
    return found
