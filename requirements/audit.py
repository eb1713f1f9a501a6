"""Compares the pinned packages with the known vulnerabilities, by pip-audit: `make audit`.

usage: python requirements/audit.py FILE ...

A service that cannot be reached, or that knows no package, must not look like a clean result: a version
with a known vulnerability is asked for first, and a package that the service does not know is reported.
Exit codes: 0 nothing was found, 1 something was, 2 the comparison could not be made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

KNOWN = "requests==2.19.0"
"""CVE-2018-18074: every service must know it."""
DO = "run make audit on a machine that reaches pypi.org"


def audited(file: Path) -> list[dict[str, Any]]:
    """Return what pip-audit says of each package of a requirements file."""
    words = ["--requirement", str(file), "--no-deps", "--disable-pip", "--format=json"]
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", *words, "--progress-spinner=off"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        return json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        if "No module named pip_audit" in reason:
            leave(f"{sys.executable} has no pip-audit; run make audit, which installs it")
        leave(f"pip-audit could not compare the packages of {file}: {reason}; {DO}")


def leave(text: str) -> NoReturn:
    print(f"mrl: {text}", file=sys.stderr)
    sys.exit(2)


def main(files: list[str]) -> None:
    """Print a line for each finding, and exit."""
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "known.txt"
        known.write_text(f"{KNOWN}\n")
        rows = audited(known)
        if not any(row.get("vulns") for row in rows):
            reason = next((row["skip_reason"] for row in rows if "skip_reason" in row), "nothing")
            leave(
                f"the vulnerability service cannot be used from here: of {KNOWN}, which has a known "
                f"vulnerability, it says: {reason}; {DO}"
            )
    found = unknown = packages = 0
    for file in files:
        for row in audited(Path(file)):
            packages += 1
            if "skip_reason" in row:
                unknown += 1
                print(f"{file}: {row['name']} is not known to the service: {row['skip_reason']}")
            for each in row.get("vulns", []):
                found += 1
                fixed = ", ".join(each["fix_versions"]) or "no version yet"
                print(
                    f"{file}: {row['name']}=={row['version']} has {each['id']}, mended in {fixed}"
                )
    print(f"{packages} packages, {found} known vulnerabilities, {unknown} packages unknown")
    sys.exit(bool(found))


if __name__ == "__main__":
    main(sys.argv[1:])
