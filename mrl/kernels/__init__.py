"""Torch ops over the compiled module `mrl._C`, and their fp64 references in `oracle`.

Raises ImportError when `mrl._C` is not built: there is no slow path to fall back to unnoticed.
"""

import torch  # noqa: F401  (before mrl._C: both then share torch's libgomp)

try:
    import mrl._C  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"mrl._C, the compiled kernels, cannot be imported: run `make setup` to build it ({error})"
    ) from None

from mrl.kernels.policy_loss import PolicyLoss, RatioKind, policy_loss

__all__ = ["PolicyLoss", "RatioKind", "policy_loss"]
