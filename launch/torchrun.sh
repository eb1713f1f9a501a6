#!/usr/bin/env bash
# Train on this machine:  launch/torchrun.sh RECIPE [key=value ...]
# NPROC sets the number of processes; the default is one per GPU (of CUDA_VISIBLE_DEVICES, if that is set),
# or one if there are no GPUs. With a disaggregated recipe (docs/async.md) the last rollout.num_ranks
# processes lead engines; without GPUs set NPROC, because one process is too few.
# OMP_NUM_THREADS sets the threads of each process. With GPUs the default is the number of cores divided by
# the number of processes (torchrun's default of one thread would make packing and loading slow); without
# GPUs train.cpu_threads in the recipe applies.
# MAX_RESTARTS (default 0) is how often the ranks are started again after one was lost or hung.
# IGNORE_MEMORY=1 starts a recipe although by mrl's formulas it does not fit into the GPUs' memory.
set -euo pipefail

if [[ $# -lt 1 ]]; then
  echo "usage: $0 RECIPE [key=value ...]" >&2
  exit 2
fi

# Use the active environment, or that of `make setup` if none is active.
venv="$(dirname "${BASH_SOURCE[0]}")/../.venv/bin"
if ! command -v torchrun > /dev/null && [[ -d $venv ]]; then
  PATH="$(cd "$venv" && pwd):$PATH"
fi

num_gpus=0
if command -v nvidia-smi > /dev/null; then
  # nvidia-smi fails if it is installed and there is no GPU; that counts as no GPU.
  num_gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l) || num_gpus=0
fi
if [[ $num_gpus -gt 0 && -n ${CUDA_VISIBLE_DEVICES+set} ]]; then # nvidia-smi lists hidden GPUs, too
  listed=",$CUDA_VISIBLE_DEVICES" listed=${listed%%,-*} # CUDA hides the GPUs from the first -1 on
  IFS=, read -ra visible <<< "${listed#,}"
  num_gpus=${#visible[@]}
fi
nproc="${NPROC:-$((num_gpus > 0 ? num_gpus : 1))}"
if [[ ! $nproc =~ ^[1-9][0-9]*$ ]]; then
  echo "mrl: NPROC: got '$nproc', expected a number of processes above 0" >&2
  exit 2
fi

if [[ -z ${OMP_NUM_THREADS:-} && $num_gpus -gt 0 ]]; then
  threads=$(($(nproc) / nproc))
  export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi

# Bad input ends the script here with one line and code 2; under torchrun every rank would report it.
WORLD_SIZE=$nproc python -m mrl check ${IGNORE_MEMORY:+--ignore-memory} "$@" > /dev/null

exec python -m mrl.launch --standalone --nproc-per-node "$nproc" \
  --max-restarts "${MAX_RESTARTS:-0}" -m mrl train "$@"
