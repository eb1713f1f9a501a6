"""Finds the line in a server's log that says why the server died."""

from __future__ import annotations

import re
import signal

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|Not enough memory|bad_alloc|[Cc]an(?:no|')t allocate memory"
)
EXCEPTION = re.compile(
    r"^(?:\[[^\]]*\] *)?(?P<text>(?:\w+\.)*\w*(?:Error|Exception|Failure|Timeout|NotFound)\b.*)"
)
"""Matches the last line of a traceback, after an optional prefix of SGLang's logger."""
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
CONSEQUENCES = re.compile(
    r"EOFError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|scheduler died|"
    r"(?:Sub)?process .*(?:failed|died|terminated)|initialization failed|/freeze_gc"
)
"""Matches errors that other processes of the server report as a consequence of the first failure."""
CRASHES = re.compile(
    r"Segmentation fault|Fatal Python error|core dumped|CHECK failed|terminate called"
)
MAX_CHARS = 300


def cause(log: str, exit_code: int | None = None) -> str:
    """Return one line that says why the server died; empty if neither `log` nor `exit_code` tells.

    The line is the first of these that is found: an out-of-memory error, the first exception that is
    not the consequence of another failure, the first exception of any kind, the last message of a
    crash, the signal that killed the server.
    """
    lines = log.splitlines()
    for line in lines:
        if OUT_OF_MEMORY.search(line):
            return _shortened(_bare(line))
    raised = _exceptions(lines)
    own = [text for text in raised if not CONSEQUENCES.search(text)]
    if own or raised:
        return _shortened((own or raised)[0])
    for line in reversed(lines):
        if CRASHES.search(line):
            return _shortened(_bare(line))
    return _signal(exit_code)


def _exceptions(lines: list[str]) -> list[str]:
    """Return the last line of each traceback. Of chained tracebacks, only the last one counts."""
    found: list[str] = []
    in_traceback = False
    for number, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            in_traceback = True
            continue
        match = EXCEPTION.match(line) if in_traceback else None
        if match is None:
            continue
        in_traceback = False
        after = next((each for each in lines[number + 1 :] if each.strip()), "")
        if not after.startswith(CHAINED):
            goes_on = match["text"].rstrip().endswith(":") and after
            found.append(f"{match['text']} {after.strip()}" if goes_on else match["text"])
    return found


def _signal(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return ""
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL:
        return (
            "killed by SIGKILL: the host ran out of memory (`dmesg` would say oom-kill), or someone "
            "killed it"
        )
    return f"killed by {name}"


def _bare(line: str) -> str:
    """Return a line without the prefix of SGLang's logger."""
    match = EXCEPTION.match(line)
    return match["text"] if match else re.sub(r"^\[[^\]]*\] *", "", line).strip()


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 3]}..."
