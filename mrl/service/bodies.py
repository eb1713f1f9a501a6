"""The bodies of requests that add, pause, resume or remove a tenant."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, create_model

from mrl.service.sessions.bodies import KINDS
from mrl.web.limits import Refused

Text = Annotated[str, Strict()]
Sequence = Annotated[int, Strict()]
Key = Annotated[str, Strict(), Field(pattern="^[A-Za-z0-9_-]{1,64}$")] | None


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class NewTenant(_Body):
    name: Text
    """1 to 63 small letters, digits, - and _."""
    recipe: dict[str, Any]
    """The keys of the recipe, as in its file."""
    weight: Annotated[float, Strict()] = 1.0
    """The tenant's share, relative to the weights of the other tenants."""
    is_record: Annotated[bool, Strict()] = False
    """Whether the recipe is the config.yaml of a run."""
    loop: Literal["recipe", "client"] = "recipe"
    """"client" for a session, whose training loop runs in a client."""
    key: Key = None
    """The key by which a repeated request is recognized."""


class Change(_Body):
    sequence: Sequence | None = None
    """The number of the tenant, which differs from those of other tenants that had its name."""


class Pause(Change):
    reason: Text | None = None
    """Why the tenant is paused."""


POSTED = tuple(
    create_model(f"Posted{kind.__name__}", __base__=kind, life=(str | None, None), key=(Key, None))
    for kind in KINDS.values()
)
"""The forms of an operation as it is posted: with the life of the session for which it is meant, and a
key by which a repeated request is recognized. They are read only to describe the API."""


def read_new(body: dict[str, Any]) -> NewTenant:
    """Return the request for a new tenant. Raises Refused with the first problem."""
    try:
        new = NewTenant.model_validate(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        raise Refused(400, min(map(_line, problems))[1]) from None
    if new.is_record and new.loop == "client":
        raise Refused(400, LOOPS)
    return new


LOOPS = 'loop is "recipe", or "client" for a session, which is no record of a run'


def _line(problem: Any) -> tuple[int, str]:
    """Return what is wrong, after the rank by which one of several problems is chosen."""
    key = str(problem["loc"][0])
    match problem["type"]:
        case "extra_forbidden":
            known = ", ".join(NewTenant.model_fields)
            return 0, f"unknown key {key[:80]!r}; expected {known}"
        case "missing":
            return 2, f"{key} is missing"
        case "literal_error" if isinstance(problem["input"], str):
            return 1, LOOPS
        case "string_pattern_mismatch":
            return 1, "key is 1 to 64 letters, digits, _ and -"
    return 1, f"{key} is of type {type(problem['input']).__name__}"
