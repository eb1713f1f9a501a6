"""The wheel, in a new environment and outside the checkout: what is missing in it is found here."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.release
@pytest.mark.timeout(1800)  # it compiles the extension, and runs the kernels' tests again
def test_a_wheel_runs_outside_the_checkout(tmp_path):
    script = ROOT / "requirements/try_wheel.sh"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", str(script), str(tmp_path)],
        cwd=tmp_path,
        env=environment | {"MRL_CUDA": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (wheel,) = tmp_path.glob("mrl-*.whl")
    assert f"the wheel runs: {wheel}" in done.stdout
