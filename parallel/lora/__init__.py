"""LoRA in Megatron: which parameters there are, the layers that use them, and how they begin."""
