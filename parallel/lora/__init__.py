"""LoRA in Megatron: an adapter's parameters, the layers that use them, and their initial values."""
