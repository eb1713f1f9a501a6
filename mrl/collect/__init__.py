"""Collects the scored sample groups of a step, from prompts to rewards, and runs evaluations."""
