"""SmolLM2-135M-Instruct, a pretrained language model, trained on this machine."""
