"""An agent with a tool, by the openai package: it answers a sum, and may use a calculator for it.

The reward is 1 if its last answer is the row's `answer`. See docs/endpoint.md.
"""

import json
import operator
import sys

import openai

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute a op b, where op is one of + - *.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "op": {"type": "string"},
                "b": {"type": "integer"},
            },
            "required": ["a", "op", "b"],
        },
    },
}


def calculate(arguments):
    """Return the result, or what is wrong with the arguments, for the policy to read."""
    try:
        given = json.loads(arguments)
        return str(OPERATIONS[given["op"]](int(given["a"]), int(given["b"])))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {type(error).__name__}: {error}"


def main():
    row = json.load(sys.stdin)
    client = openai.OpenAI(max_retries=0)  # address and key are in the environment
    messages, said = row["prompt"], None
    while said is None or said.tool_calls:
        try:
            answer = client.chat.completions.create(
                model="policy", messages=messages, tools=[CALCULATE]
            )
        except openai.APIStatusError as error:
            if said is not None and error.code in ("context_length_exceeded", "max_turns"):
                break  # what there is counts
            raise
        said = answer.choices[0].message
        messages.append(said)
        for call in said.tool_calls or ():
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(float((said.content or "").strip() == row["answer"]))


if __name__ == "__main__":
    main()
