#!/usr/bin/env bash
# stage.sh WHAT COMMAND...: one line for a stage of the set-up, with its seconds.
#
# What COMMAND prints goes to .venv/setup.log. Where it fails, the end of that is printed, and its code is
# that of this script.
set -uo pipefail

what=$1
shift
mkdir -p .venv
log=.venv/setup.log
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
  echo "error: $what failed with code $code; $log has all that it printed" >&2
  exit "$code"
fi
