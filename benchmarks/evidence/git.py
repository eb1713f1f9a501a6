"""Asks Git about the checkout that this repository's files lie in."""

from __future__ import annotations

import subprocess

from benchmarks.evidence.digest import ROOT


def git(*arguments: str, given: bytes = b"") -> bytes | None:
    """Return what Git prints for the input `given`; None where it fails or there is no Git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, input=given, capture_output=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
