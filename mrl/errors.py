"""This module holds the errors that a user can mend, and the one table of exit codes.

docs/faults.md prints the table; a test compares both.
"""

from __future__ import annotations

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """An `ExitCode` says to the shell, SLURM or `mrl.launch` how a command ended."""

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
    NOBODY_READS = 141
    TERMINATED = 143


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.UNFORESEEN: "an error that mrl does not foresee; its traceback is printed",
    ExitCode.BAD_INPUT: "bad input: one line says what was given, expected, and what to do",
    ExitCode.FAILED: "the run cannot continue, for a reason without a code of its own",
    ExitCode.LOST_RANK: "a rank was lost: it was killed, or its node died",
    ExitCode.HUNG_RANK: "a rank hung: it was stopped, or made no progress within its limit",
    ExitCode.LOST_ENGINE: "a rollout engine was lost for good, or could not be started",
    ExitCode.DISK: "a file could not be written: the disk is full, over its quota or read-only, the "
    "file is too large, or the run folder is gone",
    ExitCode.SAVED: "a signal or a callback stopped the run, which saved what there was to save",
    ExitCode.NOT_FINITE: "losses, log-probs or gradients were not finite",
    ExitCode.OUT_OF_MEMORY: "the memory of a GPU or of the host was too small",
    ExitCode.HANGUP: "SIGHUP came, and the time did not suffice to save",
    ExitCode.INTERRUPTED: "Ctrl-C",
    ExitCode.NOBODY_READS: "nobody reads what the command prints any more, as under head",
    ExitCode.TERMINATED: "SIGTERM came, and the time did not suffice to save",
}
"""What each exit code means, in words for users."""

DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EFBIG: "File too large: it is above the limit of this process (ulimit -f) or of the disk",
}
"""What an OSError of the disk means."""


class RunFailed(RuntimeError):
    """The run cannot continue, and not for a fault of the code: the message says why and what to do.

    The command line prints it without a traceback and exits with `exit_code`.
    """

    exit_code = ExitCode.FAILED


class RankLost(RunFailed):
    """Another rank of the job is gone: this one cannot reach it any more."""

    exit_code = ExitCode.LOST_RANK


class EngineGone(RunFailed):
    """A rollout engine was lost more often than the recipe allows, or could not be started."""

    exit_code = ExitCode.LOST_ENGINE


class DiskFailed(RunFailed):
    """A file could not be written, because of the disk: the message names it."""

    exit_code = ExitCode.DISK


class NotFinite(RunFailed):
    """A loss, a log-prob or a gradient is NaN or infinite."""

    exit_code = ExitCode.NOT_FINITE


class WrongWeights(RunFailed):
    """An engine used other weights than it says, or than it was given: by its stamps or its cache."""


class OutOfMemory(RunFailed):
    """The memory of a GPU or of the host does not suffice."""

    exit_code = ExitCode.OUT_OF_MEMORY


class InputError(ValueError):
    """The user's input is bad: recipe, data, model folder or reward function.

    The message is one clear line: what was given, what was expected, what to do. The command line
    prints it without a traceback and exits with code 2.
    """
