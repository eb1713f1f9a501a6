"""What a user can try of docs/security.md: who is answered, what runs, and who can read what."""

from __future__ import annotations

import http.client
import json
import os
import pickle
import re
import shutil
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from mrl.rewards.remote import TOKEN_VARIABLE
from parallel.checkpoint import manifest
from tests.engine_starts import REAL
from tests.loop.forked import Command
from tests.users.things import User, thing

LIMIT_S = 120.0
SECRET = "6f" * 32
BODY = json.dumps({"prompts": ["a"], "completions": ["aa"]}).encode()


def printed_by(command: Command) -> str:
    files = [command.folder / name for name in ("stdout", "stderr")]
    return "".join(file.read_text() for file in files if file.exists())


def address_of(command: Command) -> tuple[str, int]:
    """Return where a reward server listens, once it says so."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and command.poll() is None:
        if found := re.search(r"http://([\w.-]+):(\d+)", printed_by(command)):
            return found[1], int(found[2])
        time.sleep(0.02)
    raise AssertionError(printed_by(command))


def ask(address: tuple[str, int], method: str, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*address, timeout=LIMIT_S)
    try:
        connection.request(method, "/", BODY if method == "POST" else None, headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def interrupted(command: Command) -> None:
    command.send_signal(signal.SIGINT)
    command.wait(LIMIT_S)


@thing(
    "I serve a reward, and a web page, and a name that a page's owner has given to my machine, ask it."
)
def reward_server_and_pages(user: User) -> str:
    command = user.start("reward", "serve", "first_char", "--port", "0")
    try:
        address = address_of(command)
        assert address[0] == "127.0.0.1"
        assert ask(address, "GET", {})[0] == 200
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
            for method in ("GET", "POST"):
                status, said = ask(address, method, headers)
                assert status == 403, said
    finally:
        interrupted(command)
    return said


@thing("I serve a reward for other machines, first without a token and then with one.")
def reward_server_for_others(user: User) -> str:
    one = "def score(prompts, completions, **columns):\n    return [1.0] * len(completions)\n"
    reward = f"{user.write('one.py', one)}:score"
    words = ("reward", "serve", reward, "--port", "0", "--host", "0.0.0.0")
    refused = user.mrl(*words, code=2).strip()
    assert refused.startswith("mrl: address '0.0.0.0' is open to other machines, so callers need")
    assert f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32)" in refused
    assert "\n" not in refused
    command = user.start(*words, **{TOKEN_VARIABLE: SECRET})
    try:
        address = ("127.0.0.1", address_of(command)[1])
        for given in ("", "Bearer", f"Bearer {SECRET[:-1]}", f"Bearer {SECRET}0", SECRET):
            for method in ("GET", "POST"):
                status, said = ask(address, method, {"Authorization": given})
                assert status == 401, (given, said)
        status, said = ask(address, "POST", {"Authorization": f"Bearer {SECRET}"})
        assert status == 200, said
        assert json.loads(said)["rewards"] == [1.0]
        data = user.write("d.jsonl", '{"prompt": "a"}\n')
        told = user.mrl("reward", "test", f"http://127.0.0.1:{address[1]}", data, code=1)
        assert "HTTP 401" in told
        assert f"set {TOKEN_VARIABLE} where the run starts" in told
    finally:
        interrupted(command)
    assert SECRET not in printed_by(command)
    return f"{refused}; with one, the right token alone is answered"


class Touches:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._file),)


@thing("My model folder has pickled weights, or brings code of its own (auto_map).", is_long=False)
def pickled_weights_and_code(user: User) -> str:
    ran = user.folder / "ran"
    pickled = Path(shutil.copytree(user.toy.model, user.folder / "pickled"))
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Touches(ran)))
    said = user.mrl("check", *user.recipe("run", f"model.path={pickled}"), code=2)
    assert "has no *.safetensors weights" in said
    coded = Path(shutil.copytree(user.toy.model, user.folder / "coded"))
    config = json.loads((coded / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_evil.C",
        "AutoModelForCausalLM": "modeling_evil.M",
    }
    (coded / "config.json").write_text(json.dumps(config))
    (coded / "modeling_evil.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    user.mrl("check", *user.recipe("run", f"model.path={coded}"))
    assert not ran.exists()
    return said.strip()


@thing("A stranger's checkpoint has a pickle that runs code, with digests that fit.")
def planted_pickle(user: User) -> str:
    user.train("run", "train.num_steps=1", "checkpoint.save_every=1")
    ran, folder = user.folder / "ran", user.folder / "run/checkpoints/iter_0000001"
    said = ""
    for name in (".metadata", "common.pt"):
        whole = (folder / name).read_bytes()
        if name == ".metadata":
            (folder / name).write_bytes(pickle.dumps(Touches(ran)))
        else:
            torch.save({"x": Touches(ran)}, folder / name)
        sign(folder)
        for words in (("train", "run", "train.num_steps=2"), ("export", "run", "out")):
            printed = user.mrl(*words, code=2)
            assert "Traceback" not in printed
            (said,) = [line for line in printed.splitlines() if line.startswith("mrl: ")]
            assert f"iter_0000001/{name}" in said
            assert "would run posix.mkdir when it is read" in said
        (folder / name).write_bytes(whole)
        sign(folder)
    assert not ran.exists()
    user.mrl("train", "run", "train.num_steps=2")  # it was for the pickle that it was refused
    return said


def sign(folder: Path) -> None:
    """Make the digests of a checkpoint fit its files, as whoever writes one can."""
    content = json.loads((folder / "manifest.json").read_text())
    files = {name: manifest.record(folder / name) for name in content["files"]}
    manifest.write_manifest(folder, content, files)
    assert manifest.damage(folder) is None


@thing("While I train, others of my machine look at my engine's ports, sockets and folders.")
def what_others_reach(user: User) -> str:
    steps = ("train.num_steps=200", "checkpoint.save_every=0")
    command = user.start("train", *user.recipe("run", *steps), **{REAL: "1"})
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (user.folder / "run/metrics.jsonl").exists():
            assert command.poll() is None, printed_by(command)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        tree = psutil.Process(command.pid).children(recursive=True)
        (server, *_) = [each for each in tree if "mrl.engines.sglang.child" in words_of(each)]
        folder = Path(server.environ()["TMPDIR"])
        assert folder.name.startswith("mrl-sglang-")
        assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.getuid())
        ports, named = set(), set()
        for each in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                ports |= {c.laddr for c in each.net_connections("inet") if c.status == "LISTEN"}
                named |= {str(c.laddr) for c in each.net_connections("unix") if c.laddr}
        assert ports
        assert {port.ip for port in ports} == {"127.0.0.1"}
        named = {name for name in named if name.startswith("/")}
        assert [name for name in named if not Path(name).is_relative_to(folder)] == []
    finally:
        interrupted(command)
    assert not folder.exists()
    return (
        f"{len(ports)} ports, all on 127.0.0.1, and {len(named)} sockets with a name, all in a folder "
        "with mode 0700; after Ctrl-C it is gone"
    )


def words_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


@thing("A completion holds markup and terminal codes, and I look at it with mrl view.")
def what_the_model_writes(user: User) -> str:
    user.train("run", "train.num_steps=1")
    (file,) = (user.folder / "run/rollouts").glob("step_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        for key in ("completion", "response", "text"):
            if key in row:
                row[key] = "<script>alert(1)</script>\x1b[2J"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = user.mrl("view", "run")
    pages = list(user.folder.rglob("*.html"))
    for text in (printed, *(page.read_text() for page in pages)):
        assert "<script>alert(1)" not in text
        assert "\x1b[2J" not in text
    assert pages
    return "the page and the terminal show the text, and obey none of it"
