#!/usr/bin/env bash
# SLURM and munge for tests/slurm, which starts a real cluster on this machine.
#
# From Debian's or Ubuntu's own packages, as SLURM is in no other package index. They go into the system and
# need root, but nothing is started by them that was not asked for: the tests run daemons of their own, with
# their own files and free ports. Where they cannot be had this script says so, and the tests that need them
# are skipped with the reason.
set -euo pipefail

leave() {
  echo "note: $1, so no SLURM of our own: tests/slurm is skipped" >&2
  exit 0
}

for program in munged slurmctld slurmd sbatch; do
  command -v "$program" > /dev/null || missing=1
done
[[ -n ${missing:-} ]] || exit 0 # they are there
[[ $(id -u) -eq 0 ]] || leave "only root can run SLURM's daemons here (run make test-all as root for it)"
command -v apt-get > /dev/null || leave "there is no apt-get (install slurmctld, slurmd and munge yourself)"
# Installing a daemon's package would start it: 101 forbids that, where no policy of the machine's is there.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  printf '#!/bin/sh\nexit 101\n' > "$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get install --yes --quiet --no-install-recommends slurmctld slurmd slurm-client munge procps > /dev/null 2>&1 \
  || { apt-get update --quiet > /dev/null 2>&1 \
    && apt-get install --yes --quiet --no-install-recommends slurmctld slurmd slurm-client munge procps > /dev/null; } \
  || leave "apt-get could not install slurmctld, slurmd and munge"
