"""A harness for verifiers 0.4: a conversation with tools, in the process of the worker.

verifiers' own `null` and `bash` harnesses do the same in a program of their own, which each episode
starts with `uv`; that takes seconds, and an installation of packages.
"""

from __future__ import annotations

import functools
import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["MrlChat"]

FULL = ("context_length_exceeded", "max_turns")
"""What the endpoint says when a conversation has used up its context or its turns. That ends the
episode and is no failure: it is scored as it is."""


@functools.cache
def _http() -> httpx.AsyncClient:
    """The HTTP client of all episodes; one of its own would cost an episode more than its turns. It
    keeps no connections, because each episode has a server of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=None, limits=limits)


class MrlChatConfig(vf.HarnessConfig):
    pass


class MrlChat(vf.Harness[MrlChatConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Let the policy answer, and run its tool calls, until it answers without one."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        config = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with AsyncExitStack() as stack:
            client = openai.AsyncOpenAI(
                base_url=endpoint, api_key=secret, max_retries=0, http_client=_http()
            )
            tools, where, servers = await connect_mcp(config, stack)
            try:
                await self._talk(client, ctx.model, messages, tools, where, servers)
            except openai.APIStatusError as error:
                if not any(each in f"{error} {error.body}" for each in FULL):
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _talk(
        self,
        client: openai.AsyncOpenAI,
        model: str,
        messages: list[Any],
        tools: list[Any],
        where: dict[str, tuple[str, str]],
        servers: dict[str, Any],
    ) -> None:
        more: dict[str, Any] = {"tools": tools} if tools else {}
        while True:
            answer = await client.chat.completions.create(model=model, messages=messages, **more)
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return
            for call in said.tool_calls:
                result = await _result(call, where, servers)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def _result(call: Any, where: dict[str, tuple[str, str]], servers: dict[str, Any]) -> Any:
    name = call.function.name
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return "error: the arguments of a tool call must be a JSON object"
    if name not in where:
        return f"error: there is no tool {name!r}"
    return await call_mcp(servers, where, name, arguments)
