#!/usr/bin/env bash
# Everything that needs a GPU, offline, the most telling first: bash benchmarks/gpu_check.sh [PART ...]
# The parts, their limits and the files are those of benchmarks/gpu_lane/run.py, which takes the
# arguments. Where .gpu-lane/ holds the pieces of benchmarks/gpu_lane/assemble.py, their packages go
# before those of the interpreter.
# PYTHON picks the interpreter, which needs torch with CUDA, pybind11, setuptools, pytest and hypothesis,
# and nvcc beside it. docs/gpu.md says how to use ten minutes on a machine without a network.
set -euo pipefail
SECONDS=0
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1

if [[ -f .gpu-lane/pieces.json ]]; then
  # A machine that is still warm has them from the call before; `build/` is ignored by Git.
  site=build/gpu-lane-$(sha256sum .gpu-lane/pieces.json | cut -c1-16)
  exports=$("$python" benchmarks/gpu_lane/unpack.py "$site")
  eval "$exports"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks.gpu_lane.run --spent-s "$SECONDS" "$@"
