"""What `KnownPrefixes` remembers of the requests of a version."""

import torch

from mrl.engines.sglang.prefixes import KnownPrefixes


def test_nothing_remains_of_a_request_that_did_not_run_under_a_version():
    known = KnownPrefixes()
    for number in range(3):
        known.add(8, f"{number}", torch.tensor([1, 2]))
        known.finish(8, f"{number}", torch.tensor([1, 2, 3]), 0)
        known.discard(8, f"{number}")
    assert not any(vars(known._versions[8]).values())
