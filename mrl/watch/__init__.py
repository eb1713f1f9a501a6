"""The watchdog: a process on each node that finds a rank that hangs, reports it, and ends the run."""
