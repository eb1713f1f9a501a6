"""Keeps the tenants of a service on disk, so that a service that was killed finds all of them again.

Every change is one rename: after `kill -9` it is there as a whole, or not at all. All methods may be
called from any thread.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import yaml

from mrl.config import Recipe, ServiceConfig, dump_recipe
from mrl.errors import DiskFailed, InputError
from mrl.run import console
from mrl.system.disk import refusing
from mrl.system.files import lock_folder, sync, write_whole
from mrl.system.processes import Closing
from mrl.tenants.agreement import resolve_tenant
from mrl.tenants.crashes import REASON, Crashes
from mrl.tenants.places import check_place, run_folder
from mrl.tenants.record import (
    RECIPE,
    REMOVED,
    STATE,
    Loop,
    State,
    Tenant,
    check_name,
    name_of,
    read_past,
    read_tenants,
    tenant_folder,
)
from mrl.tenants.sessions.operations import Operations
from mrl.tenants.sessions.recipe import check_session, session_tree

AFTER: Mapping[str, tuple[State, ...]] = {
    "queued": ("running", "paused", "done", "removed"),
    "running": ("paused", "done", "removed"),
    "paused": ("queued", "done", "removed"),
    "done": ("removed",),
    "removed": (),
}
"""The states that may follow a state. A running one that is paused may have ended with that step."""
MAX_REASON_CHARS = 500
MIN_WEIGHT = 1e-6


class NoTenant(InputError):
    """There is no tenant of that name."""


class WrongState(InputError):
    """The tenant's state does not allow the change."""


