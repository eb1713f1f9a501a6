"""`python -m mrl.tenants.rollout_worker` is the worker of a service's rollout rank.

It leads the engine that all tenants share, and works for each of them as the worker of a run of its own
does (mrl/disaggregated/worker.py), in a thread. The hub says who they are. It imports no Megatron.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from mrl.config import ServiceConfig
from mrl.disaggregated.process import run_worker
from mrl.disaggregated.wire import Wire, WireClosed
from mrl.disaggregated.worker import JOIN_S, PULSE_S, kind_and_text
from mrl.errors import InputError, RunFailed
from mrl.tenants.engines import make_engines
from mrl.tenants.reward_user import prepare_reward_user
from mrl.tenants.tenant_work import SharedEngine, TenantWork
from parallel.mesh import local_device


class ServiceWorker:
    """Works for the tenants of a service on one engine, until the hub says that it is over."""

    def __init__(self, settings: dict[str, Any]) -> None:
        config = ServiceConfig.model_validate(settings["service"])
        self._settings, self._limits, self._number = settings, config.tenants, settings["engine"]
        prepare_reward_user(config.tenants.reward_user, is_main=False)
        engines = make_engines(config, self._number, local_device())
        self._engine = SharedEngine(engines, self._number, config.rollout.max_restarts)
        self._works: dict[str, TenantWork] = {}
        try:
            self._wire = Wire(socket.create_connection(tuple(settings["server"]), JOIN_S))
        except OSError as error:  # the service may be over by now
            raise WireClosed(f"the hub does not answer: {error}") from None
        self._wire.send({"type": "hello", "token": settings["token"], "engine": self._number})

    def run(self) -> None:
        """Work until the hub says that the service is over. Raises WireClosed where it is gone."""
        threading.Thread(target=self._pulse, name="mrl-pulse", daemon=True).start()
        try:
            self._engine.start()
            self._wire.send({"type": "started"})
            self._heed_hub()
        except (InputError, RunFailed) as error:
            self._wire.send({"type": "failed", **kind_and_text(error)})
            raise
        finally:
            for work in self._works.values():
                work.end()
            self._engine.stop()
            self._wire.close()

    def _heed_hub(self) -> None:
        while True:
            message, _ = self._wire.receive()
            if message["type"] == "stop":
                return
            name = message["tenant"]  # of one incarnation, so it is never mixed with another
            if (former := self._works.pop(name, None)) is not None:
                former.end()
            if message["type"] == "open":
                settings = {**self._settings, **message}
                self._works[name] = TenantWork(settings, self._engine, self._limits, former=former)

    def _pulse(self) -> None:
        """Say to the supervisor that this process lives, and to the hub how full the engine is."""
        gate = self._engine.engines.gate
        with suppress(OSError, WireClosed):
            while not self._wire.is_closed:
                os.write(int(self._settings["pulse"]), b".")
                if self._engine.engines.is_running:
                    self._wire.send({"type": "times", "sums": gate.take_times()})
                time.sleep(PULSE_S)


if __name__ == "__main__":
    run_worker(lambda settings: ServiceWorker(settings).run())
