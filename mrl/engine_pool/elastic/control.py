"""The addresses through which users list, add and remove the engines of a job, and the control socket
of a run.

    GET    /engines
    POST   /engines             {"count": 1, "host": ..., "gpus": [...]}, which may be left out
    DELETE /engines/NUMBER      {"now": false}, which may be left out

A service answers them on its own control socket (mrl/service/control.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError
from starlette.datastructures import Headers

from mrl.engine_pool.elastic.membership import Membership, NoEngine
from mrl.errors import InputError
from mrl.run import console
from mrl.system.processes import Closing
from mrl.web.app import Api, Incoming, Rules
from mrl.web.callers import is_of_this_machine
from mrl.web.limits import Limits, Refused
from mrl.web.server import HttpServer
from mrl.web.unix_socket import SOCKET, open_unix

Text = Annotated[str, Strict()]
STATUSES: dict[type[Exception], int] = {NoEngine: 404, InputError: 409}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class NewEngines(_Body):
    count: Annotated[int, Strict()] = 1
    """How many engines are added."""
    host: Text | None = None
    """The machine on which they run, as GET /engines names it; null for any."""
    gpus: Annotated[list[Text], Field(max_length=1024)] = []
    """The ids of the GPUs on which they run."""


class Removal(_Body):
    now: Annotated[bool, Strict()] = False
    """Whether other engines do what the engine has not finished, instead of the engine."""


B = TypeVar("B", bound=_Body)


def add_engine_calls(api: Api, find: Callable[[], Membership]) -> None:
    """Add the addresses of engines to an API. `find` returns the engines of the job. It raises Refused
    if there are none that could be added or removed."""

    def add(incoming: Incoming) -> tuple[int, dict[str, Any]]:
        new = _read(NewEngines, incoming)
        return 201, {"added": find().add(new.count, new.host, new.gpus), **find().describe()}

    def remove(incoming: Incoming) -> dict[str, Any]:
        text = incoming.path["number"]
        if not (text.isascii() and text.isdecimal() and len(text) < 9):
            raise Refused(400, f"an engine has a number, got {text[:80]!r}")
        find().remove(int(text), now=_read(Removal, incoming).now)
        return find().describe()

    api.add("GET", "/engines", lambda incoming: find().describe())
    api.add("POST", "/engines", add, NewEngines, needs_body=False)
    api.add("DELETE", "/engines/{number}", remove, Removal, needs_body=False)


def _read(kind: type[B], incoming: Incoming) -> B:
    try:
        return kind.model_validate(incoming.json())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(400, f"{where}: {first['msg']}") from None


class EngineControl(Closing):
    """The control socket of a run. It listens from its construction until `close()`. Raises OSError if
    it cannot listen."""

    def __init__(self, folder: Path, membership: Membership) -> None:
        self._folder = folder
        limits = Limits()
        rules = Rules(
            "The control socket of an mrl run",
            "docs/engines.md",
            _allow,
            statuses=STATUSES,
            is_strict=True,
        )
        api = Api(rules, limits)
        add_engine_calls(api, lambda: membership)
        api.describe_at("/openapi.json")
        with ExitStack() as undo:
            listener = undo.enter_context(open_unix(folder))
            undo.enter_context(HttpServer(api.asgi, listener, limits, name="the control socket"))
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Accept no more connections, and remove the socket file. Harmless when repeated."""
        self._undo.close()
        (self._folder / SOCKET).unlink(missing_ok=True)


def open_control(folder: Path, membership: Membership) -> EngineControl | None:
    """Open the control socket of a run. If its folder cannot have one, the run goes on without."""
    try:
        return EngineControl(folder, membership)
    except OSError as error:
        console.warning(
            f"{folder / SOCKET}: {error.strerror or error}; the run goes on, and mrl engines cannot "
            "reach it"
        )
        return None


def _allow(headers: Headers, path: str) -> str:
    if not is_of_this_machine(headers.get("host"), headers.get("origin")):
        raise Refused(403, "not for web pages: leave Origin out and call localhost")
    return ""
