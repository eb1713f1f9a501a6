"""A colocated run on one GPU without a network: what it needs (assemble.py), what it runs (run.py)."""
