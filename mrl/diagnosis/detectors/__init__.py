"""Find the causes of a mismatch with detectors, one per file.

A detector is a pure function `detect(tokens: LossTokens) -> Finding | None`. A detector for a fault
reports the fault only if no other known fault would produce the same pattern. The findings of
router.py and extremes.py are never faults. They only describe the mismatch, because some routers
choose differently and some tokens are the worst in every mismatch.
"""
