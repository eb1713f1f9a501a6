#!/usr/bin/env bash
# Train on this machine:  launch/torchrun.sh RECIPE [key=value ...]
# NPROC sets the number of processes; by default one per GPU, or one where there is none.
# Of a disaggregated recipe (docs/async.md) the last rollout.num_ranks of them lead engines; without GPUs
# give NPROC, as one process is too few.
# OMP_NUM_THREADS sets the threads of each; by default the cores over the processes where there are GPUs
# (torchrun alone gives every process one, and packing and loading would crawl), one on CPUs.
# MAX_RESTARTS (default 0) starts the ranks again after one was lost or hung, at most so often.
# IGNORE_MEMORY=1 starts a recipe that by mrl's formulas does not fit into the GPUs' memory.
set -euo pipefail

if [[ $# -lt 1 ]]; then
  echo "usage: $0 RECIPE [key=value ...]" >&2
  exit 2
fi

# The active environment, else the one of `make setup`.
venv="$(dirname "${BASH_SOURCE[0]}")/../.venv/bin"
if ! command -v torchrun > /dev/null && [[ -d $venv ]]; then
  PATH="$(cd "$venv" && pwd):$PATH"
fi

num_gpus=0
if command -v nvidia-smi > /dev/null; then
  # Fails where there is a driver tool and no GPU: that counts as none.
  num_gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l) || num_gpus=0
fi
nproc="${NPROC:-$((num_gpus > 0 ? num_gpus : 1))}"
if [[ ! $nproc =~ ^[1-9][0-9]*$ ]]; then
  echo "mrl: NPROC: got '$nproc', expected a number of processes above 0" >&2
  exit 2
fi

if [[ -z ${OMP_NUM_THREADS:-} ]]; then
  threads=1
  if [[ $num_gpus -gt 0 ]]; then
    threads=$(($(nproc) / nproc))
  fi
  export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi

# Bad input ends here, with one line and code 2; under torchrun every rank would report it.
WORLD_SIZE=$nproc python -m mrl check ${IGNORE_MEMORY:+--ignore-memory} "$@" > /dev/null

exec python -m mrl.launch --standalone --nproc-per-node "$nproc" \
  --max-restarts "${MAX_RESTARTS:-0}" -m mrl train "$@"
