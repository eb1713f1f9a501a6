"""mrl: Megatron-core trains, SGLang rolls out, routes are replayed (R3)."""

__version__ = "0.1.0"
