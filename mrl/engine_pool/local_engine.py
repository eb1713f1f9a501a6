"""Starts, replaces and profiles the engine on this rank's devices, wakes it and puts it to
sleep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrl.config.profiling import ProfileConfig
from mrl.engine_pool.engine_nodes import EngineNodes
from mrl.engine_pool.metrics import EngineMetrics
from mrl.engine_pool.restarts import IN_STEP, Restarts
from mrl.engines.base import CUDA_GRAPH, KV_CACHE, WEIGHTS, EngineLost, EngineServer
from mrl.exchange.sharing import sum_over_ranks
from mrl.run import console
from mrl.run.profiler import profile_folder
from mrl.system.clock import Clock
from mrl.system.heartbeat import phase
from mrl.system.memory_watch import MemoryWatch


class LocalEngine:
    """The engine on this rank's devices, for all policies that it serves. `server` is None if this rank
    does not lead the engine.

    If the engine is lost, no error is raised at once, because all ranks must act on the loss together.
    The loss is recorded, and further calls do nothing until the collective `replace_lost` has started
    another engine.
    """

    def __init__(
        self,
        nodes: EngineNodes,
        engine_number: int,
        max_restarts: int,
        watch: MemoryWatch,
        *,
        keeps_weights: bool = False,
    ) -> None:
        """`max_restarts`: how many engines may be lost in one step, over all ranks.
        `keeps_weights`: whether the engine keeps its weights while it sleeps, because weight syncs
        bring only an adapter."""
        self.server = nodes.server
        self.is_needed = True
        """Whether the engine has something to generate; otherwise it stays asleep."""
        self.watch = watch
        self.metrics = EngineMetrics()
        """The restarts in this step: their number over all ranks, and the seconds that they took.
        The other metrics stay 0."""
        self._nodes = nodes
        self._sleep_level = 1 if keeps_weights else 2
        self._restarts = Restarts(
            IN_STEP,
            max_restarts,
            None if self.server is None else engine_number,
            share_loss=nodes.share_loss,
            sum_up=sum_over_ranks,
        )

    def begin_step(self) -> None:
        """Set the count of lost engines and the metrics to 0 for a new step."""
        self._restarts.reset()
        self.metrics.reset()

    def start(self) -> None:
        """Start the engine and put it to sleep. A collective of the ranks that the engine spans."""
        self._nodes.start()
        if self.server is not None:
            self.server.sleep(self._sleep_level)

    @property
    def is_active(self) -> bool:
        """Whether this rank leads an engine that is needed and not lost."""
        return self.server is not None and self.is_needed and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether the engine was lost and no other engine has been started in its place yet."""
        return self._restarts.lost is not None

    def wake_weights(self) -> None:
        """Let the engine allocate device memory for its weights; a weight sync then loads them."""
        self._wake(WEIGHTS)

    def wake_cache(self) -> None:
        """Let the engine allocate device memory for its KV cache and CUDA graphs."""
        self._wake(KV_CACHE, CUDA_GRAPH)

    def _wake(self, *tags: str) -> None:
        if self.server is not None and self.is_active:
            with self.noting_loss():
                self.server.wake(tags)

    def sleep(self) -> None:
        """Let the engine free its device memory. Read the memory in use before and after, to notice
        memory that stays in use."""
        if self.server is not None and self.is_active:
            with self.noting_loss():
                self.watch.read("awake", self.server.process_id)
                self.server.sleep(self._sleep_level)
                self.watch.read("asleep", self.server.process_id)

    @contextmanager
    def noting_loss(self) -> Iterator[None]:
        """Catch an EngineLost that the block raises, and record the loss."""
        try:
            yield
        except EngineLost as error:
            self._restarts.lost = error

    def replace_lost(self, clock: Clock) -> bool:
        """Replace all lost engines; return whether any engine was lost. A collective.

        Raises EngineGone on every rank if more than `max_restarts` engines were lost in this step.
        """
        with clock.part("rollout"):  # count_lost() waits for the slowest engine
            num_lost = self._restarts.count_lost()
        if not num_lost:
            return False
        with self.metrics.recovering(), phase("rollout:restart"):
            self.metrics.num_restarts += self._restarts.replace(self.start, num_lost)
        return True

    def stop(self) -> None:
        """Stop the processes that this rank runs for the engine. May be called more than once."""
        self._nodes.stop()


@contextmanager
def engine_profiled(
    config: ProfileConfig, root: Path, step: int, server: EngineServer, number: int
) -> Iterator[None]:
    """Let the engine write a profiler trace of the `with` block if `config` asks for a trace of
    this step.

    If the engine cannot write a trace, a warning is printed. Raises EngineLost if the engine is
    lost.
    """
    if not config.engine or step not in config.steps:
        yield
        return
    folder, is_profiling = profile_folder(root, step), False
    with _warning(f"profile: rollout engine {number} writes no trace"):
        if not hasattr(server, "start_profile"):
            raise RuntimeError("it has no method start_profile")
        server.start_profile(folder, f"engine_{number:02d}", with_stack=config.with_stack)
        is_profiling = True
    yield
    if is_profiling:
        with _warning(f"profile: rollout engine {number} wrote no trace"):
            server.stop_profile()


@contextmanager
def _warning(what: str) -> Iterator[None]:
    """Turn a RuntimeError of the block into a warning. An EngineLost is raised unchanged."""
    try:
        yield
    except EngineLost:
        raise
    except RuntimeError as error:
        console.warning(f"{what}: {error}")
