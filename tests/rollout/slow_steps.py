"""Makes each step of a test's engines wait while a file exists: SGLang's `forward_hooks` load this.

A step of the toy model takes 2 ms. On a busy machine an engine would finish hundreds of them before
the test that wants to stop it in the middle has its turn.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

STEP_S = 0.03


def make_hook(config: dict[str, str]) -> Any:
    flag = Path(config["flag"])

    def wait(module: object, inputs: object, output: object) -> None:
        if flag.exists():
            time.sleep(STEP_S)

    return wait


def server_args(flag: Path) -> dict[str, Any]:
    hook = {
        "name": "slow_steps",
        "target_modules": ["model"],
        "hook_factory": "tests.rollout.slow_steps:make_hook",
        "config": {"flag": str(flag)},
    }
    return {"forward_hooks": [hook]}
