"""Checkpoints: written in the background, checked for damage, loaded in any layout, and exported."""
