"""Measure, record and explain how the log-probs of trainer and rollout engine differ for each token."""
