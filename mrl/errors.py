"""Exceptions that the command line reports without a traceback, and the table of exit codes.

docs/faults.md shows this table; a test checks that the two tables are identical.
"""

from __future__ import annotations

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes, which tell the shell, SLURM or `mrl.launch` how a command ended."""

    DONE = 0
    UNFORESEEN = 1
    BAD_INPUT = 2
    FAILED = 70
    LOST_RANK = 71
    HUNG_RANK = 72
    LOST_ENGINE = 73
    DISK = 74
    SAVED = 75
    NOT_FINITE = 76
    OUT_OF_MEMORY = 77
    HANGUP = 129
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.UNFORESEEN: "an unexpected error; its traceback is printed",
    ExitCode.BAD_INPUT: "bad input: one line says what was given, expected, and what to do",
    ExitCode.FAILED: "the run cannot continue, for a reason that has no code of its own",
    ExitCode.LOST_RANK: "a rank was lost: it was killed, or its node died",
    ExitCode.HUNG_RANK: "a rank hung: it was stopped, or made no progress within its limit",
    ExitCode.LOST_ENGINE: "a rollout engine was lost for good, or could not be started",
    ExitCode.DISK: "a file could not be written: the disk is full, over its quota or read-only, the "
    "file is too large, or the run folder is gone",
    ExitCode.SAVED: "a signal or a callback stopped the run, and its progress was saved",
    ExitCode.NOT_FINITE: "losses, log-probs or gradients were not finite",
    ExitCode.OUT_OF_MEMORY: "the memory of a GPU or of the host was too small",
    ExitCode.HANGUP: "SIGHUP arrived, and there was not enough time to save",
    ExitCode.INTERRUPTED: "Ctrl-C",
    ExitCode.BROKEN_PIPE: "the reader of the command's output has closed the pipe, as `head` does",
    ExitCode.TERMINATED: "SIGTERM arrived, and there was not enough time to save",
}
"""The meaning of each exit code, in words for users."""

DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EFBIG: "File too large: it is above the limit of this process (ulimit -f) or of the disk",
}
"""Messages for users, by the `errno` of a write that failed because of the disk."""


class RunFailed(RuntimeError):
    """The run cannot continue, for a reason other than a bug in mrl. The message says why and what
    to do.

    The command line prints the message without a traceback and exits with `exit_code`.
    """

    exit_code = ExitCode.FAILED


class RankLost(RunFailed):
    """Another rank of the job can no longer be reached."""

    exit_code = ExitCode.LOST_RANK


class EngineGone(RunFailed):
    """A rollout engine was lost more often than the recipe allows, or could not be started."""

    exit_code = ExitCode.LOST_ENGINE


class DiskFailed(RunFailed):
    """A file could not be written because the disk is full, over its quota or read-only, or for a
    similar reason. The message names the file."""

    exit_code = ExitCode.DISK


class NotFinite(RunFailed):
    """A loss, a log-prob or a gradient is NaN or infinite."""

    exit_code = ExitCode.NOT_FINITE


class WrongWeights(RunFailed):
    """The weights of an engine differ from the weights that it reported, or from the weights that
    the trainer sent to it."""


class OutOfMemory(RunFailed):
    """The memory of a GPU or of the host is too small."""

    exit_code = ExitCode.OUT_OF_MEMORY


class InputError(ValueError):
    """Bad input from the user, such as a wrong recipe, data file, model folder or reward function.

    The message is one line that says what was given, what was expected, and what to do. The command
    line prints it without a traceback and exits with code 2.
    """
