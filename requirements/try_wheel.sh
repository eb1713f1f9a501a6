#!/usr/bin/env bash
# Builds mrl's wheel, installs it into a new environment, and runs it there, outside the checkout:
# `mrl toy-model`, `mrl check`, and the tests of the installed kernels.
#
#   requirements/try_wheel.sh FOLDER   # the wheel remains in FOLDER
#   FRESH=1 ...                        # the new environment downloads requirements/cpu.txt (3 GB);
#                                      # by default it borrows the packages of PYTHON (.venv), less mrl
#
# It builds from a copy, because setuptools would also pack what an older build left in build/.
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ $# -eq 1 ]] || { echo "usage: $0 FOLDER" >&2; exit 2; }
mkdir -p "$1"
wheels=$(cd "$1" && pwd)
python=${PYTHON:-$checkout/.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

copy() { # PATH... of the checkout into $work/$1, without what is built
  local target=$work/$1
  mkdir -p "$target"
  tar -C "$checkout" --exclude '__pycache__' --exclude '_C*.so' -cf - "${@:2}" | tar -C "$target" -xf -
}

copy source setup.py pyproject.toml README.md LICENSE csrc mrl moe parallel
"$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$work/wheel" "$work/source"
"$python" - "$work/source" "$work"/wheel/*.whl << 'PYTHON'
import sys, zipfile
from pathlib import Path
source = Path(sys.argv[1])
packed = set(zipfile.ZipFile(sys.argv[2]).namelist())
files = (file for room in ("mrl", "moe", "parallel") for file in (source / room).rglob("*"))
missing = {str(file.relative_to(source)) for file in files if file.is_file()} - packed
if missing:
    sys.exit(f"error: not in the wheel: {' '.join(sorted(missing))}; see package_data in setup.py")
PYTHON
rm -rf "$work/source"

"$python" -m venv "$work/venv"
new=$work/venv/bin
if [[ -n ${FRESH:-} ]]; then
  "$new/python" -m pip install --quiet --no-deps -r "$checkout/requirements/cpu.txt"
else
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$new/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
fi
"$new/python" -m pip install --quiet --no-deps --ignore-installed "$work"/wheel/*.whl

# The tests, what they read, and no mrl beside them.
copy outside tests benchmarks launch csrc pyproject.toml
cd "$work/outside"
"$new/python" - "$work/venv" << 'PYTHON'
import sys
import mrl, moe, parallel, mrl._C
for module in (mrl, moe, parallel, mrl._C):
    if not module.__file__.startswith(sys.argv[1]):
        sys.exit(f"error: {module.__name__} comes from {module.__file__}, not from the wheel")
PYTHON
"$new/mrl" toy-model toy/model
"$new/mrl" check launch/recipes/toy_moe.yaml
# What reads and compiles csrc/ itself says nothing about the wheel.
"$new/python" -m pytest -q -m "not release" -p no:cacheprovider tests/kernels \
  --ignore tests/kernels/test_cuda_emulated.py --ignore tests/kernels/test_emulator.py \
  --ignore tests/kernels/test_cuda_source.py
mv "$work"/wheel/*.whl "$wheels/"
echo "the wheel runs: $(ls "$wheels"/mrl-*.whl)"
