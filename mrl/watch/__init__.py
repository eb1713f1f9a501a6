"""The watchdog: a process on each node that detects a hung rank, reports it, and ends the run."""
