"""What all requests of the API share: access to the service, checks of ownership, and posting
operations to sessions of the service."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from mrl.config import ServiceConfig
from mrl.errors import InputError
from mrl.service.record import Tenant
from mrl.service.registry import NoTenant, Registry, WrongState
from mrl.service.sessions import saved
from mrl.service.sessions.bodies import Bounds, read_body
from mrl.service.sessions.operations import LOST, NoOperation, OtherLife, TooMany
from mrl.service.sessions.saved import Saved
from mrl.tinker.ledger import Ledger, Row
from mrl.tinker.paths import Kind
from mrl.web.limits import Refused
from parallel.hf_config import HfModel

IDLE_S = 600.0
"""A client that has sent no heartbeat for this many seconds counts as ended. Its models stay open until
another client needs their slots."""
REQUESTS_S = 7 * 86400.0
"""How long requests are kept in the ledger, in seconds."""
TRAINS = ("forward_backward", "optim_step", "load_weights")
"""The kinds of requests that change a model or its gradients."""
FOLDERS: dict[Kind, saved.Kind] = {
    "training": "states",
    "sampler": "samplers",
    "external": "samplers",
}
"""The folder, inside a run folder, in which a session of the service keeps each kind of checkpoint."""
EXPORTED = "export."
"""Prefix of the names of samplers that are written for an export. Clients cannot use it."""
NOT_YOURS = "there is no {what} {key!r} that this key owns"
USES = ("models", "samplers", "hosts")
"""The tables whose rows name a session of the service, and a client's session that uses it. `hosts` has
those that only sample, and those of models that are being created."""
UNFINISHED = ("queued", "running")
"""States of an operation, and of a session of the service, that others follow."""
WILL_FAIL = (
    "; the next optim_step of this model will fail and drop all gradients since the last one, because "
    "those of this request are missing: then begin the step again"
)
MISSING = (
    "{} was refused or failed, so its gradients are missing; those of the others are dropped: begin "
    "the step again"
)


class Backend:
    """The registry of the service, and the ledger of the API. Any thread may call the methods.
    They raise Refused for requests that cannot be carried out."""

    def __init__(self, registry: Registry, ledger: Ledger) -> None:
        self.registry, self.ledger = registry, ledger
        self.making = threading.Lock()
        """Held while a model or a sampler is created."""
        self._started = time.monotonic()
        self._seen: dict[str, float] = {}
        """When a client of each session was last seen, by the session's id (`time.monotonic`): a change
        of the clock ends no client."""
        self._whole: set[tuple[str, str]] = set()
        """Pairs (session of the service, life) in which nothing was lost, see `check_whole`."""
        ledger.remove_older("requests", time.time() - REQUESTS_S)

    @property
    def config(self) -> ServiceConfig:
        return self.registry.service

    @cached_property
    def model(self) -> HfModel:
        return HfModel.read(self.config.model.path, self.config.model.architecture)

    @cached_property
    def model_name(self) -> str:
        """The name of the base model. It is the absolute path of its folder, so that clients on this
        machine can load the tokenizer from it."""
        return str(Path(self.config.model.path).absolute())

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds.of(self.model, self.config.rollout)

    def check_base(self, name: str) -> None:
        """Raise Refused unless `name` is the name of the base model: the path of its folder, or the
        last parts of the path, such as `Qwen/Qwen3-30B-A3B` of `/models/Qwen/Qwen3-30B-A3B`."""
        given, path = name.partition(":")[0].strip("/"), self.model_name
        if not given or not path.endswith(f"/{given}"):
            raise Refused(
                400,
                f"base_model is {name[:200]!r}, but this service has {path!r}; "
                "get_server_capabilities lists it",
            )

    def owned(self, table: str, owner: str, key: str) -> Row:
        """Return a row that `owner` owns. Otherwise raise Refused, with the same message for a row of
        another owner as for a row that does not exist."""
        found = self.ledger.get(table, key)
        if found is None or found["owner"] != owner:
            raise Refused(404, NOT_YOURS.format(what=table.removesuffix("s"), key=key[:200]))
        return found

    def session(self, owner: str, key: str) -> Row:
        """Return a client's session that is not finished, and record that its client is alive."""
        found = self.owned("sessions", owner, key)
        self.session_seen(key)
        return found

    def session_seen(self, key: str) -> None:
        """Record that the client of a session is alive. Raises Refused if the session is finished."""
        found = self.ledger.get("sessions", key)
        if found is None or found["finished"]:
            raise Refused(410, f"session {key} is finished; make a new ServiceClient")
        self._seen[key] = time.monotonic()

    def tenant(self, name: str) -> Tenant | None:
        """Return the session of the service that was made for this API under this name; None if there
        is none, if it was removed, or if an administrator has given its name to another tenant."""
        try:
            found = self.registry.get(name)
        except NoTenant:
            return None
        made = self.ledger.find("models", tenant=name) or self.ledger.find("hosts", tenant=name)
        is_same = not made or made[0]["sequence"] in (None, found.sequence)
        return found if is_same and found.state != "removed" else None

    def is_open(self, tenant: Tenant) -> bool:
        """Whether a session of the service is open, so that the state of its operations is known."""
        return self.registry.operations.show(tenant.incarnation)["version"] is not None

    def add_tenant(self, name: str, lora: dict[str, Any], seed: int, **more: Any) -> Tenant:
        """Add a session to the service. If the service is full, close the oldest model
        of a client that has ended. Raises InputError."""
        routes = "r3" if self.config.moe.capture_routes else "off"
        tree = {
            "lora": lora,
            "seed": seed,
            "optimizer": {
                "lr": 1e-4,
                "adam_beta2": 0.95,
                "adam_eps": 1e-12,
                "clip_grad": 0.0,
            },
            "moe": {"routing_replay": routes},
            "train": {"share_prefixes": "auto"},
            "output_dir": str(self.registry.root / "runs" / name),
            **more,
        }
        request = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
        try:
            return self.registry.add(name, tree, loop="client", request=request)
        except InputError as error:
            if "tenants.max_number" not in str(error) or not self._make_room():
                raise
        return self.registry.add(name, tree, loop="client", request=request)

    def _make_room(self) -> bool:
        """Close the oldest session of the service whose clients have ended. Return whether there was
        one."""
        for row in (row for table in USES for row in self.ledger.find(table)):
            tenant = self.tenant(row["tenant"] or "")
            if tenant is not None and tenant.is_active and self._is_left(tenant.name):
                self.end(tenant.name)
                return True
        return False

    def _is_left(self, tenant: str) -> bool:
        """Whether all clients of a session of the service have ended."""
        rows = (row for table in USES for row in self.ledger.find(table, tenant=tenant))
        return all(self._has_ended(row["session"]) for row in rows)

    def _has_ended(self, session: str) -> bool:
        """Whether the client of a session has ended. Clients could not say that they are alive while
        the service was down, so the time is counted from its start."""
        found = self.ledger.get("sessions", session)
        seen = self._seen.get(session, self._started)
        return found is None or bool(found["finished"]) or time.monotonic() - seen > IDLE_S

    def end(self, name: str) -> None:
        """Save and close a session of the service. Its run folder and checkpoints stay."""
        tenant = self.tenant(name)
        if tenant is not None and tenant.is_active:
            with suppress(WrongState):  # another thread was first
                self.registry.move(name, "done", number=tenant.sequence)

    def post(
        self,
        owner: str,
        request: str,
        kind: str,
        tenant_name: str,
        body: dict[str, Any],
        about: dict[str, Any] | None = None,
    ) -> str:
        """Post an operation to a session of the service, and return the operation's id. A request that
        was made before is not carried out again.

        `request`: the id of the request; a repeated request has the same id. `about`: data that the
        answer needs in addition to the operation's result.
        """
        own = {key: value for key, value in body.items() if key != "sampler"}  # it may have moved
        mark = hashlib.sha256(json.dumps([kind, own], sort_keys=True).encode()).hexdigest()
        if (known := self.ledger.get("requests", request)) is not None:
            if known["digest"] != mark or known["owner"] != owner:
                raise Refused(
                    400,
                    f"request {request[:200]} was made before with another body; give each request a "
                    "seq_id of its own",
                )
            return known["operation"]
        tenant = self.active(tenant_name)
        begins = kind in ("optim_step", "load_weights")  # the gradients begin at zero after it
        refused = self.ledger.get("refused", tenant_name) if begins else None
        if refused is not None and kind == "optim_step":
            body = {"kind": "drop_gradients", "reason": MISSING.format(refused["what"])}
        try:
            asked = read_body(body, self.bounds)
            key = hashlib.sha256(request.encode()).hexdigest()[:40]
            operation = self.registry.operations.post(tenant.incarnation, asked, None, key)
        except (TooMany, OtherLife) as error:
            status = 429 if isinstance(error, TooMany) else 410
            raise Refused(status, str(error)) from None
        except InputError as error:
            raise Refused(400, str(error)) from None
        with self.ledger.together():
            self.note(owner, request, kind, tenant_name, operation, mark, about)
            if begins:
                self.ledger.remove("refused", tenant_name)
        return operation

    def note_refused(self, model: Row, what: str) -> str:
        """Record that the pass `what` of a model was refused, so that the next optimizer step fails:
        the SDK may have split a batch, of which other passes were accepted. Return the text to add to
        the reason of the refusal; empty if the model takes no requests."""
        tenant = self.tenant(model["tenant"])
        if tenant is None or tenant.state not in UNFINISHED:
            return ""
        self.ledger.add("refused", tenant=tenant.name, what=what)
        return WILL_FAIL

    def note(
        self,
        owner: str,
        request: str,
        kind: str,
        tenant: str,
        operation: str = "",
        digest: str = "",
        about: dict[str, Any] | None = None,
    ) -> None:
        """Add a request to the ledger."""
        self.ledger.add(
            "requests",
            id=request,
            owner=owner,
            kind=kind,
            digest=digest,
            tenant=tenant,
            operation=operation,
            about=about or {},
            created=time.time(),
        )

    def active(self, name: str) -> Tenant:
        """Return a session of the service that takes operations."""
        tenant = self.tenant(name)
        if tenant is None or tenant.state not in UNFINISHED:
            state = "removed" if tenant is None else tenant.state
            why = f" ({tenant.reason})" if tenant is not None and tenant.reason else ""
            raise Refused(
                410,
                f"the model is {state}{why} and takes no more requests; go on from a checkpoint with "
                "create_training_client_from_state_with_optimizer",
            )
        return tenant

    def check_whole(self, model: Row) -> None:
        """Raise Refused if an operation of this model was lost since it was created or loaded. The
        client would otherwise train other weights than it expects. Passes before an optimizer step that
        failed are not missed: the step has dropped their gradients. A pass that failed in an earlier
        life is noted as refused."""
        tenant = self.active(model["tenant"])
        shown = self.registry.operations.show(tenant.incarnation)
        if (tenant.name, shown["life"]) in self._whole:
            return
        posted = self.ledger.find("requests", tenant=tenant.name)
        posted = [row for row in posted if row["kind"] in TRAINS]
        if posted and shown["version"] is None:
            raise Refused(503, f"model {model['id']} is being opened again; try again")
        ended = self.registry.operations.ended(tenant.incarnation)
        is_dropped = has_step = False
        for row in reversed(posted):
            state, is_pass = ended.get(row["operation"]), row["kind"] == "forward_backward"
            if is_dropped and is_pass:
                continue
            if state == "failed" and is_pass and not has_step:
                self.ledger.add("refused", tenant=tenant.name, what=f"forward_backward {row['id']}")
            has_step |= not is_pass
            if row["operation"].startswith(shown["life"]):
                if row["kind"] == "load_weights" and state is None:
                    if posted[0]["operation"].startswith(shown["life"]):
                        continue  # nothing came before this life
                    raise Refused(503, f"model {model['id']} is being loaded; try again")
            elif state in (None, "lost"):
                raise Refused(
                    410,
                    f"{row['kind']} {row['id']} was {self.look(row).get('reason', LOST)}; load a "
                    "checkpoint, or make a new training client from one",
                )
            if state == "done" and row["kind"] in ("optim_step", "load_weights"):
                break  # the checkpoint has this, and so what came before it
            is_dropped |= state == "failed" and row["kind"] == "optim_step"
        self._whole.add((tenant.name, shown["life"]))

    def look(self, request: Row) -> dict[str, Any]:
        """Return the `state` of a request's operation, and its `result` or `reason`. While its session
        is being opened, operations of an earlier life count as "queued", because their outcome is not
        known yet."""
        tenant = self.tenant(request["tenant"])
        if tenant is not None and tenant.state in UNFINISHED and not self.is_open(tenant):
            return {"state": "queued"}
        try:
            return self.registry.operations.look(request["tenant"], request["operation"])
        except NoOperation:
            return {"state": "lost", "reason": LOST}

    def run_folder(self, tenant: str) -> Path:
        """Return the run folder of a session of the service, whether or not it is still there."""
        return self.registry.root / "runs" / tenant

    def saved(self, tenant: str, kind: Kind, name: str) -> Saved | None:
        """Return the files that a session of the service has written for a checkpoint; None if there
        is no complete checkpoint with this name."""
        if not tenant:
            return None
        return saved.describe(self.run_folder(tenant), FOLDERS[kind], saved_name(kind, name))


def saved_name(kind: Kind, name: str) -> str:
    """Return the name of a checkpoint within its session of the service."""
    return EXPORTED + name if kind == "external" else name
