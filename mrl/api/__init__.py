"""The functions of `import mrl`: train and evaluate in this process, any number of times.

docs/python.md shows a sweep, a loop with callbacks, and how to read a run. `mrl/__init__.py` imports
each name at its first use, so that a recipe can be read without importing torch.
"""
