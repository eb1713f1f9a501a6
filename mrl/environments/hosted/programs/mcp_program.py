"""The worker of `environment.mcp`: the policy talks, and its tool calls are run on MCP servers.

`mcp_program.py` plays episodes (see episode_loop.py); `mcp_program.py tools` lists the servers' tools.
It is written for the package `mcp` 2.x.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from string import Template
from typing import Any

from episode_loop import BadInput, Episode, EpisodeFailed, Play, Played, describe, main
from tool_prompt import with_tools

START_S = 60.0
"""Seconds for a server to start and to list its tools."""
MAX_PAGES = 100
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def _mcp() -> Any:
    try:
        import mcp
    except ImportError:
        raise BadInput(
            f"mcp is not installed for {sys.executable}; pip install 'mrl[mcp]', or name the Python of "
            "an environment that has it as environment.python"
        ) from None
    version = importlib.metadata.version("mcp")
    if not version.startswith("2."):
        raise BadInput(f"mcp {version} is installed, expected 2.x")
    return mcp


class ServerGone(EpisodeFailed):
    """The server has ended, does not answer or cannot be reached."""


@dataclass
class Servers:
    """The connections to all servers, and their tools."""

    spec: dict[str, Any]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """All tools in OpenAI's form."""
    _where: dict[str, Any] = field(default_factory=dict)
    is_lost: bool = False

    async def call(self, name: str, arguments: Any) -> str:
        """Return what a tool answers, or why it cannot be called, as text. Raises ServerGone."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if name not in self._where:
            return f"error: there is no tool {name!r}; there are {', '.join(self._where)}"
        if not isinstance(arguments, dict):
            return "error: the arguments of a tool call must be a JSON object"
        limit_s = self.spec["call_limit_s"]
        try:
            async with asyncio.timeout(limit_s):
                result = await self._where[name].call_tool(name, arguments)
        except TimeoutError:
            self.is_lost = True
            raise ServerGone(
                f"the tool {name!r} gave no answer within environment.time_limit_s={limit_s:g} s"
            ) from None
        except MCPError as error:
            # The code alone is also one that servers choose for errors of their own.
            if error.code == CONNECTION_CLOSED and error.message == "Connection closed":
                self.is_lost = True
                raise ServerGone(f"the server is gone: {describe(error)}") from None
            return self._shortened(f"error: {error.message}")
        except Exception as error:
            self.is_lost = True
            raise ServerGone(f"the tool {name!r} cannot be called: {describe(error)}") from None
        return self._shortened(_text(result))

    def _shortened(self, text: str) -> str:
        most = self.spec["max_result_chars"]
        if len(text) <= most:
            return text
        half = (most - 60) // 2
        return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"

    def add(self, client: Any, tools: list[Any]) -> None:
        """Add the tools of a server. Raises BadInput if another server has one of the same name."""
        for tool in tools:
            if tool.name in self._where:
                raise BadInput(
                    f"two servers have a tool {tool.name!r}; choose the tools of one (mcp.tools), or "
                    "rename it"
                )
            self._where[tool.name] = client
            function = {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            self.tools.append({"type": "function", "function": function})


@asynccontextmanager
async def connected(spec: dict[str, Any]) -> AsyncIterator[Servers]:
    """Connect to all servers, and end the connections and the servers' processes afterwards.

    Raises ServerGone if a server cannot be started or reached, and BadInput if there are not the tools
    that were asked for.
    """
    servers = Servers(spec)
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(START_S):
                await _connect(servers, stack)
        except TimeoutError:
            raise ServerGone(f"the server did not start within {START_S:g} s") from None
        except (BadInput, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise ServerGone(
                f"the server cannot be started or reached: {describe(error)}"
            ) from None
        yield servers


async def _connect(servers: Servers, stack: AsyncExitStack) -> None:
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    spec, chosen = servers.spec, servers.spec["tools"]
    transports: list[Any] = []
    if spec["command"]:
        program, *words = spec["command"]
        # mrl finds by these variables what is left of a worker's processes, and kills it.
        marks = {k: v for k, v in os.environ.items() if k in ("MRL_AGENTS", "MRL_EPISODE")}
        server = StdioServerParameters(command=program, args=words, env={**spec["env"], **marks})
        transports.append(stdio_client(server))
    for url in spec["url"]:
        transports.append(await _http(url, spec["headers"], stack))
    for transport in transports:
        client = await stack.enter_async_context(Client(transport))
        tools = [each for each in await _listed(client) if chosen is None or each.name in chosen]
        servers.add(client, tools)
    found = [tool["function"]["name"] for tool in servers.tools]
    missing = [name for name in chosen or () if name not in found]
    if missing:
        raise BadInput(f"mcp.tools names {missing[0]!r}, but the servers have {', '.join(found)}")
    if not found:
        raise BadInput("the servers have no tools")


async def _http(url: str, headers: dict[str, str], stack: AsyncExitStack) -> Any:
    import httpx2
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    filled = {name: _filled(name, value) for name, value in headers.items()}
    # The limit of a call is kept by Servers.call.
    timeout = httpx2.Timeout(None, connect=10.0)
    client = await stack.enter_async_context(
        create_mcp_http_client(headers=filled or None, timeout=timeout)
    )
    return streamable_http_client(url, http_client=client)


def _filled(name: str, value: str) -> str:
    """Return the value of a header with its variables. No message may show it: it may be a key."""
    try:
        filled = Template(value).substitute(os.environ)
    except KeyError as error:
        raise BadInput(f"mcp.headers.{name}: there is no environment variable {error}") from None
    except ValueError:
        raise BadInput(f"mcp.headers.{name}: write $$ for a dollar sign") from None
    if not (filled.isascii() and filled.isprintable() and filled == filled.strip()):
        why = "with its variables, it has a line break or another character that HTTP forbids there"
        raise BadInput(f"mcp.headers.{name}: {why}; correct the variables")
    return filled


async def _listed(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _text(result: Any) -> str:
    """Return a tool's result as text. What is no text is named."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and getattr(block.resource, "text", None) is not None:
            parts.append(block.resource.text)
        else:
            parts.append(f"[{block.type} left out]")
    text = "\n".join(parts)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content)
    if result.is_error and not text:
        return "error: the tool failed without a message"
    return text


