"""Reads prompt files: strict readers and a resumable cursor."""

from mrl.data.cursor import PromptCursor
from mrl.data.reader import SftExample, read_prompts, read_rows, read_sft_examples

__all__ = ["PromptCursor", "SftExample", "read_prompts", "read_rows", "read_sft_examples"]
