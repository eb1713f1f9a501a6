"""This room gives a step its scored sample groups: prompts, rollouts, rewards, evaluation."""
