"""Weight updates of a server, and the methods that transfer buckets of weights to it."""
