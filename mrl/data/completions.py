"""Decodes the responses of sample groups to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.types import Sample, SampleGroup


def completions(groups: Sequence[SampleGroup], tokenizer: Any) -> list[list[str]]:
    """Return the text of every sample's response, without special tokens, as one list per group.
    The texts are stored in `SampleGroup.texts`, and later calls return the stored texts.

    If a sample is a conversation of several turns, its text is everything after the prompt,
    including the special tokens that mark turns.
    """
    for group in groups:
        if group.texts is None:
            group.texts = [_text(sample, tokenizer) for sample in group.samples]
    return [list(group.texts or []) for group in groups]


def _text(sample: Sample, tokenizer: Any) -> str:
    ids = sample.response_ids.tolist()
    is_conversation = sample.num_generated < len(ids)
    return tokenizer.decode(ids, skip_special_tokens=not is_conversation)
