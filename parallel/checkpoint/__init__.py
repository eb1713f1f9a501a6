"""Checkpoints, which are written in the background, checked, loaded in any layout, and exported."""
