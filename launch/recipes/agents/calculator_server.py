"""A calculator as an MCP server. See docs/environments_elsewhere.md.

`python calculator_server.py` speaks over standard input and output, as `environment.mcp.command` needs
it; with `--port N`, it is at `http://127.0.0.1:N/mcp`.
"""

import argparse
import operator

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("calculator")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@server.tool()
def calculate(a: int, op: str, b: int) -> str:
    """Compute a op b, where op is one of + - *."""
    if op not in OPERATIONS:
        raise ToolError(f"op is {op!r}, expected one of {' '.join(OPERATIONS)}")
    return str(OPERATIONS[op](a, b))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    port = parser.parse_args().port
    if port is None:
        server.run()
    else:
        server.run("streamable-http", port=port)
