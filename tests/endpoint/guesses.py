"""guess_letter as an agent: `python guesses.py FORM`, where FORM is how it asks the policy.

`chat` and `text` need only Python; `openai` is the package of that name, and `stream` its streams.
"""

import json
import os
import random
import sys
import urllib.error
import urllib.request

TURNS, LETTERS, REPEATS = 3, "abcdefgh", 4


def post(path, body):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps({"model": "policy", **body}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]


def ask_chat(messages):
    return post("/chat/completions", {"messages": messages})["message"]


def ask_openai(messages):
    import openai

    client = openai.OpenAI(max_retries=0)
    return client.chat.completions.create(model="policy", messages=messages).choices[0].message


def ask_stream(messages):
    import openai

    client = openai.OpenAI(max_retries=0)
    stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    return {"role": "assistant", "content": "".join(parts)}


def main(form):
    row = json.load(sys.stdin)
    letter = random.Random(row["seed"]).choice(LETTERS)
    answer, reward, talk = letter * REPEATS, 0.0, row["prompt"]
    for turn in range(TURNS):
        try:
            if form == "text":
                said = post("/completions", {"prompt": talk})["text"]
                talk += said + answer
            else:
                message = globals()[f"ask_{form}"](talk)
                said = message["content"] if isinstance(message, dict) else message.content
                talk += [message, {"role": "user", "content": answer}]
        except (
            Exception
        ) as error:  # the context is full: what there is counts, as in the environment
            if not turn or "context_length_exceeded" not in text_of(error):
                raise
            break
        reward += said.count(letter) / len(said) / TURNS if said else 0.0
    print(reward)


def text_of(error):
    return error.read().decode() if isinstance(error, urllib.error.HTTPError) else str(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
