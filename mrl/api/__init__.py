"""What `import mrl` offers: train and evaluate in this process, as often as you like.

docs/python.md shows a sweep, a loop with callbacks, and how to read a run. `mrl/__init__.py` finds each
name when it is first used: a recipe is read without torch.
"""
