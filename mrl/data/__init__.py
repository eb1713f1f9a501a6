"""Reads prompts from many file formats, with a resumable cursor over one source or a mixture."""

from mrl.data.cursor import PromptCursor
from mrl.data.reader import (
    SftExample,
    Source,
    read_prompts,
    read_sft_examples,
    read_sources,
)

__all__ = [
    "PromptCursor",
    "SftExample",
    "Source",
    "read_prompts",
    "read_sft_examples",
    "read_sources",
]
