"""The runs that `benchmarks.peers` compares, each in a process of its own."""
