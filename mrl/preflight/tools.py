"""Check that the servers of `environment.mcp` list their tools, that prompts show these to the policy,
and that the prompts leave room for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mrl.config import Recipe
from mrl.data.template import PromptEncoder
from mrl.environments.hosted.programs.tool_prompt import with_tools
from mrl.environments.hosted.spec import listed_tools
from mrl.errors import InputError
from mrl.types import Prompt


def check_tools(
    recipe: Recipe, prompts: Sequence[Prompt], tokenizer: Any, context_len: int
) -> None:
    """Start the servers of `environment.mcp`, list their tools, and check them against the prompts.

    Nothing is checked for other recipes, or if rollouts are loaded instead of generated. Raises
    InputError if a server cannot be started or reached, if it has no tools, if the chat template does
    not show tools although it should, or if the longest prompt with the tools and the longest answer
    does not fit into the context.
    """
    environment = recipe.environment
    if environment is None or environment.mcp is None or recipe.debug.load_rollouts is not None:
        return
    for prompt in prompts:
        if prompt.columns.get("tools"):
            raise InputError(
                f"{prompt.source}: the row has a column `tools`, but the servers of environment.mcp "
                "give the tools; leave it out (data.columns: {tools: null})"
            )
    tools = listed_tools(environment)
    shown = environment.mcp.show_tools
    encoder = PromptEncoder(tokenizer, recipe.data.chat_template_kwargs)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    content = longest.content
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if shown == "system":
        ids = encoder.prompt(with_tools(messages, tools), None, longest.source)
    elif shown == "never":
        ids = encoder.prompt(messages, None, longest.source)
    else:
        ids = encoder.prompt(messages, tools, longest.source)
        if ids == encoder.prompt(messages, None, longest.source):
            raise InputError(
                "environment.mcp: the chat template of this model does not show tools; set "
                "environment.mcp.show_tools=system, or =never if the prompts describe the tools"
            )
    room = context_len - recipe.rollout.max_response_len
    if len(ids) > room:
        size = len(json.dumps(tools))
        raise InputError(
            f"{longest.source}: the prompt has {len(ids)} tokens with the {len(tools)} tools of "
            f"environment.mcp ({size} characters), at most {room} fit (context {context_len} - "
            f"response {recipe.rollout.max_response_len}); choose fewer tools (environment.mcp.tools), "
            "or a larger rollout.context_len"
        )
