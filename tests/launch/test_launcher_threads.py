"""`python -m mrl.launch` leaves the number of CPU threads to train.cpu_threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mrl.launch import main
from tests.loop.forked import Command
from tests.release import release
from tests.waiting import LIMIT_S

SCRIPT = """
import os
from pathlib import Path
text = f"{os.environ['OMP_NUM_THREADS']} {os.environ.get('MRL_ONE_THREAD')}"
Path(os.environ["OUT"], os.environ["RANK"]).write_text(text)
"""


@pytest.mark.parametrize(("given", "expected"), [(None, "1 1"), release("3", "3 None")])
def test_ranks_tell_the_launchers_one_thread_from_the_users(
    given: str | None, expected: str, tmp_path: Path
) -> None:
    """torchrun itself sets OMP_NUM_THREADS to 1 for several ranks. tests/preflight/test_threads.py has
    what a rank makes of the mark."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    names = ("OMP_NUM_THREADS", "MRL_ONE_THREAD")
    environ = {key: value for key, value in os.environ.items() if key not in names}
    environ |= {"OUT": str(tmp_path)} | ({"OMP_NUM_THREADS": given} if given else {})
    words = ["--standalone", "--nproc-per-node", "2", str(script)]
    done = Command(words, environ, tmp_path / "printed", entry=main).finish(LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == [expected] * 2
