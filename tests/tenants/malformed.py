"""Requests that are none, of every kind that comes to mind, from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

PATHS = (
    "/", "//", "/tenant", "/tenants/", "/tenants//", "/tenants/..", "/tenants/../tenants",
    "/tenants/%2e%2e", "/tenants/..%2f..%2fetc/passwd", "/tenants/a%00", "/tenants/A",
    "/tenants/-a", "/tenants/.removed", "/tenants/a/../../x", "/tenants/a/pause/", "/tenants/a/x",
    "/tenants?watch=1", "/tenants/a?watch=1", "/tenants#a", "/tenants;a", "/metrics/x", "/Metrics",
    "/tenants/a/operations/", "/tenants/a/operations/x/y", "/tenants/a/operations/1-1",
    "/tenants/" + "a" * 64, "/tenants/\\..\\", "/" + "x" * 900, "/tenants/a/pause?x", "/proc/self",
)  # fmt: skip
TARGETS = ("*", "http://localhost/tenants", "tenants", "", "/ten ants", "/\xe4", "/" + "x" * 2000)
BODIES: tuple[Any, ...] = (
    None, True, 3, -1.5, "text", [], [[]], [{}], {}, {"name": "a"}, {"recipe": {}},
    {"name": None, "recipe": None}, {"name": 1, "recipe": 1}, {"name": ["a"], "recipe": {}},
    {"name": "a", "recipe": "text"}, {"name": "..", "recipe": {}}, {"name": "a/b", "recipe": {}},
    {"name": "a", "recipe": {}}, {"name": "a", "recipe": {"model": 3}}, {"name": "a\n", "recipe": {}},
    {"name": "a", "recipe": {"train": [], "rollout": {}, "data": None}}, {"name": "", "recipe": {}},
    {"name": "a", "recipe": {}, "weight": "1"}, {"name": "a", "recipe": {}, "weight": None},
    {"name": "a", "recipe": {}, "weight": 10**400}, {"name": "a", "recipe": {}, "extra": 1},
    {"name": "a", "recipe": {"output_dir": "\0"}}, {"name": "a", "recipe": {"output_dir": "../x"}},
    {"name": "a", "recipe": {"": {"": {}}}}, {"name": "a", "recipe": {}, "is_record": "yes"},
)  # fmt: skip
OPERATIONS: tuple[Any, ...] = (
    {}, {"kind": None}, {"kind": "train"}, {"kind": ["sample"]}, {"kind": "save", "x": 1},
    {"kind": "sample"}, {"kind": "sample", "prompts": [], "max_tokens": 1},
    {"kind": "sample", "prompts": [[]], "max_tokens": 1}, {"kind": "save", "life": 3},
    {"kind": "sample", "prompts": [["1"]], "max_tokens": 1}, {"kind": "save", "life": "other"},
    {"kind": "sample", "prompts": [[1]], "max_tokens": 0}, {"kind": "load", "version": -1},
    {"kind": "sample", "prompts": [[1]], "max_tokens": 1, "temperature": -1}, {"kind": "load"},
    {"kind": "sample", "prompts": [[1]], "max_tokens": 1, "n": 10**9}, {"kind": "optim_step", "lr": -1},
    {"kind": "sample", "prompts": [[1 << 40]], "max_tokens": 1}, {"kind": "optim_step", "lr": "1"},
    {"kind": "sample", "prompts": [[True]], "max_tokens": 1}, {"kind": "load", "version": "1"},
    {"kind": "sample", "prompts": [[1]], "max_tokens": 1, "stop": [""]}, {"kind": "forward"},
    {"kind": "forward", "sequences": [{"tokens": [1]}]}, {"kind": "forward", "sequences": [[1, 2]]},
    {"kind": "forward", "sequences": [{"tokens": [1, -2]}]}, {"kind": "forward", "sequences": 1},
    {"kind": "forward", "sequences": [{"tokens": [1, 2], "weights": [1, 1]}]},
    {"kind": "forward_backward", "loss": "mse", "sequences": [{"tokens": [1, 2]}]},
    {"kind": "forward_backward", "loss": "ppo", "sequences": [{"tokens": [1, 2]}]},
    {"kind": "forward_backward", "loss": "cross_entropy", "sequences": [
        {"tokens": [1, 2], "weights": [1]}]},
    {"kind": "forward_backward", "loss": "cross_entropy", "sequences": [
        {"tokens": [1, 2], "weights": [1, 0]}]},
    {"kind": "forward_backward", "loss": "cross_entropy", "sequences": [
        {"tokens": [1, 2], "weight": 1e39}]},
    {"kind": "forward_backward", "loss": "cross_entropy", "clip_low": 0.1, "sequences": [
        {"tokens": [1, 2]}]},
    {"kind": "forward_backward", "loss": "cross_entropy", "sequences": [
        {"tokens": [1, 2], "sample": 5}]},
    {"kind": "load", "name": "../x"}, {"kind": "load", "folder": "x"}, {"kind": "save", "name": ""},
    {"kind": "save_sampler"}, {"kind": "save_sampler", "name": 3}, {"kind": "load", "name": 1},
    {"kind": "save", "name": "a" * 101}, {"kind": "optim_step", "beta1": 1},
    {"kind": "optim_step", "clip_grad": None, "eps": 0}, {"kind": "optim_step", "beta2": -0.1},
    {"kind": "sample", "prompts": [[1]], "max_tokens": 1, "sampler": "@other"},
    {"kind": "sample", "prompts": [[1]], "max_tokens": 1, "sampler": "a/b"},
    {"kind": "sample", "prompts": [[1]], "max_tokens": 1, "top_prompt_logprobs": 10**6},
    {"kind": "forward", "sequences": [{"tokens": [1, 2], "targets": [1]}]},
    {"kind": "forward", "sequences": [{"tokens": [1, 2], "targets": [1, 1 << 30]}]},
    {"kind": "forward_backward", "loss": "dro", "beta": -1, "sequences": [
        {"tokens": [1, 2], "advantages": [0, 1], "logprobs": [0, -1]}]},
    {"kind": "forward_backward", "loss": "cross_entropy", "replay": "all", "sequences": [
        {"tokens": [1, 2]}]},
    {"kind": "forward_backward", "loss": "gspo", "sequences": [
        {"tokens": [1, 2], "advantages": [0, 1], "logprobs": [0, -1], "ratio_mask": [0, 2]}]},
    {"kind": "forward_backward", "loss": "ppo", "dual_clip": 1.2, "sequences": [
        {"tokens": [1, 2], "advantages": [0, 1], "logprobs": [0, -1]}]},
)  # fmt: skip
"""Operations of a session that are none."""
TEXTS = (
    b"", b"{", b"}", b"nul", b"{'name': 'a'}", b'{"name": "a", "name": "b", "recipe": {}}', b"\xff\xfe",
    b'{"recipe": {"a": 1, "a": 2}, "name": "a"}', b'{"name": "a", "recipe": {}} {}', b"NaN", b"[1,]",
    b'{"name": "a", "recipe": {}, "weight": NaN}', b'{"name": "a", "recipe": {}, "weight": 1e999}',
    b'{"name": "\\ud800", "recipe": {}}', b'{"name": "a", "recipe": {"x": "\\ud800"}}', b"\0" * 50,
    b'{"name": "a", "recipe": {"x": "\\u0000"}}', b"[" * 100_000, b'{"a":' * 40 + b"1" + b"}" * 40,
    b'{"name": "a", "recipe": {}, "weight": ' + b"1" * 5000 + b"}", b"\xef\xbb\xbf{}", b'"' * 999,
)  # fmt: skip
HEADERS = (
    "Content-Length: -1", "Content-Length: x", "Content-Length: 1e3", "Content-Length: +2",
    "Content-Length:", "Content-Length: 1, 1", "Content-Length: 2\r\nContent-Length: 2",
    "Content-Length: 99999999999999999999", "Content-Length: 2000000", "Content-Length: 1048577",
    "Transfer-Encoding: chunked", "transfer-encoding: gzip", "Host: evil.example", "Host: 10.0.0.1",
    "Host: [::1", "Host: localhost\r\nhost: localhost", "Origin: http://localhost", "Origin: null",
    "no colon", ": no name", "Na me: x", "Name : x", " folded: x", "A: b\r\n folded", "A: \x01",
    "A: b\nB: c", "X: " + "y" * 20_000, "\r\n".join(f"H{n}: x" for n in range(100)), "A: \xe9",
    "\r\n".join(f"H{n}: {'x' * 300}" for n in range(60)),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    kind: str
    parts: tuple[bytes, ...]
    """What is sent, with a pause between the parts."""
    pause_s: float = 0.0
    half_closes: bool = False
    """Nothing more is sent after the parts, and the server is told so."""

    @property
    def is_head(self) -> bool:
        """Whether the answer has no body, because it is that of HEAD."""
        return self.parts[:1] != () and self.parts[0].startswith(b"HEAD ")


def cases(rng: random.Random) -> list[Case]:
    """Return more than 1,000 cases, which the same seed makes again."""
    made = [
        *(Case("random bytes", (_noise(rng),), half_closes=True) for _ in range(200)),
        *(Case("flipped", (_flipped(rng),), half_closes=True) for _ in range(150)),
        *(Case("cut off", (_cut(rng),), half_closes=True) for _ in range(150)),
        *(Case("header", (_request(headers=(each,)),), half_closes=True) for each in HEADERS * 4),
        *(Case("path", (_request(path=each),)) for each in PATHS * 4),
        *(Case("target", (_of_line(f"GET {each} HTTP/1.1"),)) for each in TARGETS),
        *(Case("JSON type", (_post(json.dumps(each).encode()),)) for each in BODIES * 5),
        *(Case("operation", (_operation(each),)) for each in OPERATIONS),
        *(Case("JSON text", (_post(each),)) for each in TEXTS * 5),
        *(Case("version", (_of_line(f"GET /tenants HTTP/{v}"),)) for v in ("2.0", "1", "9")),
        *(
            Case("method", (_request(method=m),))
            for m in ("HEAD", "PUT", "TRACE", "PRI", "OPTIONS")
        ),
        *(Case("method", (_of_line(f"{m} / HTTP/1.1"),)) for m in ("get", "G" * 99, "GE T")),
        Case("nothing", (), half_closes=True),
        Case("old HTTP", (b"GET /tenants\r\n\r\n",)),
        Case("line ends", (b"GET /tenants/a HTTP/1.1\nHost: localhost\n\n",), half_closes=True),
        Case("TLS", (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),)),
        *(Case("huge body", _huge(rng)) for _ in range(5)),
        *(Case("slow", _drops(rng), pause_s=0.3) for _ in range(20)),
        *(Case("silent", (_cut(rng),)) for _ in range(20)),
        *(Case("pipelined", (_request() * 2 + b"x",)) for _ in range(5)),
    ]
    rng.shuffle(made)
    return made


def _request(method: str = "GET", path: str = "/tenants/a", headers: tuple[str, ...] = ()) -> bytes:
    """A request that is right but for its arguments; there is no tenant a."""
    own = [] if any("host" in each.lower() for each in headers) else ["Host: localhost"]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *own, *headers, "", ""]).encode("latin-1")


def _of_line(line: str) -> bytes:
    """Return a request with this first line."""
    return f"{line}\r\nHost: localhost\r\n\r\n".encode("latin-1")


def _post(body: bytes) -> bytes:
    return _request("POST", "/tenants", (f"Content-Length: {len(body)}",)) + body


def _operation(body: Any) -> bytes:
    """Return an operation of the session s, which there may be."""
    data = json.dumps(body).encode()
    length = f"Content-Length: {len(data)}"
    return _request("POST", "/tenants/s/operations", (length,)) + data


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 5, 60, 600, 40_000)))


def _flipped(rng: random.Random) -> bytes:
    """A right request with a few wrong bytes in its first line."""
    data = bytearray(_request())
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(20)] = rng.randrange(256)
    return bytes(data)


def _cut(rng: random.Random) -> bytes:
    data = _post(b'{"name": "a", "recipe": {}}')
    return data[: rng.randrange(1, len(data))]


def _huge(rng: random.Random) -> tuple[bytes, ...]:
    """More body than is read, in one piece and with its true length."""
    length = rng.choice((1 << 21, 1 << 22))
    return (_request("POST", "/tenants", (f"Content-Length: {length}",)), b" " * length)


def _drops(rng: random.Random) -> tuple[bytes, ...]:
    """A request byte by byte, which is never whole."""
    return tuple(bytes([byte]) for byte in _cut(rng)[: rng.randint(4, 8)])
