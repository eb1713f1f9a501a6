"""The first request of a server is sent by mrl and not by SGLang.

SGLang's own warm-up (http_server.py, _execute_server_warmup) runs in a thread that starts when the
server does, and nothing says when it is done but GET /health. The engine is put to sleep right after
its start: release_memory_occupation asserts that the scheduler is idle (weight_updater.py), and would
kill it, or unmap the memory of the running batch. This request blocks until it is answered.
"""

from __future__ import annotations

from typing import Any, Protocol

PROMPT_LEN = 8
NEW_TOKENS = 3
"""The first one comes from the prefill; the others are decode steps, by way of the CUDA graphs."""


class Poster(Protocol):
    """What is asked of `mrl.rollout.sglang.server.Server`."""

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Any: ...


def warm_up(
    server: Poster, *, num_replicas: int, context_len: int, return_routes: bool, timeout_s: float
) -> None:
    """Run one prefill and a few decode steps on each of `num_replicas` data-parallel ranks.

    Kernels that compile at their first use do it here. Raises RuntimeError where the answer does not
    have the tokens asked for, and what `Server.post` raises. Its keys and values stay in the prefix
    cache: flush it next.
    """
    num_tokens = max(1, min(PROMPT_LEN, context_len - NEW_TOKENS))
    body = {
        "input_ids": [list(range(num_tokens))] * num_replicas,
        # As the requests of a step: log-probs and routes take code of their own.
        "sampling_params": {
            "max_new_tokens": NEW_TOKENS,
            "temperature": 1.0,
            "ignore_eos": True,
            "sampling_seed": 0,
        },
        "return_logprob": True,
        "return_routed_experts": return_routes,
    }
    answers = server.post("/generate", body, timeout_s=timeout_s)
    lengths = [len(answer["output_ids"]) for answer in answers]
    if lengths != [NEW_TOKENS] * num_replicas:
        raise RuntimeError(
            f"engine: the first request brought {lengths} tokens, expected {NEW_TOKENS} on each of "
            f"{num_replicas} replica(s)"
        )
