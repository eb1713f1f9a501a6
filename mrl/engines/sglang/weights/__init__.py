"""Weight updates of a server, and the ways in which buckets of weights reach it."""
