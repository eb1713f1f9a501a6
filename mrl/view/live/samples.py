"""The samples of a run for the live page: a list for each step, and one sample as a conversation.

A file of rollouts may be large. It is read once for the list, which keeps the place of each line but
not its text; a sample is then read from its line alone.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from mrl.errors import InputError
from mrl.run.rollout_rows import parsed
from mrl.system.json_text import is_number
from mrl.view.live.run_files import Signature, signature
from mrl.view.live.turns import Turn, turns_of
from mrl.view.series import short
from mrl.view.texts import ends_of

MAX_SAMPLES = 1024
"""The list has at most this many samples of a step."""
MAX_LINE_BYTES = 16 << 20
"""A longer line is not read."""
MAX_FILE_BYTES = 1 << 30
"""Lines beyond this place of a file are not read."""
MAX_PART, MAX_TURNS = 20_000, 200
"""The most characters that are shown of a part of a turn, and the most turns of a sample. The middle is
left out."""
MAX_RAW = 1_000_000
"""The most characters of a completion that are split into turns, or shown as they are."""
NUM_KEPT = 8
"""The number of steps whose lists are kept."""
SHOWN = ("group_id", "source", "finish_reason", "response_len", "weight_version", "staleness")


class Rollouts:
    """Which steps of a run have samples, and the samples themselves. Thread-safe, except for `poll`."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "rollouts"
        self._lists: OrderedDict[int, tuple[Signature, _List]] = OrderedDict()
        self._lock = threading.Lock()
        self._steps: list[int] = []
        self._seen: Signature = None
        self._expected = -1

    def poll(self, next_step: int) -> bool:
        """Look for new steps. `next_step` is the number of steps that metrics.jsonl has, because the
        samples of the present step are written before its row. Return whether there are new ones.

        The folder of a long run has very many files, so it is only listed if it has changed and the
        expected file is not there.
        """
        found = signature(self._folder)
        if found == self._seen and next_step == self._expected:
            return False
        is_later = bool(self._steps) and self._steps[-1] < next_step and next_step >= self._expected
        self._seen, self._expected = found, next_step
        new = [step for step in (next_step - 1, next_step) if step >= 0 and self._has(step)]
        if is_later:
            added = [step for step in new if step > self._steps[-1]]
            self._steps += added
            if added or new[-1:] == self._steps[-1:]:
                return bool(added)
        before, self._steps = self._steps, self._listed()
        return before != self._steps

    def around(self, step: int | None = None) -> dict[str, Any]:
        """Return the first and the newest step with samples and how many there are and, of a step, the
        steps with samples before and after it."""
        steps = self._steps
        found: dict[str, Any] = {
            "first": steps[0] if steps else None,
            "newest": steps[-1] if steps else None,
            "count": len(steps),
        }
        if step is not None:
            below, above = bisect_left(steps, step), bisect_right(steps, step)
            found["before"] = steps[below - 1] if below else None
            found["after"] = steps[above] if above < len(steps) else None
        return found

    def list(self, step: int) -> dict[str, Any]:
        """Return the samples of a step as the list shows them. Raises InputError if it has none."""
        found = self._list(step)
        return {"step": step, **found.shown, **self.around(step)}

    def sample(self, step: int, number: int, *, is_raw: bool = False) -> dict[str, Any]:
        """Return a sample of a step by its number in the file, as a conversation or, with `is_raw`, as
        the text that the file has. Raises InputError if there is none."""
        place = self._list(step).places.get(number)
        if place is None:
            raise InputError(f"step {step} has no sample {number} that can be shown")
        try:
            with self._file(step).open("rb") as stream:
                stream.seek(place)
                row = parsed(stream.readline(MAX_LINE_BYTES))
        except (OSError, ValueError) as error:
            raise InputError(f"step {step}: the sample cannot be read: {error}") from None
        completion, parts = row["completion"], row.get("reward_parts", {})
        if is_raw:
            turns = [Turn("as it is", [("text", "", _middle_out(completion, MAX_RAW))])]
        else:
            turns = turns_of(row["prompt"], _middle_out(completion, MAX_RAW))
        return {
            "step": step,
            "number": number,
            "turns": [_shown(turn, MAX_RAW if is_raw else MAX_PART) for turn in _fewer(turns)],
            "reward": short(row["reward"], 5),
            "reward_parts": {str(key): short(value, 5) for key, value in parts.items()},
            "advantage": short(row.get("advantage"), 5),
            **{name: row.get(name) for name in SHOWN},
        }

    def _list(self, step: int) -> _List:
        there = signature(self._file(step))
        if there is None:
            raise InputError(f"there are no samples of step {step}")
        with self._lock:
            if step in self._lists and self._lists[step][0] == there:
                self._lists.move_to_end(step)
                return self._lists[step][1]
            found = _List(self._file(step))
            self._lists[step] = (there, found)
            self._lists.move_to_end(step)
            while len(self._lists) > NUM_KEPT:
                self._lists.popitem(last=False)
            return found

    def _file(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}.jsonl"

    def _has(self, step: int) -> bool:
        return signature(self._file(step)) is not None

    def _listed(self) -> list[int]:
        steps = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                number = entry.name.removeprefix("step_").removesuffix(".jsonl")
                if entry.name.endswith(".jsonl") and number.isascii() and number.isdigit():
                    steps.append(int(number))
        return sorted(steps)


class _List:
    """The samples of one file, without their texts."""

    def __init__(self, file: Path) -> None:
        """Read the file. Raises InputError if that is not possible."""
        self.places: dict[int, int] = {}
        """Where the lines of samples begin, by the number of the sample."""
        samples: list[dict[str, Any]] = []
        num_bad = number = place = 0
        try:
            with file.open("rb") as stream:
                while place < MAX_FILE_BYTES and (line := stream.readline(MAX_LINE_BYTES)):
                    if not line.endswith(b"\n"):
                        num_bad += 1
                        if len(line) < MAX_LINE_BYTES:  # the last line, which a crash cut short
                            break
                        while line and not line.endswith(b"\n"):
                            line = stream.readline(MAX_LINE_BYTES)
                    elif len(samples) < MAX_SAMPLES:
                        try:
                            samples.append(_summary(number, parsed(line)))
                            self.places[number] = place
                        except ValueError:
                            num_bad += 1
                    number += 1
                    place = stream.tell()
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from None
        notes = []
        if num_bad:
            notes.append(f"Lines that are damaged, cut short or too long: {num_bad}.")
        if len(samples) < number - num_bad:
            notes.append(f"The list has the first {len(samples)} of {number} samples.")
        self.shown = {"samples": samples, "num_samples": number, "notes": notes}


def _summary(number: int, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "number": number,
        "text": ends_of(row["prompt"], row["completion"]),
        "reward": short(row["reward"], 5),
        "advantage": short(row.get("advantage"), 5),
        **{name: row.get(name) if _is_plain(row.get(name)) else None for name in SHOWN},
    }


def _is_plain(value: Any) -> bool:
    return is_number(value) or (isinstance(value, str) and len(value) < 1000)


def _fewer(turns: list[Turn]) -> list[Turn]:
    left_out = len(turns) - MAX_TURNS
    if left_out <= 0:
        return turns
    half = MAX_TURNS // 2
    return [*turns[:half], Turn("", [("text", "", f"[... {left_out} turns ...]")]), *turns[-half:]]


def _shown(turn: Turn, most: int) -> dict[str, Any]:
    return {
        "role": turn.role[:64],
        "parts": [[kind, name[:200], _middle_out(text, most)] for kind, name, text in turn.parts],
    }


def _middle_out(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
