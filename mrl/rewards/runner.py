"""Calls the reward function in a killable worker: it may raise, hang or die, the run goes on.

Dimensions: G samples of a prompt.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mrl.errors import InputError, RunFailed
from mrl.types import Prompt, SampleGroup

MAX_FAILED_SHARE = 0.05
START_TIMEOUT_S = 120.0
"""For importing the reward function's module."""
_RESERVED = ("prompts", "completions", "completion_ids")


class RewardFailed(Exception):
    """One call gave no usable rewards; the message says why."""


class RewardBroken(RewardFailed):
    """The answer was not one number or None a completion: no sample of the call has a reward."""


@dataclass(frozen=True)
class RewardReport:
    """What one step's scoring met."""

    num_failed: int = 0
    """Samples masked because the reward function raised, hung, died or returned nonsense."""
    num_abstained: int = 0
    """Samples masked because the reward function returned None."""
    first_error: str = ""
    num_repeated: int = 0
    """Groups whose call failed, so that their samples were scored one at a time."""


class RewardRunner:
    """One worker process with the reward function loaded; restarted when it hangs or dies.

    Raises InputError if the reward function cannot be loaded. Not thread-safe; create it on the
    thread that lives as long as the run (the worker dies with the thread that started it).
    """

    def __init__(self, spec: str, timeout_s: float) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._worker: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._closed = False
        self.report = RewardReport()
        """Of the last `score`."""
        self._start()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def score(
        self,
        groups: list[SampleGroup],
        completions: list[list[str]],
        *,
        step_samples: int | None = None,
    ) -> list[Tensor]:
        """Rewards f32[G] per group; NaN where the function failed or abstained (see `report`).

        `completions[i][j]` is the text of `groups[i].samples[j]`; `step_samples` counts the samples
        of the step over all engines, by default those given. A call that fails is repeated
        sample by sample, so that only the culprit is masked.
        Raises RunFailed as soon as more than 5% of the step's samples failed.
        """
        self.begin_step()
        num_samples = step_samples or sum(len(group.samples) for group in groups)
        return [
            self.score_group(group, texts, step_samples=num_samples)
            for group, texts in zip(groups, completions, strict=True)
        ]

    def begin_step(self) -> None:
        """Forget what the report says of the last step."""
        self.report = RewardReport()

    def score_group(self, group: SampleGroup, texts: list[str], *, step_samples: int) -> Tensor:
        """`score` of one group of the step, f32[G]; adds to the report."""
        request = _request(group, texts)
        try:
            values = self._call(request)
        except RewardBroken as error:
            for _ in texts:
                self._count_failure(error, step_samples)
            values = [math.nan] * len(texts)
        except RewardFailed as error:
            values = self._one_by_one(request, error, step_samples)
        return torch.tensor(values, dtype=torch.float32)

    def close(self) -> None:
        """Kill the worker and whatever it started; no other comes. Harmless when repeated.

        A call that runs in another thread ends with it.
        """
        self._closed = True
        self._kill_worker()

    def _kill_worker(self) -> None:
        worker, self._worker, self._unread = self._worker, None, b""
        if worker is None:
            return
        # The whole group, before wait() frees its number for somebody else.
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _one_by_one(
        self, request: dict[str, Any], error: RewardFailed, num_samples: int
    ) -> list[float]:
        size = len(request["completions"])
        if size == 1:  # nothing to tell apart
            self._count_failure(error, num_samples)
            return [math.nan]
        self.report = replace(
            self.report,
            num_repeated=self.report.num_repeated + 1,
            first_error=self.report.first_error or str(error),
        )
        values = []
        for index in range(size):
            one = {
                "prompts": request["prompts"][index : index + 1],
                "completions": request["completions"][index : index + 1],
                "columns": {k: v[index : index + 1] for k, v in request["columns"].items()},
            }
            try:
                values += self._call(one)
            except RewardFailed as one_error:
                self._count_failure(one_error, num_samples)
                values.append(math.nan)
        return values

    def _count_failure(self, error: RewardFailed, num_samples: int) -> None:
        self.report = replace(
            self.report,
            num_failed=self.report.num_failed + 1,
            first_error=self.report.first_error or str(error),
        )
        check_failures(self._spec, self.report.num_failed, num_samples, self.report.first_error)

    def _call(self, request: dict[str, Any]) -> list[float]:
        """One call; NaN for None. Raises RewardFailed; a hung or dead worker is gone by then."""
        if self._closed:
            raise RewardFailed("the run is ending")
        if self._worker is None:
            self._start()
        try:
            reply = self._exchange(json.dumps(request).encode() + b"\n", self._timeout_s)
        except TimeoutError:
            self._kill_worker()
            raise RewardFailed(f"no answer within {self._timeout_s:g} s, killed") from None
        except (OSError, EOFError):
            raise RewardFailed(self._death()) from None
        if "error" in reply:
            raise (RewardBroken if reply["broken"] else RewardFailed)(reply["error"])
        values = [math.nan if value is None else float(value) for value in reply["rewards"]]
        abstained = sum(map(math.isnan, values))
        self.report = replace(self.report, num_abstained=self.report.num_abstained + abstained)
        return values

    def _start(self) -> None:
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "mrl.rewards.worker", self._spec, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the trainer alone; killpg reaches all of it
        )
        assert self._worker.stdin
        assert self._worker.stdout
        os.set_blocking(self._worker.stdin.fileno(), False)
        try:
            reply = self._exchange(b"", START_TIMEOUT_S)
        except TimeoutError:
            self._kill_worker()
            raise InputError(
                f"reward {self._spec!r}: its import took more than {START_TIMEOUT_S:g} s"
            ) from None
        except (OSError, EOFError):
            raise InputError(
                f"reward {self._spec!r}: its import ended the {self._death()}"
            ) from None
        if "input_error" in reply:
            self._kill_worker()
            raise InputError(reply["input_error"])

    def _death(self) -> str:
        worker = self._worker
        with suppress(subprocess.TimeoutExpired):
            if worker is not None:
                worker.wait(timeout=1.0)  # the pipe closes a moment before the process is gone
        code = worker.returncode if worker is not None else None
        self._kill_worker()
        return f"worker process (exit code {code})"

    def _exchange(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a line, await a line. Raises TimeoutError, EOFError, OSError."""
        assert self._worker
        assert self._worker.stdin
        assert self._worker.stdout
        out, into = self._worker.stdin.fileno(), self._worker.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        unsent = memoryview(request)
        while b"\n" not in self._unread:
            poll = select.poll()  # not select(): a trainer may hold more than 1,024 files
            poll.register(into, select.POLLIN)
            if unsent:
                poll.register(out, select.POLLOUT)
            left_s = deadline - time.monotonic()
            ready = dict(poll.poll(max(left_s, 0) * 1000))
            if not ready:
                raise TimeoutError
            if out in ready:
                unsent = unsent[os.write(out, unsent[:65536]) :]
            if into in ready:
                chunk = os.read(into, 1 << 20)
                if not chunk:
                    raise EOFError
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def check_failures(
    spec: str, num_failed: int, num_samples: int, first_error: str = "see the warnings above"
) -> None:
    """Raise RunFailed where more than 5% of a step's samples have no reward for a fault."""
    if num_failed > MAX_FAILED_SHARE * num_samples:
        raise RunFailed(
            f"reward {spec!r} failed on {num_failed} of {num_samples} samples of this step, more "
            f"than {MAX_FAILED_SHARE:.0%}; first error: {first_error}"
        )


def check_columns(prompt: Prompt) -> None:
    """Raise InputError where a column of the row has a name that the reward call needs."""
    clash = [name for name in _RESERVED if name in prompt.columns]
    if clash:
        raise InputError(
            f"{prompt.source}: column {clash[0]!r} is a name the reward call needs; rename it"
        )


def _request(group: SampleGroup, texts: list[str]) -> dict[str, Any]:
    size, prompt = len(group.samples), group.prompt
    if len(texts) != size:
        raise ValueError(f"{prompt.source}: expected {size} completions, got {len(texts)}")
    check_columns(prompt)
    columns: dict[str, list[Any]] = {k: [v] * size for k, v in prompt.columns.items()}
    columns["completion_ids"] = [sample.response_ids.tolist() for sample in group.samples]
    return {"prompts": [prompt.content] * size, "completions": texts, "columns": columns}
