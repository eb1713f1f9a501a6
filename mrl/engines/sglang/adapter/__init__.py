"""LoRA adapters on a base model that never changes: `lora.rollout=adapter`, and tenants of a
service."""
