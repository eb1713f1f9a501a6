"""A request that the endpoint refuses."""

from __future__ import annotations


class Refused(Exception):
    """The endpoint refuses a request, with an HTTP status and a reason in one line."""

    def __init__(self, status: int, why: str, code: str | None = None) -> None:
        """`code` is OpenAI's name of the reason, if it has one."""
        super().__init__(why)
        self.status, self.code = status, code


class NotSent(Refused):
    """The engine refuses requests before any is sent."""

    def __init__(self, why: str) -> None:
        super().__init__(400, why)


def too_long(num_tokens: int, context_len: int) -> Refused:
    """Return the refusal of a prompt that leaves no room for an answer, in the words of OpenAI's API,
    by which agents recognise it."""
    return Refused(
        400,
        f"This model's maximum context length is {context_len} tokens (rollout.context_len). However, "
        f"your messages resulted in {num_tokens} tokens, which leaves no room for an answer. Please "
        "reduce the length of the messages.",
        "context_length_exceeded",
    )
