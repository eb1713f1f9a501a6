"""The parts of the SGLang engine: its process, its HTTP client, its weight payloads, its answers."""
