"""The branch `megatron:` of a recipe: which fields it may set, and what they ask of each other."""
