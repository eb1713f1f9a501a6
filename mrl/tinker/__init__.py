"""The Tinker API of a service: a second way, beside the control socket, to create sessions and to post
their operations. Stock clients of the Tinker SDK speak it (docs/tinker.md)."""
