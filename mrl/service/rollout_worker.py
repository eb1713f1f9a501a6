"""The worker process (`python -m mrl.service.rollout_worker`) of a service on a rollout rank.

The process owns an engine, which all tenants share. The coordinator on the trainer's rank 0
announces the tenants. For each tenant, the process runs the same worker as in a run without a
service (mrl/engine_pool/remote/worker.py), in separate threads. The worker of a session has other
jobs (mrl/service/sessions/jobs.py). This module imports no Megatron.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

from mrl.config import Recipe, ServiceConfig
from mrl.config.service import TenantLimits
from mrl.engine_pool.remote.engine_owner import EngineOwner, WorkerEngine
from mrl.engine_pool.remote.messages import failed_message
from mrl.engine_pool.remote.process import PULSE_S, connect, run_worker
from mrl.engine_pool.remote.wire import WireClosed
from mrl.engine_pool.remote.worker import Worker
from mrl.engines.admission import UNLIMITED
from mrl.engines.sglang.server import SGLangServer
from mrl.errors import InputError, RunFailed
from mrl.preflight import check
from mrl.preflight.lora import check_lora
from mrl.rewards.budget import Budget
from mrl.run import console
from mrl.service.engines import make_engines
from mrl.service.record import name_of
from mrl.service.reward_user import prepare_reward_user
from mrl.service.sessions.jobs import SessionJobs
from mrl.system.worker_user import worker_user
from parallel.hf_config import HfModel
from parallel.mesh import local_device

REJOIN_S = 0.5
"""Seconds after which a tenant's worker joins again when its connection to the trainer has
ended."""


class TenantWork:
    """Runs the worker of one tenant in threads of its own, until the trainer stops the worker or
    `end` is called."""

    def __init__(
        self,
        settings: dict[str, Any],
        server: SGLangServer,
        owner: EngineOwner,
        limits: TenantLimits,
        former: TenantWork | None = None,
    ) -> None:
        """`settings`: the settings of this process, merged with the settings that the trainer sent
        for the tenant. `former`: earlier work for the same tenant, which must end before this work
        begins; None if there is none."""
        self._settings, self._limits = settings, limits
        self._server, self._owner = server, owner
        self._name = str(settings["tenant"])
        """The tenant's name in the engine: see `mrl.service.record.engine_name`."""
        self._is_over = threading.Event()
        self._worker: Worker | None = None
        self._thread = threading.Thread(
            target=self._run, args=(former,), name=f"mrl-{self._name}", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Cancel the work for the tenant. Harmless when repeated."""
        self._is_over.set()
        self._drop()
        if self._worker is not None:
            self._worker.leave()

    def _run(self, former: TenantWork | None) -> None:
        if former is not None:
            former._thread.join()
        while not self._is_over.is_set():
            try:
                self._work()
                return  # the trainer has sent `stop`
            except WireClosed:
                time.sleep(REJOIN_S)
            except Exception as error:
                if not self._is_over.is_set():
                    console.warning(f"tenant {name_of(self._name)}: {error}")
                    self._report(error)
                return
            finally:
                self._drop()

    def _drop(self) -> None:
        """Remove the tenant from the engine, which continues to work for other tenants."""
        with suppress(ValueError, RuntimeError):  # it is removed already, or the engine is gone
            self._server.remove_endpoint(self._name)

    def _report(self, error: Exception) -> None:
        """Report an error to the trainer. Does nothing if a `Worker` was constructed, because a
        `Worker` reports its own errors."""
        if self._worker is not None:
            return
        with suppress(WireClosed):
            wire = connect(self._settings)
            wire.send(failed_message(error))
            wire.receive()  # when the welcome arrives, the error has been read
            wire.close()

    def _work(self) -> None:
        self._worker = None
        recipe = Recipe.model_validate(self._settings["recipe"])
        if self._settings["loop"] == "client":
            adapter = check_lora(recipe, HfModel.read(recipe.model.path, recipe.model.architecture))
            jobs = SessionJobs(recipe.captures_routes)
            make = partial(Worker, recipe, jobs=jobs)
        else:
            plan = check(
                recipe,
                int(self._settings["world"]),
                imports_rewards=self._limits.reward_user is None,
            )
            adapter, make = plan.adapter, partial(Worker.of_plan, plan)
        assert adapter is not None  # `check_tenant` refuses a recipe without an adapter
        endpoint = self._server.add_endpoint(
            self._name,
            adapter,
            weight=float(self._settings["weight"]),
            max_tokens_in_flight=self._limits.max_tokens_in_flight or UNLIMITED,
        )
        engine = WorkerEngine(
            self._owner,
            endpoint,
            Budget(self._limits.max_reward_s),
            worker_user(self._limits.reward_user),
            # All errors are reported, so that the tenant is paused: another worker would only repeat
            # the same work with the same engine.
            reported_errors=(Exception,),
        )
        self._worker = make(engine=engine, settings=self._settings)
        self._worker.run()


class ServiceWorker:
    """Runs one engine for all tenants of a service, until the coordinator sends `stop`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        config = ServiceConfig.model_validate(settings["service"])
        self._settings, self._limits, number = settings, config.tenants, settings["engine"]
        prepare_reward_user(config.tenants.reward_user, is_main=False)
        self._server = server = make_engines(config, number, local_device())
        assert server.gate is not None
        self._gate = gate = server.gate
        self._owner = EngineOwner(
            server,
            number,
            config.rollout.max_restarts,
            is_running=lambda: server.is_running,
            has_culprit=lambda: gate.has_culprit,
        )
        self._works: dict[str, TenantWork] = {}
        self._wire = connect(settings)

    def run(self) -> None:
        """Start the engine, and work until the coordinator sends `stop`. Raises WireClosed if the
        coordinator is gone."""
        threading.Thread(target=self._pulse, name="mrl-pulse", daemon=True).start()
        try:
            self._owner.start()
            self._wire.send({"type": "started"})
            self._work()
        except (InputError, RunFailed) as error:
            self._wire.send(failed_message(error))
            raise
        finally:
            for work in self._works.values():
                work.end()
            self._owner.stop()
            self._wire.close()

    def _work(self) -> None:
        while True:
            message, _ = self._wire.receive()
            if message["type"] == "stop":
                return
            name = message["tenant"]  # an engine name, which differs between incarnations
            if (former := self._works.pop(name, None)) is not None:
                former.end()
            if message["type"] == "open":
                settings = {**self._settings, **message}
                self._works[name] = TenantWork(
                    settings, self._server, self._owner, self._limits, former=former
                )

    def _pulse(self) -> None:
        """Send heartbeats to the supervisor. Also send statistics of how full the engine was to the
        coordinator."""
        with suppress(OSError, WireClosed):
            while not self._wire.is_closed:
                os.write(int(self._settings["pulse"]), b".")
                if self._server.is_running:
                    self._wire.send({"type": "times", "sums": self._gate.take_times()})
                time.sleep(PULSE_S)


if __name__ == "__main__":
    run_worker(lambda settings: ServiceWorker(settings).run())
