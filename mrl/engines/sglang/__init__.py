"""This engine is a real SGLang server in a child process. `engine.py` is where to start."""
