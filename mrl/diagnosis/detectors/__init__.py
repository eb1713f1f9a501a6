"""Find the causes of a mismatch with detectors, one per file.

A detector is a pure function `detect(tokens: LossTokens) -> Finding | None`. A detector reports its
fault only if no other fault would look the same. router.py and extremes.py do not report faults but
describe the mismatch, because in every mismatch some tokens are the worst and some routers choose
differently.
"""
