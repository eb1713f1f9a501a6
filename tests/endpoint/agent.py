"""Agents of several kinds for tests: the row's `kind` says which one. They need only Python."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress


def ask(messages, **more):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, **more}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def talk(messages, turns, said="x"):
    for turn in range(turns):
        if turn:
            messages.append({"role": "user", "content": said})
        messages.append(ask(messages))
    return messages


def main():
    row = json.load(sys.stdin)
    kind, messages = row["kind"], row["prompt"]
    if kind == "dies":
        raise SystemExit("on purpose")
    if kind == "dies later":
        talk(messages, 1)
        os._exit(3)
    elif kind == "hangs":
        talk(messages, 1)
        time.sleep(600)
    elif kind == "silent":
        print(1)  # without a word of the policy
    elif kind == "too long at first":
        with suppress(urllib.error.HTTPError):
            ask([{"role": "user", "content": "x" * 1000}])
        print(0)
    elif kind == "too many turns":
        talk(messages, 100)
    elif kind == "too long":
        talk(messages, 100, "x" * 200)
    else:
        if kind == "forgets":
            talk([{"role": "user", "content": "something else"}], 1)
        messages = talk(messages, 1 if kind == "forgets" else row["turns"])
        print("nan" if kind == "lies" else len(messages[-1]["content"]))


if __name__ == "__main__":
    main()
