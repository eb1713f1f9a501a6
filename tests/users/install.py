"""Installing: the version, what was found, the import, and the wheel in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from mrl import __version__
from tests.loop.conftest import REPOSITORY, environment
from tests.users.things import User, thing


@thing("I ask which version of mrl is installed.", is_long=False)
def version(user: User) -> str:
    printed = user.mrl("--version").strip()
    assert printed == f"mrl {__version__}"
    return printed


@thing("I look at the versions that mrl found, as docs/install.md says.")
def versions(user: User) -> str:
    printed = user.mrl("check", *user.recipe("run"), "--versions")
    assert all(name in printed for name in ("sglang", "megatron-core", "torch"))
    assert printed.rstrip().endswith("ok")
    return "sglang, megatron-core and torch are in the table"


@thing("I import mrl in a script, and it does not load torch before I use it.")
def light_import(user: User) -> str:
    code = "import sys, mrl; assert 'torch' not in sys.modules; print(mrl.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=user.folder,
        env=environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return f"mrl {done.stdout.strip()}, without torch"


@thing("I build the wheel, and run it in a new environment outside of the checkout.")
def wheel(user: User) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", str(REPOSITORY / "requirements/try_wheel.sh"), str(user.folder)],
        check=False,
        cwd=user.folder,
        env=own | {"MRL_CUDA": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (built,) = user.folder.glob("mrl-*.whl")
    assert f"the wheel runs: {built}" in done.stdout
    return f"{built.name} runs"
