"""Decides which prompts are generated ahead of the steps that train on them. The package does no
I/O and has no threads or clock."""
