"""This package prepares (assemble.py) and makes (run.py) a colocated run on one GPU without a
network.
"""
