"""An agent of one file: it plays guess_letter over HTTP, and prints its reward. See docs/endpoint.md.

    python guess_agent.py [TURNS] [LETTERS]

It needs only Python. With the openai package, `ask` is
`openai.OpenAI().chat.completions.create(model="policy", messages=messages).choices[0].message`.
"""

import json
import os
import random
import sys
import urllib.request


def ask(messages):
    """Return the policy's answer to a conversation, as a message."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def main(turns="3", letters="abcdefgh"):
    row = json.load(sys.stdin)  # the row of the data, and a seed that all samples of a prompt share
    letter = random.Random(row["seed"]).choice(letters)
    messages, reward = row["prompt"], 0.0
    for turn in range(int(turns)):
        if turn:
            messages.append({"role": "user", "content": letter * 4})
        messages.append(ask(messages))
        guess = messages[-1]["content"]
        reward += guess.count(letter) / len(guess) / int(turns) if guess else 0.0
    print(reward)


if __name__ == "__main__":
    main(*sys.argv[1:])
