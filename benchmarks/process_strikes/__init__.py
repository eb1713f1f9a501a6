"""The parts of `make process-table`: names of processes, phases, strikes, and the jobs they strike."""
