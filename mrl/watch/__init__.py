"""The watchdog: a process beside the ranks that finds the one that hangs, and ends the run."""
