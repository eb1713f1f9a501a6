"""A colocated run on one GPU that has no network: what it needs (assemble.py), what it runs (run.py)."""
