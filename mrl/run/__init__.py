"""The run folder, the files in it, the comparison of two runs, and the terminal."""
