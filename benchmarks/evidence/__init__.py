"""This package knows every measurement behind a claim of mrl: how to repeat it, and whether it is
stale.
"""
