"""Configuration of MCP servers, whose tools the policy may call in its episodes."""

from __future__ import annotations

import shlex
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mrl.config.branch import Branch, as_words


class McpConfig(Branch):
    command: tuple[str, ...] = ()
    """A server as a program and its arguments, which speaks MCP over its standard input and output.
    `python` is the Python that runs the worker (`environment.python`)."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of `command`. It also gets PATH, HOME and the like, and no others."""
    url: tuple[str, ...] = ()
    """The address of a server that speaks MCP over HTTP (`http://127.0.0.1:8000/mcp`), or a list of
    addresses. The tools of all servers are given to the policy."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers for `url`. `$NAME` in a value is the environment variable NAME."""
    per_episode: bool = True
    """Give each episode a server process of its own (`command`) or a session of its own (`url`), so
    that no episode sees what another has done. If false, the episodes of a worker share one, which
    saves the start of a process in each episode."""
    tools: tuple[str, ...] | None = None
    """The tools that the policy may call; null takes all that the servers have."""
    show_tools: Literal["template", "system", "never"] = "template"
    """How the policy learns of the tools. `template`: the chat template renders them. `system`: they
    are written into the system message, for chat templates that have no place for tools. `never`: the
    prompts of the data describe them."""
    max_result_chars: int = Field(default=8000, ge=100)
    """Longest result of a tool, in characters, that the policy reads. Of a longer one it reads the
    beginning and the end."""

    @field_validator("command", "url", mode="before")
    @classmethod
    def _as_words(cls, value: Any) -> Any:
        return as_words(value)

    @model_validator(mode="after")
    def _has_server(self) -> McpConfig:
        if not self.command and not self.url:
            raise ValueError("give a server: its `command`, its `url`, or both")
        wrong = [url for url in self.url if not url.startswith(("http://", "https://"))]
        if wrong:
            raise ValueError(
                f"url {wrong[0]!r}: expected an address that begins with http:// or https://"
            )
        if self.headers and not self.url:
            raise ValueError("headers are for a `url`; give a `command` its variables as `env`")
        if self.env and not self.command:
            raise ValueError("env is for a `command`; give a `url` its `headers`")
        return self

    @property
    def label(self) -> str:
        """The servers in a few words, for messages."""
        command = [shlex.join(self.command)] if self.command else []
        return repr(", ".join([*command, *self.url]))
