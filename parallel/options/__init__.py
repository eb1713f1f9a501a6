"""The `megatron:` section of a recipe: the fields that it may set, and what these fields require."""
