"""The account of several calls of generate() at once, without a server: versions, prefixes, rows."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config import RolloutConfig
from mrl.engines.base import EngineLost, Request, SamplingParams
from mrl.engines.sglang.body import adapter_name, version_key
from mrl.engines.sglang.in_flight import InFlightRequests
from mrl.engines.sglang.plugins.server import mrl_weight_versions as plugin
from mrl.engines.sglang.request_sender import Answer, SendContext
from mrl.engines.sglang.route_memory import RouteReader
from mrl.engines.sglang.spans import row_versions, version_spans
from mrl.errors import RunFailed
from mrl.types import UNKNOWN_VERSION, VersionSpan

U = UNKNOWN_VERSION
PROMPT_LEN, NUM_OUTPUT = 4, 6


def rows(made, *, versions, cached=(), num_cached=0, **options):
    """[(version, end)] of the rows of an answer whose tokens were `made` by [(version, end)]."""
    spans, start = [], PROMPT_LEN
    for version, end in made:
        spans.append(VersionSpan(version, start, PROMPT_LEN + end))
        start = PROMPT_LEN + end
    options = {"retracted": False, **options}
    found = row_versions(spans, PROMPT_LEN, num_cached, versions, cached or versions[:1], **options)
    assert [span.start for span in found] == [0, *(span.end for span in found[:-1])]
    return [(span.version, span.end) for span in found]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"made": [(7, 6)], "versions": (7,)}, [(7, 9)]),
        # Sent and finished under 7; an update came before the answer was read.
        ({"made": [(7, 6)], "versions": (7, 8), "num_cached": 2}, [(7, 9)]),
        # Updated twice in the middle.
        ({"made": [(7, 2), (8, 4), (9, 6)], "versions": (7, 8, 9)}, [(7, 5), (8, 7), (9, 9)]),
        # Sent under 7, but the first token is of 8: it waited in the queue, or its prefill was cut.
        ({"made": [(8, 6)], "versions": (7, 8), "num_cached": 2}, [(U, 3), (8, 9)]),
        # Sent after the update.
        ({"made": [(8, 6)], "versions": (8,), "num_cached": 2}, [(8, 9)]),
        # Without a key the cache may hold both.
        ({"made": [(8, 6)], "versions": (8,), "cached": (7, 8), "num_cached": 2}, [(U, 2), (8, 9)]),
        ({"made": [(8, 6)], "versions": (8,), "cached": (7,), "num_cached": 2}, [(7, 2), (8, 9)]),
        # Taken back and computed anew, in one version and in several.
        ({"made": [(7, 6)], "versions": (7,), "retracted": True}, [(7, 9)]),
        ({"made": [(7, 6)], "versions": (7, 8), "retracted": True}, [(7, 9)]),
        ({"made": [(7, 2), (8, 6)], "versions": (7, 8), "retracted": True}, [(U, 5), (8, 9)]),
        (
            {"made": [(7, 2), (8, 4), (9, 6)], "versions": (7, 8, 9, 10), "retracted": True},
            [(U, 7), (9, 9)],
        ),
        # Aborted after it may have been computed anew by 8, without another token.
        ({"made": [(7, 6)], "versions": (7, 8), "retracted": True, "aborted": True}, [(U, 9)]),
    ],
)
def test_weights_of_rows(given, expected):
    assert rows(**given) == expected


def test_stamps_that_nobody_pushed():
    def read(*made, versions):
        meta = {"weight_versions": [{"version": str(v), "start": a, "end": b} for v, a, b in made]}
        return version_spans(meta, PROMPT_LEN, NUM_OUTPUT, versions, "r1")

    assert [s.version for s in read((7, 0, 2), (9, 2, 6), versions=(7, 8, 9))] == [7, 9]
    with pytest.raises(RuntimeError, match="r1: sampled with weight version 6, expected 7 or 8"):
        read((6, 0, 6), versions=(7, 8))
    with pytest.raises(RuntimeError, match="expected the order in which they were pushed: 7, 8"):
        read((8, 0, 2), (7, 2, 6), versions=(7, 8))


def ids(*tokens):
    return torch.tensor(tokens)


def make_in_flight(adapter_of=None, **config):
    server: Any = SimpleNamespace(check_alive=lambda wait_s=0: None)
    limits = RolloutConfig.model_validate({"max_response_len": 2, **config})
    return InFlightRequests(server, RouteReader(), None, limits, adapter_of)


def make_request(name):
    return Request(name, ids(1, 2, 3), 0, SamplingParams(2, 2))


def begin(in_flight, name, version, *, is_alone=False, is_keyed=True):
    return in_flight.begin(
        [make_request(name)], lambda: version, is_alone=is_alone, is_keyed=is_keyed
    )


def update(in_flight, version):
    in_flight.begin_update(lambda: None, version)
    in_flight.end_update(version)


def test_versions_of_each_call():
    in_flight = make_in_flight()
    old = begin(in_flight, "old", 0)
    assert in_flight._context_of(old, ["r1"], [make_request("old")]) == SendContext(
        0, version_key(0)
    )
    in_flight.pause(lambda: None, retract=True)
    update(in_flight, 1)
    in_flight.resume()
    new = begin(in_flight, "new", 1)
    assert in_flight._context_of(old, ["r2"], [make_request("old")]) == SendContext(
        1, version_key(1)
    )
    of_old = [in_flight._expected(old, num_updates) for num_updates in (0, 1)]
    assert [(e.versions, e.cached_versions) for e in of_old] == [((0, 1), (0,)), ((1,), (1,))]
    of_new = in_flight._expected(new, 0)
    assert (of_new.versions, of_new.cached_versions) == ((1,), (1,))
    assert (of_old[0].retracted, of_new.retracted) == (True, False)
    in_flight.pause(lambda: None, retract=False)
    with pytest.raises(ValueError, match="version 1 is in the prefix cache or in flight already"):
        in_flight.begin_update(lambda: None, 1)
    update(in_flight, 2)
    in_flight.resume()
    # Without a key: everything that the cache has seen since it was dropped.
    stale = begin(in_flight, "stale", 2, is_keyed=False)
    in_flight.pause(lambda: None, retract=False)
    update(in_flight, 3)
    in_flight.resume()
    assert in_flight._expected(stale, 0).cached_versions == (2,)
    later = begin(in_flight, "later", 3, is_keyed=False)
    assert in_flight._context_of(later, ["r9"], [make_request("later")]) == SendContext(0)
    assert in_flight._expected(later, 0).cached_versions == (2, 3)


def test_a_request_keeps_its_adapter():
    in_flight = make_in_flight(adapter_name)
    old = begin(in_flight, "old", 0)
    request = make_request("old")
    old.sender._pending |= {"r1": request, "r2": request}
    assert in_flight._context_of(old, ["r1"], [request]) == SendContext(0, version_key(0), "mrl@0")
    old.sender._num_updates["r1"] = 0
    update(in_flight, 1)
    assert in_flight._expected(old, 0).versions == (0,)
    assert in_flight.versions_in_use() == {0, 1}  # r2 is about to be sent, under whichever
    assert in_flight._context_of(old, ["r2"], [request]) == SendContext(1, version_key(1), "mrl@1")
    old.sender._num_updates["r2"] = 1
    assert in_flight._expected(old, 1).versions == (1,)
    old.sender._take("r1")
    assert in_flight.versions_in_use() == {1}
    alone = make_in_flight(adapter_name)
    opened = begin(alone, "a", 3, is_alone=True, is_keyed=False)
    assert alone._context_of(opened, ["r1"], [request]) == SendContext(0, None, "mrl@3")
    update(alone, 4)
    assert alone._expected(opened, 0).cached_versions == (3,)


def test_an_answer_from_a_stale_prefix_is_refused():
    """The server ignores the keys: the second version reads what the first has cached."""
    in_flight = make_in_flight()

    def answer(opened, rid, request, version, num_cached):
        meta = {
            "cached_tokens": num_cached,
            "num_retractions": 0,
            "weight_versions": [{"version": str(version), "start": 0, "end": 2}],
        }
        in_flight._context_of(opened, [rid], [request])
        found = Answer(rid, request, 0, {"output_ids": [7, 8], "meta_info": meta})
        in_flight._note_answer(opened, found, in_flight._expected(opened, 0))

    opened = begin(in_flight, "a", 0)
    answer(opened, "r1", make_request("a"), 0, 0)
    answer(opened, "r2", make_request("b"), 0, 2)
    in_flight.end(opened)
    in_flight.pause(lambda: None, retract=False)
    update(in_flight, 1)
    in_flight.resume()
    opened = begin(in_flight, "c", 1)
    with pytest.raises(RuntimeError, match=r"c: 2 tokens came .* under weight version 1"):
        answer(opened, "r3", make_request("c"), 1, 2)


def test_who_may_run_beside_whom():
    in_flight = make_in_flight()
    first = begin(in_flight, "a", 0)
    second = begin(in_flight, "b", 0)
    with pytest.raises(RuntimeError, match=r"2 call\(s\) .* this one was to run alone"):
        begin(in_flight, "c", 0, is_alone=True)
    with pytest.raises(ValueError, match="a: a request with this id is in flight already"):
        begin(in_flight, "a", 0)
    for opened in (first, second):
        in_flight.end(opened)
    alone = begin(in_flight, "a", 0, is_alone=True)
    with pytest.raises(RuntimeError, match="one of them was to run alone"):
        begin(in_flight, "b", 0)
    in_flight.end(alone)
    assert not in_flight.any_open


def test_a_call_waits_for_new_weights():
    in_flight = make_in_flight()
    in_flight.pause(lambda: None, retract=False)
    asked = threading.Event()
    in_flight._connection.check_alive = lambda wait_s=0: asked.set()  # pyright: ignore[reportAttributeAccessIssue]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(begin, in_flight, "a", 1)
        assert asked.wait(30)
        assert not in_flight.any_open
        update(in_flight, 1)
        in_flight.resume()
        assert waiting.result(30).versions == [1]
    impatient = make_in_flight(request_timeout_s=0.01)
    impatient.pause(lambda: None, retract=False)
    with pytest.raises(RunFailed, match=r"not resumed within rollout.request_timeout_s=0.01 s"):
        begin(impatient, "a", 1)


def test_no_call_opens_while_a_pause_looks_whether_one_is_open():
    in_flight, begun = make_in_flight(), threading.Event()

    def open_a_call():
        begun.set()
        return begin(in_flight, "a", 0)

    with ThreadPoolExecutor(1) as pool:
        calls = []

        def check():
            calls.append(pool.submit(open_a_call))
            assert begun.wait(30)
            time.sleep(0.1)
            if in_flight.any_open:
                raise RuntimeError("pause: the engine is generating")

        in_flight.pause(check, retract=False)
        assert not in_flight.any_open
        in_flight.resume()
        assert calls[0].result(30).versions == [0]

    def refuse():
        raise RuntimeError("pause: the engine is asleep")

    in_flight.pause(refuse, retract=False)  # nobody asks whether it is ready while a call is open
    idle = make_in_flight()
    with pytest.raises(RuntimeError, match="asleep"):
        idle.pause(refuse, retract=False)
    assert not idle.is_paused


def test_calls_of_a_lost_server():
    in_flight = make_in_flight()
    opened = begin(in_flight, "a", 0)
    in_flight.pause(lambda: None, retract=False)
    in_flight.lose_all(EngineLost("engine: gone"))
    assert not in_flight.any_open
    assert not in_flight.is_paused
    with pytest.raises(EngineLost, match="gone"):
        opened.sender._next_event()


def test_a_key_is_renewed_when_a_request_looks_for_a_prefix(monkeypatch):
    monkeypatch.setattr(plugin, "weight_version", lambda: "8")
    for key, tree, renewed in (
        (version_key(7), "a tree", version_key(8)),
        (version_key(7), None, version_key(7)),  # a later chunk of a prefill
        (None, "a tree", None),
        ("another's", "a tree", "another's"),
    ):
        request = SimpleNamespace(extra_key=key)
        plugin.renew_key(request, tree)
        assert request.extra_key == renewed
    # SGLang has put the adapter's id into the key, and the request keeps both.
    request = SimpleNamespace(extra_key=version_key(7) + "1b2c", lora_id="1b2c")
    plugin.renew_key(request, "a tree")
    assert request.extra_key == version_key(7) + "1b2c"


@dataclass
class Event:
    old_version: str
    num_output_tokens: int


@pytest.mark.parametrize(
    ("output", "before", "recorded", "after"),
    [
        ([5, 6], [], [("7", 2)], [("7", 3)]),
        ([], [], [], [("7", 1)]),  # its first token is on its way
        ([5], [("6", 1)], [("6", 1), ("7", 1)], [("6", 1), ("7", 2)]),
    ],
)
def test_a_token_on_its_way_belongs_to_the_old_weights(
    monkeypatch, output, before, recorded, after
):
    """The scheduler of GPUs reads a batch's tokens one turn later, and then the weights are new."""
    versions = ["7"]
    monkeypatch.setattr(plugin, "weight_version", lambda: versions[-1])
    monkeypatch.setattr(plugin, "take", {"WeightVersionEvent": Event}.__getitem__)
    request = SimpleNamespace(
        output_ids=output,
        weight_version_events=[Event(*event) for event in before],
        finished=lambda: False,
    )
    chunked = SimpleNamespace(finished=lambda: False)
    batch = SimpleNamespace(reqs=[request, chunked])
    scheduler = SimpleNamespace(enable_overlap=True, result_queue=[(batch, None)])
    scheduler.chunked_req = chunked

    def original(scheduler, new_version):
        request.weight_version_events = [Event(*event) for event in recorded]
        versions.append(new_version)

    plugin.with_pending(original, scheduler, new_version="8")
    assert request.weight_version_events == [Event(*event) for event in after]
    assert not hasattr(chunked, "weight_version_events")


def test_an_abort_without_output_is_an_answer():
    """It may have computed its prompt, but nothing that begins with it."""
    in_flight = make_in_flight()
    opened, request = begin(in_flight, "a", 0), make_request("a")
    in_flight._context_of(opened, ["r1"], [request])
    answer = Answer("r1", request, 0, {"meta_info": {}, "output_ids": []})
    in_flight._note_answer(opened, answer, in_flight._expected(opened, 0))
    assert not in_flight._known._versions[0]._unanswered
