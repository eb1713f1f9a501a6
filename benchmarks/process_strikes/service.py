"""The service that is struck: two tenants of recipes, and a session whose client never gives up."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.fault_table.base import ROOT
from benchmarks.process_strikes.subjects import LEFT, NUM_STEPS, RANKS, WAIT_S, new_part
from mrl.drill.chain import other_steps
from mrl.drill.job import Job, Unexpected, num_rows
from tests.tenants.serving import Service, environment

NAMES = ("ann", "bob")
ROLLOUT = {
    "batch_invariant": True, "context_len": 128, "max_total_tokens": 4096,
    "stall_timeout_s": 15, "request_timeout_s": 60, "start_timeout_s": 240,
    "max_restarts": 100,
}  # fmt: skip
WATCH = {
    "first_limit_s": 240,
    "limits": dict.fromkeys(("score", "logprobs", "train", "save", "log"), 30),
}
RECIPE = {
    "rollout": {
        "prompts_per_step": 4, "samples_per_prompt": 2,
        "max_response_len": 24, "min_response_len": 24,
    },
    "reward_timeout_s": 15,
}  # fmt: skip


class Tenants:
    """A service of `mrl serve` under `mrl.launch`."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        rollout: Mapping[str, Any],
        recipes: Mapping[str, Mapping[str, Any]],
        more: Mapping[str, Any],
    ) -> None:
        """`rollout` is on top of ROLLOUT, `recipes` on top of RECIPE for tenants by their names,
        `more` are keys of the service."""
        self.folder, self.model = folder, model
        self.rollout, self.recipes = {**ROLLOUT, **rollout}, recipes
        self.more = more
        self.num_trainers = RANKS - rollout.get("num_ranks", 0)
        self.judges_bits, self.keeps_bits = True, not rollout
        self.job: Job | None = None
        self._starts = 0
        self._client: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        self.part = new_part(self.folder)
        self.part.mkdir(parents=True)
        self.scratch = Path(tempfile.mkdtemp(prefix="mrl-table-"))
        self.reference = Service(self.folder / "reference", self.model, ranks=RANKS)
        if [num_rows(self.reference.run_of(name)) for name in NAMES] != [NUM_STEPS] * len(NAMES):
            shutil.rmtree(self.reference.folder, ignore_errors=True)
            self._serve_without_fault()
        self.service = self._made("service")

    def _serve_without_fault(self) -> None:
        job = self._started(self._queued(self.reference), "--until-done")
        while job.process.poll() is None:
            job.look()
            time.sleep(0.2)
        if job.end():
            raise Unexpected(f"the service without a fault ended with {job.end()}; see {job.log}")

    def rows(self) -> int:
        return max(self._steps())  # a tenant that was paused does no more

    def paused(self) -> list[str]:
        states = self.service.states()
        return [f"{name} was paused: {why}" for name, (it, why) in states.items() if it == "paused"]

    def start(self) -> Job:
        self._close()
        if max(self._steps()) > NUM_STEPS - LEFT:
            self.begin_anew("done")
        self.job = self._started(self.service)
        if self._client is None:
            words = [sys.executable, "-m", "benchmarks.process_strikes.session_client"]
            self._client = subprocess.Popen(
                [*words, str(self.service.folder)], cwd=ROOT, env=environment(),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        return self.job

    def running(self) -> Job:
        if self.paused() or max(self._steps()) > NUM_STEPS - LEFT:
            self.begin_anew("done")
        if self.job is None or self.job.process.poll() is not None:
            self._stepped(self.start())
        assert self.job is not None
        self.job.look(closely=True)
        return self.job

    def continued(self, done: int, command: str) -> list[str]:
        self._stepped(self.start())
        return self.differences()

    def differences(self) -> list[str]:
        return [
            f"{name}: {text}"
            for name in NAMES
            for text in other_steps(self.service.run_of(name), self.reference.run_of(name))
        ]

    def begin_anew(self, name: str) -> None:
        self._close()
        put_aside = self.part / f"broken_{name}"
        shutil.rmtree(put_aside, ignore_errors=True)
        with suppress(OSError):
            shutil.move(self.service.folder, put_aside)
        if name == "done":
            shutil.rmtree(put_aside, ignore_errors=True)
        self.service = self._made("service")

    def end(self) -> None:
        self._close()
        if self._client is not None:
            self._client.kill()
            self._client.wait()
        if "scratch" in vars(self):
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _made(self, name: str) -> Service:
        return self._queued(Service(self.part / name, self.model, ranks=RANKS))

    def _queued(self, service: Service) -> Service:
        """Put the tenants into the queue of a service that does not run yet."""
        service.write(rollout=self.rollout, watch=WATCH, **self.more)
        for each in NAMES:
            own = {**RECIPE, **self.recipes.get(each, {})}
            service.add(each, num_steps=NUM_STEPS, **own)
        return service

    def _started(self, service: Service, *words: str) -> Job:
        log = self.part / "logs" / f"start_{self._starts:02d}.log"
        self._starts += 1
        command = service.command(*words)
        return Job(command, service.folder, log, self.scratch, WAIT_S)

    def _stepped(self, job: Job) -> None:
        """Wait for a step of a start. Raises Unexpected."""
        there = self.rows()
        job.wait(lambda: job.has_begun() and self.rows() > there, "a tenant had done a step")

    def _steps(self) -> list[int]:
        return [num_rows(self.service.run_of(name)) for name in NAMES]

    def _close(self) -> None:
        if self.job is not None:
            self.job.kill()
            self.job = None
