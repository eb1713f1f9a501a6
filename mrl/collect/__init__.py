"""What gives a step its scored sample groups: prompts, rollouts, rewards, evaluation, saved runs."""
