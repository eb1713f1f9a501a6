"""Measure, record and explain the mismatch of the log-probs that trainer and engine give each token."""
