"""Decides what is generated before the trainer needs it. The package does no I/O and has no threads
or clock."""
