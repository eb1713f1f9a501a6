"""An engine's process on a node other than its first."""

from __future__ import annotations

from mrl.engines.base import EngineConfig
from mrl.engines.sglang.launch import read_launch
from mrl.engines.sglang.process import ServerProcess


class EngineNode:
    """`mrl.engines.base.RolloutNode` for SGLang.

    On a node other than the engine's first, SGLang's process loads its share of the weights and then
    follows node 0. The HTTP server of this process answers only health checks (srt/utils/common.py,
    launch_dummy_health_check_server). The process ends when one of its schedulers ends, and a scheduler
    ends when it loses the ranks of another node.
    """

    def __init__(self, config: EngineConfig, node_rank: int) -> None:
        """`config` is the engine's config with the log and the GPUs of this node."""
        self._launch = read_launch(config, node_rank=node_rank)
        self._process = ServerProcess(
            self._launch.settings, self._launch.environment, config.log_path
        )
        self._num_starts = 0

    @property
    def process_id(self) -> int | None:
        return self._process.pid

    def start(self, address: str) -> None:
        """Stop an earlier process and start a new one, without waiting. The process is ready only when
        the whole engine is ready."""
        self.stop()
        self._process.server_args |= self._launch.start_settings(self._num_starts, address)
        self._num_starts += 1
        self._process.start()

    def failure(self) -> str:
        """Return why the process, or one of the processes that it needs, has ended, and the path of the
        log. Return an empty text while all of them run, and after stop()."""
        where = f"node {self._launch.node_rank} of the engine"
        code = self._process.exit_code()
        if code is not None:
            return f"SGLang on {where} died, {self._process.ending(code)}"
        # SGLang waits for its schedulers one after the other, so it may not have noticed yet.
        if part := self._process.dead_part():
            return f"{part} of SGLang on {where} died: {self._process.why()}"
        return ""

    def note_ready(self) -> None:
        """Record SGLang's processes on this node, each of which the engine needs from now on. Called
        when the engine has started on all nodes."""
        self._process.note_parts()

    def stop(self) -> None:
        self._process.stop()
