"""`python -m tests.users [WORDS]`: try what users do, where the text has WORDS, and print a table."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from mrl.toy_model import write_toy_model
from tests.loop.conftest import Toy
from tests.users import load
from tests.users.things import THINGS, Thing, User

MARKS = {True: "ok  ", None: "skip", False: "FAIL"}
WALLS = {True: "gone", None: "not tried", False: "STANDS"}


def outcome(thing: Thing, folder: Path, toy: Toy) -> tuple[bool | None, str]:
    """Return whether a thing ends as it should, None where this machine cannot try it, and a text."""
    folder.mkdir()
    try:
        return True, thing.do(User(folder, toy))
    except pytest.skip.Exception as error:
        return None, str(error)
    except Exception:
        return False, traceback.format_exc()


def main() -> None:
    load()
    words, failed, skipped, gone = " ".join(sys.argv[1:]).lower(), 0, 0, {}
    chosen = [one for one in THINGS if words in one.text.lower()]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_toy_model(root / "toy")
        for number, one in enumerate(chosen, start=1):
            start = time.monotonic()
            passed, text = outcome(one, root / str(number), Toy(root / "toy"))
            failed += passed is False
            skipped += passed is None
            if one.wall is not None:
                gone[one.wall] = passed
            seconds = time.monotonic() - start
            print(f"{number:3} {MARKS[passed]} {seconds:6.1f} s  {one.text}")
            print(f"{'':19}-> {text}", flush=True)
    for wall, is_gone in gone.items():
        print(f"wall {WALLS[is_gone]}: {wall}")
    print(
        f"{len(chosen) - failed - skipped} passed, {failed} failed"
        + f", {skipped} skipped" * (skipped > 0)
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
