"""Names of dtypes. A recipe may contain short names (`bf16`); config.yaml contains the long names
(`bfloat16`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

LONG_NAMES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
}
HALF = ("fp16", "half", "float16", "torch.float16")
"""Names of float16, in which mrl cannot train."""


def long_name(value: Any) -> Any:
    """Return the long name of a dtype, and any other value unchanged. Raises PydanticCustomError
    for float16, with the reason."""
    if value in HALF:
        raise PydanticCustomError(
            "no_float16",
            "float16 gradients underflow without dynamic loss scaling, which mrl's optimizer and "
            "checkpoints do not have; use bfloat16 (bf16) or float32 (fp32)",
        )
    return LONG_NAMES.get(value, value) if isinstance(value, str) else value


Dtype = Annotated[Literal["auto", "float32", "bfloat16"], BeforeValidator(long_name)]
"""The dtype of weights; with `auto` the device decides."""
