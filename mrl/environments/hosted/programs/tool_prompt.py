"""The system message that describes tools to a policy whose chat template does not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

SYSTEM = """# Tools

You may call one or more functions to assist with the user query. They are:
<tools>
{tools}
</tools>

For each function call, return a JSON object with the function's name and its arguments within
<tool_call></tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages whose system message describes `tools`, after what it already says."""
    shown = SYSTEM.format(tools="\n".join(json.dumps(tool) for tool in tools))
    rest = list(messages)
    if rest and rest[0]["role"] == "system":
        shown = f"{rest.pop(0)['content']}\n\n{shown}"
    return [{"role": "system", "content": shown}, *rest]
