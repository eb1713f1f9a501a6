"""An agent with a shell: the policy writes commands, reads what they print, and says `Answer: ...`.

The reward is 1 for the right answer, and 0.2 for a command that prints it. Each episode has a folder
of its own with one file. Commands are run by bash as a restricted shell, which knows only PROGRAMS.
They can still read the files of the user: put the agent into a container for more than that. See
docs/endpoint.md.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

BASH = shutil.which("bash")
PROGRAMS = ("cat", "head", "ls", "sort", "tail", "uniq", "wc")
COMMAND_S = 10
MAX_CHARS = 400
ANSWER = re.compile(r"Answer:\s*(\S+)")
BEFORE = "ulimit -t 10 -f 1024 -v 1000000; enable -n kill exec eval source . trap suspend ulimit; "
"""What is run before a command: limits of CPU, files and memory, and builtins that it has not."""


def ask(messages):
    """Return the policy's answer as a message; None if the context or the turns are used up."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        if json.load(error)["error"]["code"] in ("context_length_exceeded", "max_turns"):
            return None
        raise


def run(command, folder, programs):
    """Return what a command prints, shortened, for the policy to read."""
    process = subprocess.Popen(
        [BASH, "--norc", "--restricted", "-c", BEFORE + command],
        cwd=folder,
        env={"PATH": programs, "HOME": folder, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        printed = b"error: it took too long"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = printed.decode(errors="replace").strip()
    return text[:MAX_CHARS] or "(it printed nothing)"


def main():
    row = json.load(sys.stdin)
    right = str(len(row["text"].split()))
    messages, seen, answer = row["prompt"], False, None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as programs:
        for name in PROGRAMS:
            os.symlink(shutil.which(name), os.path.join(programs, name))
        with open(os.path.join(folder, row["file"]), "w") as file:
            file.write(row["text"] + "\n")
        while answer is None:
            said = ask(messages)
            if said is None:
                break
            messages.append(said)
            found = ANSWER.search(said["content"])
            if found:
                answer = found.group(1).strip(".")
                break
            printed = run(said["content"].strip(), folder, programs)
            seen = seen or right in printed.split()
            messages.append({"role": "user", "content": printed})
    print(1.0 if answer == right else 0.2 if seen else 0.0)


if __name__ == "__main__":
    main()
