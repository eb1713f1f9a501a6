"""What studies/on_policy.py measures with: the engine's side, the trainer's, causes, comparison."""
