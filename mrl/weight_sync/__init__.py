"""Transport of weights from the trainer to an engine, and the canaries that verify the result."""
