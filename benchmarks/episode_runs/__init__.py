"""Runs of `mrl train` whose samples are episodes, for benchmarks.episodes and benchmarks.agent_runs."""
