#!/usr/bin/env bash
# Everything that needs a GPU, offline, in one go: bash benchmarks/gpu_check.sh
# Builds the GPU kernels in place, then PARTS, in this order (all by default):
#   kernels   the tests marked `gpu`, and the kernel benchmark; 6 to 15 minutes
#   lane      a colocated SGLang and trainer (benchmarks/gpu_lane), from the pieces in .gpu-lane/ where
#             they are, else with the packages of the interpreter; under 9 minutes, and then what an engine
#             owes (benchmarks/conformance.py) on GPU 0
# PYTHON picks the interpreter, which needs torch with CUDA, pybind11, setuptools, pytest and hypothesis,
# and nvcc beside it. Exits non-zero if anything fails. Arguments go to the kernel benchmark.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
parts=${PARTS:-kernels lane}
export OMP_NUM_THREADS=1
for part in $parts; do
  case $part in
    kernels | lane) ;;
    *) echo "error: PARTS=$parts: got $part, expected kernels, lane or both" >&2; exit 2 ;;
  esac
done

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
  || { echo "error: $python sees no GPU: torch.cuda.is_available() is false" >&2; exit 2; }
MRL_CUDA=1 "$python" setup.py --quiet build_ext --inplace
"$python" -c 'import torch; from mrl import _C; assert _C.has_cuda, "built without CUDA"'
failed=0

run_kernels() {
  "$python" -m pytest -q -m gpu tests || failed=1
  "$python" -m benchmarks.bench_kernels --device cuda "$@" || failed=1
}

run_lane() {
  if [[ -f .gpu-lane/pieces.json ]]; then
    local site exports
    site=$(mktemp -d)/site
    exports=$("$python" benchmarks/gpu_lane/unpack.py "$site") || { failed=1; return; }
    eval "$exports"
  fi
  "$python" -m benchmarks.gpu_lane.run || failed=1
  "$python" -m benchmarks.conformance --gpus 0 || failed=1
}

for part in $parts; do
  if [[ $part == kernels ]]; then run_kernels "$@"; else (run_lane; exit "$failed") || failed=1; fi
done
exit "$failed"
