"""The SGLang engine: a real SGLang server in a child process. `engine.py` is where to start."""
