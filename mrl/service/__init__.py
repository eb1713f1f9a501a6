"""Many tenants on one base model: each has a LoRA adapter, a recipe and a run folder of its own."""
