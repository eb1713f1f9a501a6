"""Routing traces: decode, compact form, alignment to micro-batches, replay, statistics."""
