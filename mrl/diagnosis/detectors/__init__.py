"""Each detector is a file: a pure function `detect(tokens: LossTokens) -> Finding | None`.

A detector names its fault only where that fault alone would look like this; what every mismatch shows
(worst tokens, differing routers) is for router.py and extremes.py.
"""
