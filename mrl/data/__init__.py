"""Prompt files: strict readers and a resumable cursor."""

from mrl.data.cursor import PromptCursor
from mrl.data.reader import Demonstration, read_demonstrations, read_prompts, read_rows

__all__ = ["Demonstration", "PromptCursor", "read_demonstrations", "read_prompts", "read_rows"]
