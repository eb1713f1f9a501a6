"""A request that SGLang refuses inside the stream fails alone; the engine is not lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrl.engines.base import EngineLost, Request, RequestFailed, SamplingParams
from mrl.engines.sglang.request_sender import RequestSender


class Refusing:
    """A server that answers every request inside the stream with an abort of one status."""

    def __init__(self, status):
        self.bodies, self.reason = (
            [],
            {"type": "abort", "status_code": status, "message": "too long"},
        )

    def new_request_id(self):
        return f"mrl-{len(self.bodies)}"

    def check_alive(self, wait_s=0.0):
        pass

    def post(self, path, body, timeout_s=None):
        pass

    def lost(self, why):
        return EngineLost(why)

    def stream(self, body):
        self.bodies.append(body)
        answer = {"index": 0, "output_ids": [], "meta_info": {"finish_reason": self.reason}}

        class Stream(list):
            def close(self):
                pass

        return Stream([answer])


@pytest.mark.parametrize(
    ("status", "error", "says", "num_tries"),
    [
        (400, RequestFailed, "r1: the engine refused the request: too long", 1),
        (503, EngineLost, "it failed r1 3 times", 3),
    ],
)
def test_a_request_that_is_refused_inside_the_stream_is_not_sent_again(
    status, error, says, num_tries
):
    server: Any = Refusing(status)
    request = Request("r1", torch.tensor([1, 2, 3]), 0, SamplingParams(2, 2))
    sender = RequestSender(
        server, [request], return_routes=False, request_timeout_s=30, stall_timeout_s=30
    )
    with pytest.raises(error, match=says):
        list(sender.answers())
    assert len(server.bodies) == num_tries
