"""Files that change under a run, and machines that lack something: `mrl check` refuses each."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fault_table.base import RECIPE, ROOT, Said, Toy, command, refused_row
from mrl.drill import Row
from mrl.drill.stopped import flip

FEW_FILES = 64
"""The limit of open files, soft and hard, of a machine that has too few."""


def changed(run: Path, toy: Toy, ranks: int) -> Iterator[tuple[int, Row]]:
    """Yield (number, row) for files that were changed under a run that has steps."""
    words = ("check", run, "--gpus", str(ranks))
    weights, data = toy.model / "model.safetensors", toy.data
    for number, name, did, file, new in (
        (14, "other-weights", "model.safetensors replaced under a run", weights, None),
        (11, "shorter-data", "half of the rows removed under a run", data, slice(0, None, 2)),
        (11, "reordered-data", "the rows reversed under a run", data, slice(None, None, -1)),
    ):
        kept = file.read_bytes()
        if new is None:
            flip(file, 0.999)
        else:
            file.write_bytes(b"".join(kept.splitlines(keepends=True)[new]))
        row = refused_row(name, did, command(*words), "have changed")
        file.write_bytes(kept)
        yield number, row


def machines(toy: Toy) -> Iterator[tuple[int, Row]]:
    """Yield (number, row) for what a machine may lack; each is a `mrl check` of its own."""
    words = [sys.executable, "-m", "mrl", "check", str(RECIPE), *toy.overrides()]
    few = f"import resource, os, sys; resource.setrlimit({resource.RLIMIT_NOFILE}, "
    few += f"({FEW_FILES}, {FEW_FILES})); os.execv(sys.argv[1], sys.argv[1:])"
    no_files = _said([sys.executable, "-c", few, *words])
    did = f"a limit of {FEW_FILES} open files"
    yield 15, refused_row("few-open-files", did, no_files, str(FEW_FILES))
    alone = ["unshare", "--net"]
    if subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        why = "this user may not make a network namespace"
        yield 17, Row("no-loopback", "a machine without loopback", why, 0.0, "not provoked")
    else:
        yield (
            17,
            refused_row(
                "no-loopback", "a machine without loopback", _said([*alone, *words]), "loopback"
            ),
        )


def _said(words: list[str]) -> Said:
    began = time.monotonic()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return Said(done.returncode, done.stderr.strip().splitlines(), time.monotonic() - began)
