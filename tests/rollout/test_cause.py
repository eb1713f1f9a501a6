"""One line of the server's log says why it died."""

from __future__ import annotations

import signal

import pytest

from mrl.engines.sglang.cause import MAX_CHARS, cause

FRAME = '  File "scheduler.py", line 1, in run\n    raise\n'
SCHEDULER = (
    "[2026-11-22 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
)
PLAIN = "Traceback (most recent call last):\n"

LOGS = {
    "scheduler": (
        f"[10:00] Load weight begin.\n{SCHEDULER}{FRAME}ValueError: bad shape [3, 4]\n\n"
        f"{PLAIN}{FRAME}EOFError\n"
        f"{PLAIN}{FRAME}RuntimeError: Rank 0 scheduler died during initialization (exit code: 1)\n",
        "ValueError: bad shape [3, 4]",
    ),
    "chained": (
        f"{PLAIN}{FRAME}KeyError: 'x'\n\nDuring handling of the above exception, another exception "
        f"occurred:\n\n{PLAIN}{FRAME}sglang.srt.ConfigError: no such model\n",
        "sglang.srt.ConfigError: no such model",
    ),
    "memory of the GPU": (
        f"{SCHEDULER}{FRAME}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    ),
    "memory for the cache": (
        f"{SCHEDULER}{FRAME}RuntimeError: Not enough memory. Please try to increase "
        "--mem-fraction-static.\n",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    ),
    "two lines": (
        f"{PLAIN}{FRAME}pydantic.ValidationError:\n  field x is required\n",
        "pydantic.ValidationError: field x is required",
    ),
    "only a consequence": (f"{PLAIN}{FRAME}EOFError\n", "EOFError"),
    "crash": (
        "Loading\nFatal Python error: Segmentation fault\nThread 1\n",
        "Fatal Python error: Seg",
    ),
    "no traceback": ("A UserWarning: ValueError: is only spoken of\nbye\n", ""),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_line_that_matters(name):
    log, expected = LOGS[name]
    found = cause(log)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)
    assert "\n" not in found


def test_without_a_word_in_the_log_the_signal_counts():
    assert cause("", -signal.SIGKILL).startswith("killed by SIGKILL: the host ran out of memory")
    assert cause("", -signal.SIGSEGV) == "killed by SIGSEGV"
    assert cause("", 1) == ""
    assert cause("", None) == ""
    assert cause(f"{PLAIN}{FRAME}ValueError: x", -signal.SIGKILL) == "ValueError: x"


def test_a_long_line_is_cut():
    found = cause(f"{PLAIN}{FRAME}ValueError: {'x' * 999}")
    assert len(found) == MAX_CHARS
    assert found.endswith("...")
