"""The text of what was generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.types import SampleGroup


def completions(groups: Sequence[SampleGroup], tokenizer: Any) -> list[list[str]]:
    """The text of every sample's response, without special tokens."""
    return [
        [
            tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True)
            for sample in g.samples
        ]
        for g in groups
    ]
