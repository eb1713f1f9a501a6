"""The objects that an SGLang server and its endpoints share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.config.adapter import AdapterLimits
from mrl.engines.base import EngineConfig, EngineLost
from mrl.engines.sglang.connection import ServerConnection
from mrl.engines.sglang.device_memory import DeviceMemory
from mrl.engines.sglang.http import CallTimeouts
from mrl.engines.sglang.launch import read_launch
from mrl.engines.sglang.manifest import Manifest
from mrl.engines.sglang.route_memory import RouteReader
from mrl.quantization import SCHEMES

FLUSH_TIMEOUT_S = 60.0


class ServerCore:
    """The connection, model limits, device memory and routes of a server, for the server and its
    endpoints. It has no reference to the endpoints."""

    def __init__(self, config: EngineConfig, adapters: AdapterLimits | None) -> None:
        """Start nothing yet. Raises InputError in the same cases as `SGLangServer`."""
        self.config = rollout = config.rollout
        self.launch = launch = read_launch(config, adapters=adapters)
        self.manifest = Manifest(
            Path(config.model.path), launch.hf_config, SCHEMES.get(config.rollout.quantization)
        )
        self.cache_len = launch.context_len
        """The most tokens that one request can have in the KV cache. Before the first start, the
        value is the context length."""
        self.routes = RouteReader()
        self.connection = ServerConnection(
            launch.settings,
            launch.environment | self.routes.environment,
            config.log_path,
            CallTimeouts(rollout.start_timeout_s, rollout.stall_timeout_s),
        )
        self.weights_folder = config.log_path.with_suffix(".weights")
        """The folder into which weights are written for this engine, if they are sent in files. It is
        inside the run's folder, because /tmp may be small."""
        serves_adapters = launch.adapters is not None
        self.memory = DeviceMemory(
            self.connection,
            can_keep=config.keep_weights_on_host or serves_adapters or not config.gpu_ids,
            can_drop=not serves_adapters,
        )
        self.is_starting = False

    @property
    def longest(self) -> int:
        """The most tokens that the engine accepts in one sequence, prompt and answer."""
        return min(self.launch.context_len, self.cache_len)

    @property
    def has_server(self) -> bool:
        """Whether there is a server that is not lost. It may still be starting."""
        return self.connection.client is not None

    @property
    def memory_state(self) -> str:
        """The state of the device memory in words: stopped, awake, or asleep with the sleeping tags."""
        if not self.has_server:
            return "stopped"
        asleep = ", ".join(self.memory.asleep)
        return f"asleep ({asleep})" if asleep else "awake"

    def require_running(self, action: str) -> None:
        """Raise EngineLost if the server is lost or starting, and RuntimeError if it was never started
        or was stopped. `action` begins the message."""
        if self.is_starting:  # an endpoint asks while another thread starts the server again
            raise EngineLost(f"{action}: the engine is starting again")
        if not self.has_server:
            kind = RuntimeError if self.connection.loss is None else EngineLost
            raise kind(f"{action}: the engine is {self.memory_state}; start() it first")

    def flush(self) -> None:
        """Wait for the scheduler to be idle, then drop the prefix cache; takes 0.3 s on a CPU."""
        path = f"/flush_cache?timeout={FLUSH_TIMEOUT_S:g}"
        limit_s = FLUSH_TIMEOUT_S + self.config.stall_timeout_s
        self.connection.post(path, {}, timeout_s=limit_s)

    def post_in_flight(self, path: str, body: dict[str, Any]) -> None:
        """Post a call that the server must answer within `rollout.stall_timeout_s`, even with
        requests in flight."""
        self.connection.post(path, body, timeout_s=self.config.stall_timeout_s)
