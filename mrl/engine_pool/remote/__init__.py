"""Runs engines on separate ranks: some ranks of the run train, the others only run engines."""
