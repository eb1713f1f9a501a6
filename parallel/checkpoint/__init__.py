"""Checkpoints: written in the background, checked, loaded at any layout, exported to Hugging Face."""
