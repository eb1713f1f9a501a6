"""`make smollm`: a pretrained language model, trained on this machine (docs/smollm.md)."""
