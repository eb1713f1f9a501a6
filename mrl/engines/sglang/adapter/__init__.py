"""LoRA adapters on a base model that never changes, for `lora.rollout=adapter` and for the tenants of
a service."""
