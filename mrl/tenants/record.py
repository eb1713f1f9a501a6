"""What a service folder holds of its tenants, which anyone may read while the service writes.

SERVICE_DIR/service.yaml              the resolved configuration
SERVICE_DIR/control.sock              where the service listens (mrl/tenants/control.py)
SERVICE_DIR/token                     the secret of callers over TCP
SERVICE_DIR/start.json                the service's process and its command (mrl/tenants/start.py)
SERVICE_DIR/under_way.json            whose work is under way (mrl/tenants/crashes.py)
SERVICE_DIR/tenants/NAME/recipe.yaml  the resolved recipe
SERVICE_DIR/tenants/NAME/state.json   a `Tenant`
SERVICE_DIR/tenants/.removed/         tenants whose name another one has since
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from mrl.config.branch import Branch
from mrl.errors import InputError
from mrl.system.json_text import parse_json

NAME = r"[a-z0-9][a-z0-9_-]{0,62}"
"""What a tenant may be called: its name is a folder, a part of an address and of the engine's names."""
State = Literal["queued", "running", "paused", "done", "removed"]
Loop = Literal["recipe", "client"]
"""Whose loop trains a tenant: that of its recipe, or one that a client brings (a session)."""
RECIPE, STATE, REMOVED = "recipe.yaml", "state.json", ".removed"
MAX_ROW_BYTES = 1 << 20
"""How far from its end a file of metrics is read for its newest row."""


class Tenant(Branch):
    """A `Tenant` is what a service knows of one beside its recipe."""

    name: str = Field(pattern=f"^{NAME}$")
    state: State
    reason: str = ""
    """Why it is paused, in one line."""
    sequence: int = Field(ge=1)
    """Its number among all tenants that ever joined the service, from 1."""
    weight: float = Field(gt=0)
    """Its share of the training, relative to the other weights."""
    output_dir: str
    """Its run folder, without links."""
    num_steps: int
    """The steps of the whole run; 0 for a session."""
    loop: Loop = "recipe"
    resumed: int = Field(default=0, ge=0)
    """How often it was resumed."""
    request: str = ""
    """A digest of the request that added it if the request had a key; otherwise empty."""

    @property
    def incarnation(self) -> str:
        """The identity of the run of this record: it changes with each resume, and differs from that of
        every other tenant, even of the same name. `name_of` returns the name."""
        return f"{self.sequence}-{self.resumed}-{self.name}"

    @property
    def is_active(self) -> bool:
        """Whether it counts among the tenants that the service has."""
        return self.state in ("queued", "running", "paused")


def name_of(incarnation: str) -> str:
    """Return the name of the tenant of an incarnation."""
    return incarnation.split("-", 2)[2]


def sequence_of(incarnation: str) -> int:
    """Return the number of the tenant of an incarnation, see `Tenant.sequence`."""
    return int(incarnation.split("-", 1)[0])


def engine_name(incarnation: str) -> str:
    """Return the name of an incarnation in engines, cut to the length that they allow; it is unique by
    its beginning."""
    return incarnation[:63]


def check_name(name: Any) -> str:
    """Return the name of a tenant. Raises InputError for one that is not allowed."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise InputError(
            f"the name of a tenant is {str(name)[:80]!r}; expected 1 to 63 small letters, digits, _ "
            "and -, the first of them a letter or digit"
        )
    return name


def read_tenants(service: Path) -> list[Tenant]:
    """Return the tenants of a service folder in the order in which they joined, also removed ones.

    Raises InputError for a folder that is a link, and for a damaged state.json.
    """
    found = [read_tenant(folder) for folder in _folders(service / "tenants", NAME)]
    return sorted(found, key=lambda tenant: tenant.sequence)


def read_past(service: Path) -> list[Tenant]:
    """Return the removed tenants whose name another one has since. Raises InputError."""
    past = service / "tenants" / REMOVED
    return [read_tenant(folder) for folder in _folders(past, rf"\d+-{NAME}")]


def read_tenant(folder: Path) -> Tenant:
    """Return what the state.json of one tenant says. Raises InputError."""
    file = folder / STATE
    try:
        return Tenant.model_validate(parse_json(_read_plain(file), str(file)))
    except (OSError, ValueError, ValidationError) as error:
        what = " ".join(str(error).split())
        raise InputError(
            f"{file} is damaged: {what}; bring it back from a copy, or move {folder} away to give the "
            "tenant up"
        ) from None


def tenant_folder(service: Path, name: str) -> Path:
    """Return the folder of a tenant, which lies in the service's. Raises InputError for a bad name."""
    return service / "tenants" / check_name(name)


def newest_row(run: Path) -> dict[str, Any] | None:
    """Return the newest whole row of a run's metrics; None where there is none."""
    rows = (row for row in newest_rows(run) if isinstance(row.get("step", -1), int))
    return next(rows, None)


def newest_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield whole rows of the metrics of a run or a service, the newest first, from the end of the file
    alone."""
    file = folder / "metrics.jsonl"
    try:
        if not file.is_file():  # a pipe would never answer
            return
        with file.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, end - MAX_ROW_BYTES))
            lines = stream.read().split(b"\n")
    except OSError:
        return
    for line in reversed(lines[:-1]):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def describe(tenant: Tenant) -> dict[str, Any]:
    """Return a tenant as the socket and the commands show it: its record, and its newest metrics."""
    row = newest_row(Path(tenant.output_dir))
    done = 0 if row is None else row.get("step", -1) + 1
    shown = tenant.model_dump(exclude={"request"})
    return {**shown, "steps_done": done, "metrics": row or {}}


def _folders(parent: Path, pattern: str) -> Iterator[Path]:
    """Yield the folders of tenants, by their names. Raises InputError where one is a link."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if not re.fullmatch(pattern, path.name):
            continue
        if path.is_symlink() or not path.is_dir():
            raise InputError(
                f"{path} is not a folder of its own, as that of a tenant has to be; move it away"
            )
        yield path


def _read_plain(file: Path) -> bytes:
    """Read a file that is no link."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read()
