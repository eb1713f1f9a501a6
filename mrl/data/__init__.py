"""Reads prompts from many file formats, and iterates over them with a cursor whose position can be
saved and resumed."""
