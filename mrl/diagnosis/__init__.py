"""What trainer and engine make of the same tokens is measured every step, kept on file, explained."""
