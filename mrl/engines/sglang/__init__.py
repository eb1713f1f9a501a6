"""This engine is a real SGLang server in a child process. Start reading at `engine.py`."""
