"""`python -m mrl.launch` over ranks that are shell scripts: how it reports what ended them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# torchrun takes $$ in its arguments for $
RANK = 'echo "start $RANK" >> "$SEEN/starts"; printf %s "$SEEN" > "$MRL_LAUNCH_FOLDER/run_folder"; '


def launched(script: str, seen: Path, *more: str) -> tuple[int, list[str]]:
    words = [sys.executable, "-m", "mrl.launch", "--standalone", "--nproc-per-node", "2", *more]
    done = subprocess.run(
        [*words, "--no-python", "sh", "-c", RANK + script],
        env=os.environ | {"PYTHONPATH": str(ROOT), "SEEN": str(seen)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


@pytest.mark.release
def test_a_killed_rank_is_one_block_and_starts_again(tmp_path: Path) -> None:
    script = 'if [ "$RANK" = 1 ]; then kill -9 $$$$; fi; exec sleep 300'
    code, lines = launched(script, tmp_path, "--max-restarts", "1")
    assert code == 71
    assert len((tmp_path / "starts").read_text().splitlines()) == 4
    assert "mrl: starts again, 1 of 1 restarts" in lines
    assert lines.count("mrl: rank 1 was killed by SIGKILL") == 2
    assert not any("Traceback" in line for line in lines)
    assert json.loads((tmp_path / "failure.json").read_text())["rank"] == 1


@pytest.mark.release
@pytest.mark.parametrize("code", [2, 75])
def test_what_another_start_cannot_mend_keeps_its_code(code: int, tmp_path: Path) -> None:
    found, lines = launched(f"exit {code}", tmp_path, "--max-restarts", "3")
    assert found == code
    assert len((tmp_path / "starts").read_text().splitlines()) == 2
    assert not any("mrl:" in line or "Traceback" in line for line in lines)


@pytest.mark.release
def test_a_run_that_saved_and_left_has_code_75_whoever_dies_then(tmp_path: Path) -> None:
    script = 'touch "$MRL_LAUNCH_FOLDER/saved"; kill -TERM $$$$'
    assert launched(script, tmp_path) == (75, [])
