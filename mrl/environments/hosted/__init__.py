"""Episodes of environments from elsewhere: verifiers and MCP servers.

Unlike agents that are programs, many episodes share a worker process, which lives as long as the run,
because importing these packages takes seconds. A worker talks to the policy at the endpoint, as agents
do. `programs/` has what runs in the workers; it imports nothing of mrl, because a worker may have a
Python environment of its own.
"""
