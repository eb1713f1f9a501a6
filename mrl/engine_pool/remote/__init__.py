"""This room runs engines on separate ranks: some ranks of the run train, others only lead
engines."""