class Registry(Closing):
    """Opens a service folder for one service at a time.

    `admit` is given the recipe of a new tenant and returns what is stored in its place; it may raise
    InputError. Tenants that no longer agree with the service are paused with the reason. Raises
    InputError where another service has the folder open, or something in it is damaged.
    """

    def __init__(
        self, service: ServiceConfig, admit: Callable[[Recipe], Recipe] = lambda recipe: recipe
    ) -> None:
        self.service, self._admit = service, admit
        self.root = Path(os.path.realpath(service.output_dir))
        self._changing = threading.RLock()
        self.operations = Operations()
        """What clients ask of the sessions among the tenants; it is not on disk."""
        self.kept: set[str] = set()
        """Tenants whose state the disk refused: it is here alone until `write_kept` succeeds."""
        with ExitStack() as undo, refusing(self.root):
            (self.root / "tenants" / REMOVED).mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.root, "service")
            undo.callback(self._lock.close)
            for folder in (self.root.parent, self.root, self.root / "tenants"):
                sync(folder)
            for partial in (self.root / "tenants").glob(".*.new"):  # of an `add` that was killed
                shutil.rmtree(partial)
            self._tenants = {tenant.name: tenant for tenant in read_tenants(self.root)}
            self._past = read_past(self.root)
            dump_recipe(service, self.root / "service.yaml")
            self._settle_all()
            undo.pop_all()

    def close(self) -> None:
        """Let another service have the folder. Harmless when repeated."""
        self._lock.close()

    def tenants(self) -> list[Tenant]:
        """Return the tenants that were not removed, in the order in which they joined."""
        with self._changing:
            kept = [each for each in self._tenants.values() if each.state != "removed"]
        return sorted(kept, key=lambda tenant: tenant.sequence)

    def get(self, name: str) -> Tenant:
        """Return a tenant, also one that was removed. Raises NoTenant."""
        with self._changing:
            if (found := self._tenants.get(name)) is None:
                known = ", ".join(t.name for t in self.tenants()) or "none"
                raise NoTenant(f"there is no tenant {name[:80]!r}; there are: {known}")
            return found

    def recipe(self, name: str) -> Recipe:
        """Return the resolved recipe of a tenant. Raises InputError where it no longer fits."""
        file = tenant_folder(self.root, self.get(name).name) / RECIPE
        try:
            tree = yaml.safe_load(file.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise InputError(f"{file} is damaged: {' '.join(str(error).split())}") from None
        if not isinstance(tree, dict):
            raise InputError(f"{file} is damaged: it holds no keys")
        return resolve_tenant(self.service, tree, str(file), is_record=True)

    def add(
        self,
        name: str,
        tree: Mapping[str, Any],
        *,
        weight: float = 1.0,
        is_record: bool = False,
        loop: Loop = "recipe",
        request: str = "",
    ) -> Tenant:
        """Add a tenant to the queue, and return it; with `loop` "client" it is a session. If the same
        `request` is repeated, the tenant that it added is returned as it is now.

        `tree` and `is_record`: see `mrl.tenants.agreement.resolve_tenant`; its output_dir is absolute.
        Raises InputError for whatever is wrong with it, and where there is no place for it.
        """
        check_name(name)
        if (known := self._of_request(name, request)) is not None:
            return known
        if not MIN_WEIGHT <= weight <= 1 / MIN_WEIGHT:
            raise InputError(
                f"weight is {weight:g}; expected a number from {MIN_WEIGHT:g} to {1 / MIN_WEIGHT:g}"
            )
        if loop == "client":
            if self.service.rollout.placement != "colocated":
                raise InputError(
                    "a session needs engines that take turns with the trainer, but the service has "
                    f"rollout.placement={self.service.rollout.placement}; start another service"
                )
            tree = session_tree(tree)
        recipe = resolve_tenant(self.service, tree, f"the recipe of {name}", is_record=is_record)
        if loop == "client":
            check_session(recipe)
        recipe = self._admit(recipe)
        output = run_folder(self.root, recipe.output_dir)
        recipe = recipe.model_copy(update={"output_dir": str(output)})
        with self._changing, refusing(self.root):
            if (known := self._of_request(name, request)) is not None:
                return known  # both requests arrived at the same time
            past = (*self._tenants.values(), *self._past)
            check_place(name, output, self.tenants(), past, self.service.tenants.max_number)
            numbers = [t.sequence for t in past]
            tenant = Tenant(
                name=name,
                state="queued",
                sequence=max(numbers, default=0) + 1,
                weight=weight,
                output_dir=str(output),
                num_steps=recipe.train.num_steps,
                loop=loop,
                request=request,
            )
            self._write_new(tenant, recipe)
            self._tenants[name] = tenant
            return tenant

    def _of_request(self, name: str, request: str) -> Tenant | None:
        """Return the tenant that this request added before; None if there is none or no request."""
        with self._changing:
            found = [*self._past, *self._tenants.values()] if request else []
            return next((t for t in found if (t.name, t.request) == (name, request)), None)

    def move(self, name: str, state: State, reason: str = "", number: int | None = None) -> Tenant:
        """Give a tenant another state, and return it. With `number`, only if it has this sequence.

        A paused tenant that is queued again is checked against the service again, and begins another
        incarnation. If a session leaves the service, the operations in its queue are lost. Raises
        NoTenant, InputError, and WrongState if its present state does not allow it.
        """
        found = self.get(name)
        if number not in (None, found.sequence):
            raise WrongState(
                f"tenant {name} now has the sequence {found.sequence}, expected {number}; it is "
                "another tenant of that name: look at it again"
            )
        self._check_state(found, state)
        recipe = None
        if state == "queued":
            recipe = self.recipe(name)  # which imports code of the tenant: not while others wait
        with self._changing, refusing(self.root):
            tenant = self._moved(self.require_same(found), state, reason)
            if recipe is not None:
                dump_recipe(recipe, tenant_folder(self.root, name) / RECIPE)
            self._write(tenant)
            if state not in ("queued", "running"):
                self.operations.close(tenant.incarnation)
            return tenant

    def try_move(self, incarnation: str, state: State, reason: str = "") -> bool:
        """Move an incarnation as `move` does a tenant, unless a user has changed the tenant first.

        What the disk refuses is kept in memory. Returns whether the tenant was moved.
        """
        name = name_of(incarnation)
        try:
            with self._changing:
                if (tenant := self.get(name)).incarnation != incarnation:
                    return False
                try:
                    self.move(name, state, reason)
                except DiskFailed:
                    self._tenants[name] = self._moved(tenant, state, reason)
                    self.kept.add(name)
        except (NoTenant, WrongState):
            return False
        return True

    def write_kept(self) -> list[str]:
        """Write the states that were kept in memory, where the disk takes them now; return whose."""
        written: list[str] = []
        with self._changing:
            for name in sorted(self.kept):
                with suppress(OSError):
                    self._write(self._tenants[name])
                    written.append(name)
        return written

    def require_same(self, tenant: Tenant) -> Tenant:
        """Return the current record of an incarnation. Raises WrongState if the name has another
        one."""
        if (found := self.get(tenant.name)).incarnation != tenant.incarnation:
            raise WrongState(f"tenant {tenant.name} was changed by somebody else; look at it again")
        return found

    def _moved(self, tenant: Tenant, state: State, reason: str) -> Tenant:
        """Return a tenant with another state. Raises WrongState."""
        self._check_state(tenant, state)
        words = " ".join(reason.split())[:MAX_REASON_CHARS] if state == "paused" else ""
        again = tenant.resumed + (state == "queued")
        return tenant.model_copy(update={"state": state, "reason": words, "resumed": again})

    def _check_state(self, tenant: Tenant, state: State) -> None:
        if state not in AFTER[tenant.state]:
            why = f" ({tenant.reason})" if tenant.reason else ""
            raise WrongState(
                f"tenant {tenant.name} is {tenant.state}{why}; it cannot become {state} from there"
            )

    def _settle_all(self) -> None:
        """Settle the tenants that are to run, and pause those in whose work the service ended again and
        again, which may have been here."""
        crashes = Crashes(self.root)
        culprits = crashes.take_culprits()
        for tenant in self.tenants():
            if tenant.state not in ("queued", "running"):
                continue
            if tenant.incarnation in culprits:
                self.try_move(tenant.incarnation, "paused", REASON)
                console.warning(f"tenant {tenant.name} is paused: {REASON}")
            else:
                crashes.begin(tenant.incarnation, -1)
                self._settle(tenant)
        crashes.end()

    def _settle(self, tenant: Tenant) -> None:
        """Bring the stored recipe to the present values of the service, or pause the tenant."""
        try:
            recipe = self.recipe(tenant.name)  # which imports code of the tenant
        except InputError as error:
            self.move(tenant.name, "paused", str(error))
            return
        dump_recipe(recipe, tenant_folder(self.root, tenant.name) / RECIPE)

    def _write_new(self, tenant: Tenant, recipe: Recipe) -> None:
        """Write the folder of a new tenant beside its place, then move it there."""
        place = tenant_folder(self.root, tenant.name)
        new = place.with_name(f".{tenant.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        dump_recipe(recipe, new / RECIPE)
        write_whole(new / STATE, tenant.model_dump_json() + "\n", durable=True)
        if (past := self._tenants.get(tenant.name)) is not None:
            place.rename(place.parent / REMOVED / f"{past.sequence}-{past.name}")
            sync(place.parent / REMOVED)
            self._past.append(past)
        new.rename(place)
        sync(place.parent)

    def _write(self, tenant: Tenant) -> None:
        file = tenant_folder(self.root, tenant.name) / STATE
        write_whole(file, tenant.model_dump_json() + "\n", durable=True)
        self._tenants[tenant.name] = tenant
        self.kept.discard(tenant.name)
