#!/usr/bin/env bash
# stage.sh WHAT COMMAND...: one line for a stage of the set-up, with its seconds.
#
# The output of COMMAND goes to setup.log in the folder VENV (.venv). If it fails, the end of the log is
# printed, and the script exits with its code.
set -uo pipefail

what=$1
shift
mkdir -p "${VENV:=.venv}"
log=$VENV/setup.log
printf '%s (details: %s) ...' "$what" "$log"
printf '\n== %s\n' "$*" >> "$log"
start=$SECONDS
first=$(($(wc -l < "$log") + 1))
if "$@" >> "$log" 2>&1; then
  printf ' %d s\n' "$((SECONDS - start))"
else
  code=$?
  printf ' failed after %d s\n' "$((SECONDS - start))"
  tail -n "+$first" "$log" | tail -n 40 >&2
  echo "error: $what failed with code $code; see $log for its whole output" >&2
  exit "$code"
fi
