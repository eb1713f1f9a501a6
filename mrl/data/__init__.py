"""Reads prompts from many file formats, and iterates over them with a cursor whose position can be
saved and resumed."""

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
