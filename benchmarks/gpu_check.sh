#!/usr/bin/env bash
# Everything about the kernels that needs a GPU, offline, in one go: bash benchmarks/gpu_check.sh
# Builds the GPU kernels in place, runs the tests marked `gpu`, then the benchmark. PYTHON picks the
# interpreter, which needs torch with CUDA, pybind11, setuptools, pytest and hypothesis, and nvcc beside
# it. Exits non-zero if any of the three fails.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export OMP_NUM_THREADS=1

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
  || { echo "error: $python sees no GPU: torch.cuda.is_available() is false" >&2; exit 2; }
MRL_CUDA=1 "$python" setup.py --quiet build_ext --inplace
"$python" -c 'import torch; from mrl import _C; assert _C.has_cuda, "built without CUDA"'
failed=0
"$python" -m pytest -q -m gpu tests || failed=1
"$python" -m benchmarks.bench_kernels --device cuda "$@" || failed=1
exit "$failed"
