"""HTTP for the service, the Tinker API and the reward server: limits, errors, OpenAPI."""