class Shared:
    """One connection for the episodes of a worker. It is made again after it was lost."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._current: asyncio.Future[Servers] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._done = asyncio.Event()

    async def get(self) -> Servers:
        current = self._current
        is_lost = current is not None and current.done() and (
            current.exception() is not None or current.result().is_lost
        )  # fmt: skip
        if current is None or is_lost:
            current = self._current = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._keep(current))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(current)

    async def _keep(self, into: asyncio.Future[Servers]) -> None:
        """Hold a connection open in one task, which its contexts need."""
        try:
            async with connected(self._spec) as servers:
                into.set_result(servers)
                while not (servers.is_lost or self._done.is_set()):
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._done.wait(), 1.0)
        except BaseException as error:
            if into.done():
                raise
            into.set_exception(error)

    async def close(self) -> None:
        self._done.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def open_servers(spec: dict[str, Any]) -> AsyncIterator[Play]:
    _mcp()
    import httpx2

    shared = Shared(spec)
    if not spec["per_episode"]:
        await shared.get()
    async with httpx2.AsyncClient(timeout=None, trust_env=False) as http:

        async def play(episode: Episode) -> Played:
            if not spec["per_episode"]:
                return Played(answer=await _talk(episode, spec, await shared.get(), http))
            async with connected(spec) as servers:
                return Played(answer=await _talk(episode, spec, servers, http))

        try:
            yield play
        finally:
            await shared.close()


async def _talk(episode: Episode, spec: dict[str, Any], servers: Servers, http: Any) -> str:
    """Let the policy talk until it calls no tool, or has used up its context or its turns. Return its
    last answer without tool calls."""
    is_shown = spec["show_tools"] == "template"
    messages = _beginning(episode.given["prompt"], spec["show_tools"], servers.tools)
    more = {"tools": servers.tools} if is_shown else {}
    answer = None
    while True:
        body = {"model": episode.model, "messages": messages, **more}
        reply = await http.post(
            f"{episode.base_url}/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {episode.key}"},
        )
        if reply.status_code != 200:
            why = reply.json()["error"]
            if answer is not None and why["code"] in ("context_length_exceeded", "max_turns"):
                return answer
            raise EpisodeFailed(f"the endpoint refused a request: {why['message']}")
        said = reply.json()["choices"][0]["message"]
        messages.append(said)
        answer, calls = _calls(said, is_parsed=is_shown)
        if not calls:
            return answer
        for name, arguments, call_id in calls:
            result = {"role": "tool", "content": await servers.call(name, arguments)}
            messages.append(result | ({"tool_call_id": call_id} if call_id else {}))


def _beginning(prompt: Any, show_tools: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return with_tools(messages, tools) if show_tools == "system" else messages


def _calls(said: dict[str, Any], *, is_parsed: bool) -> tuple[str, list[tuple[str, Any, str]]]:
    """Return the text of an answer without its tool calls, and the calls as name, arguments and id.

    `is_parsed`: the endpoint has found the calls; otherwise they are in the text.
    """
    text = said.get("content") or ""
    if is_parsed:
        functions = [(call["function"], call["id"]) for call in said.get("tool_calls") or ()]
        return text, [(f["name"], _loaded(f["arguments"]), name) for f, name in functions]
    found = []
    end = text.rfind("</tool_call>") + len("</tool_call>")  # behind it, a search could take long
    for block in TOOL_CALL.findall(text, 0, end):
        call = _loaded(block)
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            found.append((call["name"], call.get("arguments", {}), ""))
    return (TOOL_CALL.sub("", text[:end]) + text[end:]).strip() if found else text, found


def _loaded(text: str) -> Any:
    try:  # half of a surrogate pair, which no server could read, raises UnicodeEncodeError
        return json.loads(json.dumps(json.loads(text or "{}"), ensure_ascii=False).encode())
    except (ValueError, RecursionError):
        return None


def tools(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tools of all servers."""
    _mcp()

    async def listed() -> list[dict[str, Any]]:
        async with connected(spec) as servers:
            return servers.tools

    for tool in asyncio.run(listed()):
        yield {"tool": tool}


if __name__ == "__main__":
    main(open_servers, {"tools": tools})
