"""Run the command line `mrl` with `python -m mrl`."""

import sys

from mrl.system.stop import remember_signals

if sys.argv[1:2] in (["train"], ["serve"]):
    remember_signals()  # before torch is imported: SLURM's signal may come at any time

from mrl.cli import main

if __name__ == "__main__":
    main()
