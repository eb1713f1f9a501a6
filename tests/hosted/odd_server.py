"""An MCP server whose tools do what their names say: `python odd_server.py [PORT]`."""

import os
import subprocess
import sys
import time

import mcp_types as types
from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("odd")
calls = []


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def counts() -> str:
    """Say how often this was called."""
    calls.append(1)
    return str(len(calls))


@server.tool()
def fails() -> str:
    """Fail."""
    raise ToolError("on purpose")


@server.tool()
def refuses() -> str:
    """Answer with an error of the protocol, whose code the SDK also has for closed connections."""
    raise MCPError(code=-32000, message="not today")


@server.tool()
def dies() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def hangs() -> str:
    """Never answer."""
    time.sleep(600)
    return ""


@server.tool()
def huge() -> str:
    """Say much."""
    return "begin" + "x" * 3_000_000 + "end"


@server.tool()
def nothing() -> None:
    """Say nothing."""


@server.tool()
def image() -> types.ImageContent:
    """Return an image."""
    return types.ImageContent(type="image", data="AAAA", mime_type="image/png")


@server.tool()
def variable() -> str:
    """Say what is in the environment variable ODD, and whether there is a key of the endpoint."""
    return f"{os.environ.get('ODD')} {'OPENAI_API_KEY' in os.environ}"


if __name__ == "__main__":
    if sys.argv[1:] == ["stays"]:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        server.run()
        time.sleep(600)
    elif len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
