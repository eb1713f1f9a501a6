"""An unbuilt extension is an error, not a slow path."""

from __future__ import annotations

import subprocess
import sys


def test_missing_extension_fails_at_import() -> None:
    code = "import sys; sys.modules['mrl._C'] = None; import mrl.kernels"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "run `make setup` to build it" in done.stderr.strip().splitlines()[-1]
