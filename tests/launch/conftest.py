"""Stand-ins for the cluster's programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

TORCHRUN_SHIM = f"""#!{sys.executable} -IS
# As torchrun does: the ranks are children in sessions of their own.
import json, os, subprocess, sys
with open(os.environ["SEEN"] + "/torchrun.json", "w") as file:
    json.dump([sys.argv[1:], os.environ.get("OMP_NUM_THREADS")], file)
rank = '''
import os, signal, sys, time
def stop(*_):
    open(os.environ["SEEN"] + "/rank_saved", "w")
    sys.exit(3)
signal.signal(signal.SIGUSR1, stop)
open(os.environ["SEEN"] + "/rank_started", "w")
time.sleep(float(os.environ.get("RANK_SECONDS", "0")))
sys.exit(int(os.environ.get("RANK_CODE", "0")))
'''
sys.exit(subprocess.call([sys.executable, "-IS", "-c", rank], start_new_session=True))
"""
SRUN_SHIM = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$SEEN/srun"
while [[ $1 == --* ]]; do shift; done
words=()
for word in "$@"; do # those of the first component
  [[ $word != : ]] || break
  words+=("$word")
done
exec "${words[@]}"
"""
PYTHON_SHIM = """#!/bin/sh
if [ "$1 $2" = "-m mrl.launch" ]; then shift 2; exec torchrun "$@"; fi
echo "$WORLD_SIZE $*" > "$SEEN/check"
exit "${CHECK_CODE:-0}"
"""
SCONTROL_SHIM = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$SEEN/scontrol"
if [[ $2 == hostnames ]]; then
  if [[ $3 == *-* ]]; then echo node7; sleep 0.1; echo node8; else echo "$3"; fi
elif [[ $2 == show ]]; then
  echo "JobId=42 HetJobId=42 HetJobOffset=0 JobName=mrl JOB_GRES=gpu:a:16 GRES=gpu:h200:8(IDX:0-7) x="
  echo
  echo "JobId=43 HetJobId=42 HetJobOffset=1 JobName=mrl JOB_GRES=gpu:4 Nodes=m1 GRES=gpu:4(IDX:0-3) x="
  echo
  echo "JobId=44 HetJobId=42 HetJobOffset=2 JobName=mrl JOB_GRES=(null) Nodes=m2 GRES= x="
else
  exit "${REQUEUE_CODE:-0}"
fi
"""


UNSET = ("OMP_NUM_THREADS", "NPROC", "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def cluster(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """An environment with the stand-ins first in PATH, and the folder of what they saw."""
    shims, seen = tmp_path / "shims", tmp_path / "seen"
    shims.mkdir()
    seen.mkdir()
    for name, text in (
        ("torchrun", TORCHRUN_SHIM),
        ("srun", SRUN_SHIM),
        ("scontrol", SCONTROL_SHIM),
        ("python", PYTHON_SHIM),
        ("nvidia-smi", "#!/bin/sh\ncat $SEEN/gpus 2> /dev/null\n"),
        ("nproc", "#!/bin/sh\necho 26\n"),
    ):
        (shims / name).write_text(text)
        (shims / name).chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if k not in UNSET}
    environ |= {
        "PATH": f"{shims}:{os.environ['PATH']}",
        "SEEN": str(seen),
        "SLURM_JOB_ID": "42",
        "SLURM_PROCID": "0",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_RESTART_COUNT": "1",
    }
    return environ, seen


def torchrun_saw(seen: Path) -> Any:
    return json.loads((seen / "torchrun.json").read_text())
