"""A rollout rank does the work for each tenant of a service in a thread beside those of the others."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

from mrl.config import Recipe
from mrl.config.service import TenantLimits
from mrl.disaggregated.engine_place import Restarts
from mrl.disaggregated.free_worker import FreeWorker
from mrl.disaggregated.wire import Wire, WireClosed
from mrl.disaggregated.worker import JOIN_S, Worker, kind_and_text
from mrl.errors import InputError
from mrl.preflight import check
from mrl.rewards.budget import Budget
from mrl.rollout.base import EngineLost
from mrl.rollout.gate import UNLIMITED
from mrl.rollout.sglang.tenants import TenantEngine, TenantEngines
from mrl.run import console
from mrl.system.worker_user import worker_user
from mrl.tenants.record import name_of

REJOIN_S = 0.5
"""Seconds until a worker that the trainer has given up joins anew."""


class SharedEngine:
    """Holds the engine of a rollout rank. Any thread may find it lost; one starts another."""

    def __init__(self, engines: TenantEngines, number: int, max_restarts: int) -> None:
        self.engines, self.number = engines, number
        self._restarts = Restarts(number, max_restarts)
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the engine. Raises InputError and RunFailed."""
        self.engines.start()

    def begin_batch(self) -> None:
        """Count the losses from 0 again, as some tenant's batch is done."""
        with self._starting:
            self._restarts.begin_batch()

    def replace(self, error: EngineLost) -> int:
        """Start another engine where nobody has yet; return how many starts it took. Raises EngineGone
        after too many."""
        with self._starting:
            if self.engines.is_running:
                return 0
            error.is_explained |= self.engines.gate.has_culprit
            return self._restarts.start_another(self.engines.start, error)

    def stop(self) -> None:
        """Stop the engine. Harmless when repeated."""
        with self._starting:
            self.engines.stop()


class TenantPlace:
    """Holds a tenant's part of the engine. See `mrl.disaggregated.engine_place.EnginePlace`."""

    reported: tuple[type[Exception], ...] = (Exception,)
    """The tenant is paused for each: another worker would do the same work with the same engine."""

    def __init__(self, shared: SharedEngine, engine: TenantEngine, limits: TenantLimits) -> None:
        self.number, self.engine = shared.number, engine
        self.budget, self.user = Budget(limits.max_reward_s), worker_user(limits.reward_user)
        self._shared = shared

    def start(self) -> None:
        """The service has started it."""

    def begin_batch(self) -> None:
        self._shared.begin_batch()

    def replace(self, error: EngineLost) -> int:
        return self._shared.replace(error)

    def stop(self) -> None:
        """Let the engine forget the tenant, and go on for the others."""
        with suppress(ValueError, RuntimeError):  # it is forgotten, or the engine is gone
            self._shared.engines.drop(self.engine.name)


class TenantWork:
    """Works for one tenant in threads of its own, until `end`."""

    def __init__(
        self,
        settings: dict[str, Any],
        shared: SharedEngine,
        limits: TenantLimits,
        former: TenantWork | None = None,
    ) -> None:
        """`settings`: those of the process, and what the hub said of the tenant. Work begins when that
        of `former`, the same tenant's, has ended."""
        self._settings, self._shared, self._limits = settings, shared, limits
        self._name = str(settings["tenant"])
        """The tenant's name in the engine: see `mrl.tenants.record.engine_name`."""
        self._is_over = threading.Event()
        self._worker: Worker | None = None
        self._thread = threading.Thread(
            target=self._run, args=(former,), name=f"mrl-{self._name}", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Give up what is being done. Harmless when repeated."""
        self._is_over.set()
        with suppress(ValueError, RuntimeError):
            self._shared.engines.drop(self._name)
        if self._worker is not None:
            self._worker.leave()

    def _run(self, former: TenantWork | None) -> None:
        if former is not None:
            former._thread.join()
        while not self._is_over.is_set():
            try:
                self._work()
                return  # the trainer has said that it is over
            except WireClosed:
                time.sleep(REJOIN_S)
            except Exception as error:
                if not self._is_over.is_set():
                    console.warning(f"tenant {name_of(self._name)}: {error}")
                    self._tell(error)
                return
            finally:
                with suppress(ValueError, RuntimeError):  # it may be forgotten already
                    self._shared.engines.drop(self._name)

    def _tell(self, error: Exception) -> None:
        """Tell the trainer of an error before there was a worker."""
        if self._worker is not None:
            return  # it has told
        with suppress(OSError, WireClosed):
            wire = Wire(socket.create_connection(tuple(self._settings["server"]), JOIN_S))
            hello = {"token": self._settings["token"], "engine": self._shared.number}
            wire.send({"type": "hello", **hello})
            wire.send({"type": "failed", **kind_and_text(error)})
            wire.receive()  # the welcome: the error is read before the connection ends
            wire.close()

    def _work(self) -> None:
        self._worker = None
        recipe = Recipe.model_validate(self._settings["recipe"])
        plan = check(
            recipe,
            int(self._settings["world"]),
            imports_rewards=self._limits.reward_user is None,
        )
        if plan.adapter is None:
            raise InputError("lora: got none, but a tenant trains an adapter; add a lora section")
        engine = self._shared.engines.tenant(
            self._name,
            plan.adapter,
            weight=float(self._settings["weight"]),
            max_tokens_in_flight=self._limits.max_tokens_in_flight or UNLIMITED,
        )
        place = TenantPlace(self._shared, engine, self._limits)
        kind = FreeWorker if recipe.asynchronous.is_free else Worker
        self._worker = kind(plan, place, self._settings)
        self._worker.run()
