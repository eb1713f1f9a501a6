"""Callers that share an engine, each behind a view of its own."""

from __future__ import annotations

from typing import Any, cast

import torch

from mrl.rollout.base import Completion, Request, SamplingParams
from mrl.rollout.beside import beside_others


class Recorder:
    """An engine that answers in order and notes what it is asked."""

    weight_version = 3

    def __init__(self):
        self.calls: list[Any] = []

    def generate(self, requests, **options):
        self.calls.append(("generate", options))
        try:
            for request in requests:
                empty = torch.empty(0)
                yield Completion(request.request_id, empty.long(), empty, "stop", (), None)
        finally:
            self.calls.append(("left",))

    def abort(self, request_ids=None):
        self.calls.append(("abort", request_ids))


def make_requests(*names):
    return [Request(name, torch.arange(3), 0, SamplingParams(2)) for name in names]


def test_an_abort_of_everything_ends_the_own_requests_alone():
    engine = Recorder()
    view = beside_others(cast(Any, engine), stale_prefixes=True)
    other = beside_others(cast(Any, engine))
    of_other = other.generate(make_requests("d", "e"), reuse_cache=True)
    next(of_other)
    running = view.generate(make_requests("a", "b", "c"))
    next(running)
    view.abort()
    view.abort(["a", "b", "e"])
    running.close()  # pyright: ignore[reportAttributeAccessIssue]
    view.abort()
    other.abort()
    assert list(of_other)
    assert engine.calls == [
        ("generate", {"beside_others": True, "stale_prefixes": False}),
        ("generate", {"beside_others": True, "stale_prefixes": True}),
        ("abort", ["b", "c"]),
        ("abort", ["b"]),
        ("left",),
        ("abort", ["e"]),
        ("left",),
    ]
    assert view.weight_version == 3
