"""One SGLang server, with what all policies on it share: it starts, sleeps and stops as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config import ModelConfig, RolloutConfig
from mrl.config.adapter import AdapterLimits
from mrl.rollout.base import MEMORY_TAGS, EngineLost
from mrl.rollout.sglang.body import profile_request
from mrl.rollout.sglang.launch import read_launch
from mrl.rollout.sglang.manifest import Manifest
from mrl.rollout.sglang.occupation import Occupation
from mrl.rollout.sglang.patience import Patience
from mrl.rollout.sglang.requests import longest_in_cache
from mrl.rollout.sglang.route_memory import RouteReader
from mrl.rollout.sglang.server import Server
from mrl.rollout.sglang.warm_up import warm_up

if TYPE_CHECKING:
    from mrl.rollout.sglang.served import Served

FLUSH_TIMEOUT_S = 60.0


class Host:
    """A host is the part of an engine that its policies share. Several can run side by side.

    On CPUs SGLang gives no memory back: sleep and wake keep the state and its rules, so that a run
    on a laptop fails where one on GPUs would, but free nothing.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        config: RolloutConfig,
        log_path: Path,
        return_routes: bool = True,
        gpu_ids: Sequence[int | str] = (),
        seed: int = 0,
        first_version: int = 0,
        keep_weights_on_host: bool = False,
        num_nodes: int = 1,
        adapters: AdapterLimits | None = None,
    ) -> None:
        """Take the arguments of `mrl.rollout.sglang.engine.Engine`. With `adapters` updates bring
        matrices of such, the weights stay the checkpoint's, and only sleep(1) is allowed."""
        keeps_weights = keep_weights_on_host or adapters is not None
        self._launch = read_launch(
            model,
            config,
            gpu_ids=gpu_ids,
            return_routes=return_routes,
            seed=seed,
            first_version=first_version,
            keep_weights_on_host=keeps_weights,
            num_nodes=num_nodes,
            adapters=adapters,
        )
        self._num_starts = 0
        self._is_starting = False
        self.config = config
        self.shape = self._launch.shape
        self.context_len = self._launch.context_len
        self.cache_len: int | None = None
        """The most tokens of one request that the KV cache holds; None until the engine has started."""
        self.vocab_size = self._launch.vocab_size
        self.manifest = Manifest(Path(model.path), self._launch.hf_config)
        self.stacks_experts = adapters is not None and adapters.experts == "shared_outer"
        """The engine takes one tensor for all experts of a layer."""
        self.routes = RouteReader()
        environment = self._launch.environment | self.routes.environment
        patience = Patience(config.start_timeout_s, config.stall_timeout_s)
        self.server = Server(self._launch.settings, environment, Path(log_path), patience)
        self.weights_folder = Path(log_path).with_suffix(".weights")
        """A folder of this engine alone, in the run's folder: /tmp may be small."""
        self.memory = Occupation(
            self.server, can_keep=keeps_weights or not gpu_ids, can_drop=adapters is None
        )
        self.policies: list[Served] = []

    @property
    def longest(self) -> int:
        """The most tokens that the engine accepts in one sequence."""
        return self.context_len if self.cache_len is None else min(self.context_len, self.cache_len)

    @property
    def process_id(self) -> int | None:
        return self.server.process.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a server that is not lost."""
        return self.server.client is not None and not self._is_starting

    @property
    def memory_state(self) -> str:
        """What is on the device, in words."""
        if self.server.client is None:
            return "stopped"
        asleep = ", ".join(self.memory.asleep)
        return f"asleep ({asleep})" if asleep else "awake"

    @property
    def state(self) -> str:
        """The state in words, for error messages."""
        num_open = sum(policy.flights.any_open for policy in self.policies)
        return self.memory_state + f", generating for {num_open}" * bool(num_open)

    def start(self, address: str = "", meanwhile: Callable[[], None] | None = None) -> None:
        if self.server.client is not None:
            raise RuntimeError(f"engine: start() while it runs; it is {self.state}")
        self._is_starting = True
        try:
            self._start(address, meanwhile)
        finally:
            self._is_starting = False

    def _start(self, address: str, meanwhile: Callable[[], None] | None) -> None:
        for policy in self.policies:
            policy.end()  # of a server that was lost
            policy.lose(EngineLost("engine: it was lost or stopped, and starts anew"))
        settings = self._launch.start_settings(self._num_starts, address)
        self._num_starts += 1
        self.server.start(self.config.start_timeout_s, settings, meanwhile)
        self.memory.reset(MEMORY_TAGS)
        try:
            self.cache_len = longest_in_cache(*self.server.cache_of_one())
            for policy in self.policies:
                policy.begin()
            self._warm_up()
        except BaseException:
            self.stop()
            raise

    def _warm_up(self) -> None:
        """One request of ours, and an empty prefix cache after it."""
        warm_up(
            self.server,
            num_replicas=self.config.data_parallel_attention_size,
            context_len=self.longest,
            return_routes=self.shape is not None,
            timeout_s=self.config.start_timeout_s,
        )
        self.flush()

    def stop(self) -> None:
        self.memory.reset()
        for policy in self.policies:
            policy.lose(EngineLost("engine: it was stopped"))
        self.server.stop()
        for policy in self.policies:
            policy.end()  # after: it has nothing to say to a server that may hang

    def wake(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        self.require_running("wake")
        self.memory.wake(tags)

    def sleep(self, level: int = 2) -> None:
        self.require_running("sleep")
        policies = list(self.policies)
        for policy in policies:
            policy.require_idle("sleep")
        self.memory.check_level(level, self.state)
        with contextlib.ExitStack() as held:
            for policy in policies:
                held.enter_context(policy.flights.quiet(lambda p=policy: p.require_idle("sleep")))
            self.memory.release(self.flush)
            if level == 2:
                for policy in policies:
                    policy.drop_weights()

    def flush(self) -> None:
        """Wait for the scheduler, then drop the prefix cache; takes 0.3 s on a CPU."""
        path = f"/flush_cache?timeout={FLUSH_TIMEOUT_S:g}"
        self.server.post(path, {}, timeout_s=FLUSH_TIMEOUT_S + self.config.stall_timeout_s)
        for policy in self.policies:
            policy.flights.forget_cache()

    def start_profile(self, folder: Path, name: str, *, with_stack: bool) -> None:
        for policy in self.policies:
            policy.require_idle("start_profile")
        self.server.post("/start_profile", profile_request(folder, name, with_stack=with_stack))

    def stop_profile(self) -> None:
        # The answer comes when every scheduler has written its trace.
        self.server.post("/stop_profile", {}, timeout_s=self.config.start_timeout_s)

    def require_running(self, action: str) -> None:
        """Raise EngineLost, or RuntimeError where none was started."""
        if self._is_starting:  # a tenant's view asks while another thread starts an engine
            raise EngineLost(f"{action}: the engine starts anew")
        if self.server.client is None:
            kind = RuntimeError if self.server.loss is None else EngineLost
            raise kind(f"{action}: the engine is {self.state}; start() it first")
