"""An engine's process on a node that does not lead it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mrl.config import ModelConfig, RolloutConfig
from mrl.config.adapter import Adapter, AdapterLimits
from mrl.rollout.sglang.launch import read_launch
from mrl.rollout.sglang.process import ServerProcess


class EngineNode:
    """This is `mrl.rollout.base.RolloutNode` for SGLang.

    SGLang's process of such a node loads its share of the weights and then follows node 0: its own HTTP
    server answers health checks only (srt/utils/common.py, launch_dummy_health_check_server). It ends
    when one of its schedulers does, and those end when they lose the ranks of another node.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        config: RolloutConfig,
        log_path: Path,
        num_nodes: int,
        node_rank: int,
        return_routes: bool = True,
        gpu_ids: Sequence[int | str] = (),
        seed: int = 0,
        first_version: int = 0,
        keep_weights_on_host: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        """Take the arguments of `mrl.rollout.sglang.engine.Engine`; `gpu_ids` are those of this
        node."""
        self._launch = read_launch(
            model,
            config,
            gpu_ids=gpu_ids,
            return_routes=return_routes,
            seed=seed,
            first_version=first_version,
            keep_weights_on_host=keep_weights_on_host,
            num_nodes=num_nodes,
            node_rank=node_rank,
            adapters=AdapterLimits.around([adapter]) if adapter is not None else None,
        )
        self._process = ServerProcess(self._launch.settings, self._launch.environment, log_path)
        self._num_starts = 0

    @property
    def process_id(self) -> int | None:
        return self._process.pid

    def start(self, address: str) -> None:
        """Spawn it; it is ready when the engine is."""
        self.stop()
        self._process.server_args |= self._launch.start_settings(self._num_starts, address)
        self._num_starts += 1
        self._process.start()

    def failure(self) -> str:
        """Why it has ended, with the path of its log; empty while it runs, or was stopped."""
        where = f"node {self._launch.node_rank} of the engine"
        code = self._process.exit_code()
        if code is not None:
            return f"SGLang on {where} died, {self._process.ending(code)}"
        # SGLang waits for its schedulers one after the other: it may not know yet.
        if part := self._process.dead_part():
            return f"{part} of SGLang on {where} died: {self._process.why()}"
        return ""

    def note_ready(self) -> None:
        """The engine has started: from now on each of its processes here is one that it needs."""
        self._process.note_parts()

    def stop(self) -> None:
        """Leave no process behind. Harmless when repeated or never started."""
        self._process.stop()
