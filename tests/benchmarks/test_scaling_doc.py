"""docs/scaling.md is what benchmarks/scaling.py writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_committed_document_is_the_scripts_output(tmp_path: Path) -> None:
    output = tmp_path / "scaling.md"
    script = ROOT / "benchmarks" / "scaling.py"
    command = [sys.executable, str(script), "--output", str(output)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = output.read_text()
    assert "{" not in written  # everything was filled in
    assert written == (ROOT / "docs" / "scaling.md").read_text(), "run benchmarks/scaling.py"
