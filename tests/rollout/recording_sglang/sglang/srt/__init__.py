"""See sglang/launch_server.py of this folder."""
