"""Reads requests of forward_backward in their two forms, and records those that are refused."""

from __future__ import annotations

from typing import Any

from mrl.errors import InputError
from mrl.tinker import bodies
from mrl.tinker.data import BadDatum
from mrl.tinker.messages import PassHead, read_head, read_pass
from mrl.tinker.training import Training
from mrl.tinker.wire import WireError
from mrl.web.limits import Refused

Answer = dict[str, Any]


def ask_pass(training: Training, owner: str, given: Any, *, forward_only: bool) -> Answer:
    """Carry out the request of a forward_backward; return the request's id.

    `given`: the bytes of a message, or JSON. `forward_only`: whether it is a request of forward, which
    a message says itself. Raises Refused. The SDK splits a batch into several requests, so gradients of
    the others may be there: the next optimizer step fails then, and the reason says so.
    """
    head = PassHead("", 0, forward_only)
    try:
        if isinstance(given, bytes):
            head = read_head(given)
            asked = read_pass(given)
        else:
            head = PassHead(str(given.get("model_id")), given.get("seq_id"), forward_only)
            asked = bodies.read(bodies.JsonPass, given).as_pass(forward_only=forward_only)
        return training.run_pass(owner, asked)
    except (Refused, WireError, BadDatum, InputError) as error:
        status = error.status if isinstance(error, Refused) else 400
        if head.forward_only or status not in (400, 422):
            raise
        cost = training.refused_pass(owner, head.model_id, head.seq_id)
        raise Refused(status, f"{error}{cost}") from None
