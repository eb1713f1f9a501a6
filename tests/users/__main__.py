"""`python -m tests.users [WORDS]`: try what users do, where the text has WORDS, and print a table."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

from mrl.toy_model import write_toy_model
from tests.loop.conftest import Toy
from tests.users import load
from tests.users.things import THINGS, Thing, User


def outcome(thing: Thing, folder: Path, toy: Toy) -> tuple[bool, str]:
    folder.mkdir()
    try:
        return True, thing.do(User(folder, toy))
    except Exception:
        return False, traceback.format_exc()


def main() -> None:
    load()
    words, failed = " ".join(sys.argv[1:]).lower(), 0
    chosen = [one for one in THINGS if words in one.text.lower()]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_toy_model(root / "toy")
        for number, one in enumerate(chosen, start=1):
            start = time.monotonic()
            passed, text = outcome(one, root / str(number), Toy(root / "toy"))
            failed += not passed
            seconds = time.monotonic() - start
            print(f"{number:3} {'ok  ' if passed else 'FAIL'} {seconds:6.1f} s  {one.text}")
            print(f"{'':19}-> {text}", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
