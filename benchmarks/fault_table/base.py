"""The table is made of rows of `mrl.drill`, each with the number of its fault in the list of 18."""

from __future__ import annotations

import contextlib
import io
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from mrl.cli import main
from mrl.drill import Row

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "launch" / "recipes" / "toy_moe.yaml"
DATA = ROOT / "launch" / "recipes" / "data" / "first_char.jsonl"
KINDS = {
    1: "a rank is killed", 2: "a rank hangs", 3: "a signal of the scheduler", 4: "killed in a save",
    5: "the disk is full", 6: "a damaged file", 7: "a gradient is NaN", 8: "a reward misbehaves",
    9: "an engine dies", 10: "stale weights", 11: "data after a resume", 12: "malformed rows",
    13: "a prompt is too long", 14: "model and tokenizer do not fit", 15: "a typo, impossible sizes",
    16: "two runs, one folder", 17: "the network parts", 18: "one part dies, others stay",
}  # fmt: skip
"""The 18 kinds of faults."""


@dataclass(frozen=True)
class Said:
    """What a command said: its exit code, and the lines of its stderr."""

    code: int
    lines: list[str]
    seconds: float


def command(*words: str | Path) -> Said:
    """Run `mrl WORDS` in this process."""
    err, began, code = io.StringIO(), time.monotonic(), 0
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return Said(code, err.getvalue().strip().splitlines(), time.monotonic() - began)


def refused_row(name: str, did: str, said: Said, named: str) -> Row:
    """Return the row of a command that must be refused by one line that contains `named`."""
    problems = []
    if said.code != 2:
        problems.append(f"exit code {said.code}, expected 2")
    if len(said.lines) != 1:
        problems.append(f"{len(said.lines)} lines, expected one: {said.lines[:3]}")
    line = said.lines[-1] if said.lines else ""
    if named not in line:
        problems.append(f"the line does not contain {named!r}")
    return Row(name, did, line, said.seconds, "refused", said.code, tuple(problems))


@dataclass
class Toy:
    """A toy model in a scratch folder, and the overrides of a small step."""

    folder: Path
    model: Path

    @property
    def data(self) -> Path:
        """A copy of the prompts of the demo."""
        file = self.folder / "prompts" / DATA.name
        if not file.exists():
            file.parent.mkdir(parents=True)
            shutil.copy(DATA, file)
        return file

    def overrides(self, *more: str, output: str = "refused") -> list[str]:
        return [
            f"model.path={self.model}", f"output_dir={self.folder / output}", f"data.path={self.data}",
            "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
            "rollout.max_response_len=96", "rollout.min_response_len=96",
            "train.micro_batch_tokens=1024", "rollout.stall_timeout_s=10", *more,
        ]  # fmt: skip
