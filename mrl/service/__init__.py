"""A service that trains many tenants on one base model. Each tenant has its own LoRA adapter,
recipe and run folder."""
