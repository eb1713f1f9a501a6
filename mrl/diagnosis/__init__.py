"""What trainer and engine make of the same tokens: measured every step, kept on file, explained."""
