"""Property-driven tests that drive the real engine and the real service at their edges.

Each has a long form (`release`). What costs seconds and no engine start of its own runs in `make test`.
A case is a function of a printed seed, so that one that fails can be run again alone.
"""
