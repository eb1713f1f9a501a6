"""An engine that serves a LoRA adapter beside a base that never changes: `lora.rollout=adapter`."""
