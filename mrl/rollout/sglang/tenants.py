"""One SGLang server for several tenants: a frozen base, and an adapter of its own for each of them.

Requests of all tenants share batches. What keeps them apart:

- SGLang knows version 7 of tenant NAME as `NAME@7`, and its prefix cache keeps adapters apart by an id
  that is new at each load. Keys by version and call (flights.py) come on top, and every answer is
  checked: a tenant that read more from the cache than its own requests computed ends with WrongWeights.
- Each tenant has its own versions, calls and request ids. An abort names the tenant's requests.
- Nothing that a tenant asks for stops the server, flushes its cache or waits for others' requests.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from mrl.config import ModelConfig, RolloutConfig
from mrl.config.adapter import Adapter, AdapterLimits
from mrl.rollout.base import MEMORY_TAGS, PauseMode
from mrl.rollout.gate import UNLIMITED, Gate, Policy
from mrl.rollout.sglang.adapter.manifest import AdapterManifest
from mrl.rollout.sglang.adapter.sync import AdapterSync
from mrl.rollout.sglang.flight import LineUp
from mrl.rollout.sglang.host import Host
from mrl.rollout.sglang.served import Served

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class TenantEngine(Served):
    """This is `mrl.rollout.base.RolloutEngine` for one tenant. It generates after its first update.

    All methods may be called while other tenants generate or update. generate() without `beside_others`
    is alone among the calls of this tenant, and reads nothing that an earlier call has cached. The
    engine as a whole is started, put to sleep and stopped by `TenantEngines` alone.
    """

    def __init__(self, host: Host, name: str, adapter: AdapterManifest, line_up: LineUp) -> None:
        super().__init__(host, name=name, adapter=adapter, shares=True, line_up=line_up)
        self.name = name
        self._is_gone = False

    @property
    def process_id(self) -> int | None:
        return self._host.process_id

    def wake(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Wake the whole engine; a tag that is awake already is left alone."""
        self._host.wake(tags)

    def start(self, address: str = "", meanwhile: Callable[[], None] | None = None) -> None:
        self._refuse("start")

    def sleep(self, level: int = 2) -> None:
        self._refuse("sleep")

    def stop(self) -> None:
        self._refuse("stop")

    def pause(self, mode: PauseMode = "in_place") -> None:
        self._refuse("pause")

    def resume(self) -> None:
        self._refuse("resume")

    def start_profile(self, folder: Path, name: str, *, with_stack: bool) -> None:
        self._refuse("start_profile")

    def stop_profile(self) -> None:
        self._refuse("stop_profile")

    def _refuse(self, action: str) -> NoReturn:
        raise RuntimeError(
            f"{action}: tenant {self.name!r} shares its engine with others; expected a call of the "
            "whole engine, TenantEngines"
        )

    def ready_version(self, action: str = "generate", *, may_be_busy: bool = False) -> int:
        self._require_present(action)
        return super().ready_version(action, may_be_busy=may_be_busy)

    def _require_updatable(self) -> None:
        self._require_present("update_weights")
        super()._require_updatable()

    def _require_present(self, action: str) -> None:
        if self._is_gone:
            raise RuntimeError(f"{action}: tenant {self.name!r} was dropped from the engine")

    def leave(self) -> None:
        """End all calls of this tenant, which raise RuntimeError, and unload its versions."""
        self._is_gone = True
        if self._host.server.client is None:
            return
        self.flights.end_all(RuntimeError(f"tenant {self.name!r} was dropped from the engine"))
        if isinstance(self.sync, AdapterSync):
            self.sync.drop_all()


class TenantEngines(Host):
    """The engine serves the requests of all tenants in common batches.

    Its methods are those of `RolloutEngine` that concern an engine as a whole.
    One thread controls it and calls everything here; each tenant's view has threads of its own.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        config: RolloutConfig,
        log_path: Path,
        limits: AdapterLimits,
        return_routes: bool = True,
        gpu_ids: Sequence[int | str] = (),
        seed: int = 0,
        num_nodes: int = 1,
        policy: Policy | None = None,
    ) -> None:
        """Nothing is started yet. `limits` say what the adapters of tenants may have, and `policy`
        which requests are sent when; without one all are sent at once. The other arguments are those of
        `mrl.rollout.sglang.engine.Engine`, which raises the same errors."""
        super().__init__(
            model=model,
            config=config,
            log_path=log_path,
            return_routes=return_routes,
            gpu_ids=gpu_ids,
            seed=seed,
            num_nodes=num_nodes,
            adapters=limits,
        )
        self._limits = limits
        self._changing = threading.Lock()
        self.gate = Gate(policy)

    @property
    def tenants(self) -> list[str]:
        """The names of the tenants that are there."""
        return [policy.name for policy in self.policies if isinstance(policy, TenantEngine)]

    def start(self, address: str = "", meanwhile: Callable[[], None] | None = None) -> None:
        super().start(address, meanwhile)
        self.gate.resize(*self.server.room())

    def tenant(
        self,
        name: str,
        adapter: Adapter,
        *,
        weight: float = 1.0,
        max_tokens_in_flight: int = UNLIMITED,
    ) -> TenantEngine:
        """Add a tenant, before or after the start, and return its view of the engine.

        `weight` and `max_tokens_in_flight` (tokens of prompts and answers in the engine) are for the
        policy that admits requests.

        Raises ValueError for a name that is no name or is taken, and InputError for an adapter that
        the engine has no room for or does not serve.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"tenant: got the name {name!r}, expected {NAME.pattern}")
        self._limits.check(adapter)
        manifest = AdapterManifest(self.manifest.required, adapter)
        view = TenantEngine(self, name, manifest, partial(self.gate.line_up, name))
        with self._changing:
            if name in self.tenants:
                raise ValueError(f"tenant: {name!r} is there already, expected another name")
            self.policies.append(view)
        self.gate.enter(name, weight=weight, max_tokens_in_flight=max_tokens_in_flight)
        if self.server.client is not None:
            view.begin()
        return view

    def drop(self, name: str) -> None:
        """Remove a tenant: its calls raise RuntimeError, and SGLang unloads all of its versions.

        Raises ValueError for a name that is not there, and RuntimeError where SGLang refuses.
        """
        with self._changing:
            found = [p for p in self.policies if isinstance(p, TenantEngine) and p.name == name]
            if not found:
                raise ValueError(
                    f"drop: there is no tenant {name!r}, expected one of "
                    f"{', '.join(self.tenants) or 'none'}"
                )
            self.policies.remove(found[0])
        self.gate.leave(name)
        found[0].leave()
