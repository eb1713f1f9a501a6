"""The run folder and its files, the comparison of two runs, and the terminal output."""
