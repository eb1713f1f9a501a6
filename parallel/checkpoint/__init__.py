"""Checkpoints are written in the background, checked, loaded at any layout, and exported."""
