"""This package holds the parts of `python -m studies.collapse`."""
