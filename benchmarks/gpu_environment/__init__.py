"""Installs what docs/install.md tells a GPU user to install, and runs mrl with it on a CPU: `make
gpu-stack`.
"""
