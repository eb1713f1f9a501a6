"""An agent with a shell: the policy writes commands, reads what they print, and says `Answer: ...`.

The reward is 1 for the right answer, and 0.2 for a command that prints it. Each episode has a folder
of its own with one file. Commands are run by the restricted shell, which knows only PROGRAMS; what a
policy may not do at all belongs into a container. See docs/endpoint.md.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress

BASH = shutil.which("bash")
PROGRAMS = ("cat", "head", "ls", "sort", "tail", "uniq", "wc")
COMMAND_S = 10
MAX_CHARS = 400
ANSWER = re.compile(r"Answer:\s*(\S+)")
BUILTINS = "enable -n kill exec eval source . trap suspend ulimit wait; "


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


def limits():
    resource.setrlimit(resource.RLIMIT_CPU, (COMMAND_S, COMMAND_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


def run(command, folder, programs):
    """Return what a command prints, shortened, for the policy to read."""
    process = subprocess.Popen(
        [BASH, "--norc", "--restricted", "-c", BUILTINS + command],
        cwd=folder,
        env={"PATH": programs, "HOME": folder, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=limits,  # noqa: PLW1509 - this program has one thread
    )
    try:
        printed, _ = process.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        printed = b"error: it took too long"
    finally:
        with suppress(ProcessLookupError):
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
