"""This package holds the parts of `make lora`: an adapter beside the training of all weights."""
