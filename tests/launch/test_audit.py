"""requirements/audit.py over a stand-in for pip-audit, which answers as the real one did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AUDIT = Path(__file__).parents[2] / "requirements/audit.py"
SILENT = [{"name": "requests", "skip_reason": "Dependency not found on PyPI"}]
KNOWS = [{"name": "requests", "version": "2.19.0", "vulns": [{"id": "A", "fix_versions": ["3"]}]}]
CLEAN = [{"name": "torch", "version": "2.13.0", "vulns": []}]


def audited(folder: Path, known: object, pins: object = CLEAN) -> tuple[int, str]:
    """Run the audit of one file -> (exit code, what it printed). `known` is the answer to the package
    that is asked for first: its rows, or the words of an error."""
    answers = [json.dumps({"dependencies": rows}) for rows in (known, pins)]
    (folder / "pip_audit.py").write_text(
        f"import sys\nif {known!r} == 'no net': sys.exit('ConnectionError: no net')\n"
        f"print({answers!r}['pins.txt' in str(sys.argv)])\n"
    )
    pins_file = folder / "pins.txt"
    pins_file.write_text("torch==2.13.0\n")
    return printed(pins_file, PYTHONPATH=str(folder))


def printed(pins: Path, **env: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(AUDIT), str(pins)],
        env=os.environ | env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        (SILENT, "of requests==2.19.0, which has a known vulnerability, it says: Dependency not found"),
        ([{"name": "requests", "version": "2.19.0", "vulns": []}], "it says: nothing; "),
        ("no net", "ConnectionError: no net; "),
    ],
)  # fmt: skip
def test_a_service_that_is_out_of_reach_is_no_clean_result(
    known: object, reason: str, tmp_path: Path
) -> None:
    code, said = audited(tmp_path, known)
    assert code == 2
    assert said.startswith("mrl: ")
    assert reason in said
    assert said.endswith("; run make audit on a machine that reaches pypi.org\n")
    assert said.count("\n") == 1


def test_findings_are_printed_and_change_the_exit_code(tmp_path: Path) -> None:
    assert audited(tmp_path, KNOWS) == (
        0,
        "1 packages, 0 known vulnerabilities, 0 packages unknown\n",
    )
    code, said = audited(tmp_path, KNOWS, KNOWS)
    assert code == 1
    assert "pins.txt: requests==2.19.0 has A, mended in 3" in said


def test_without_pip_audit_the_line_says_what_installs_it(tmp_path: Path) -> None:
    code, said = printed(tmp_path / "pins.txt")
    assert (code, said.count("\n")) == (2, 1)
    assert "has no pip-audit; run make audit, which installs it" in said
