"""Bodies that no client sends: none is answered with a fault of mrl, whatever it holds."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import zstandard

from mrl.tinker.app import App
from mrl.web.limits import Limits
from tests.tinker.conftest import Api
from tests.tinker.test_requests import PROTO, request

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**63, 10**30, 0.5, 1e308, "", "x", "a" * 300, "tinker://a/b/c",
    "tinker://a/weights/..", "../../etc", "\u0000", "\ud800", [], [1], [[1]], {}, {"a": 1},
    {"type": "dimuon"},
    {"rank": 2}, {"rank": -1}, {"chunks": [{"tokens": [1, -5]}]}, {"chunks": [{"tokens": [5]}]},
    {"max_tokens": 0}, {"max_tokens": 3, "stop": [1, "x"]}, {"learning_rate": "1"},
]  # fmt: skip
FINE = (503, 507)
"""Statuses from 500 on that are no fault: the service asks for patience, or the disk is full."""


def bodies(draw: random.Random, schemas: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return a body with some of a schema's fields, known ids among their values."""
    fields = list(schemas.get("properties", {})) + ["unknown"] * (draw.random() < 0.1)
    chosen = [name for name in fields if draw.random() < 0.8]
    return {
        name: known[name] if name in known and draw.random() < 0.7 else draw.choice(VALUES)
        for name in chosen
    }


def test_no_body_is_a_fault(api: Api) -> None:
    session = api.session()
    model, base = api.model(session), api.server.calls.backend.model_name
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base}
    sampler = api.ask("create_sampling_session", asked)["sampling_session_id"]
    known = {
        "session_id": session, "model_id": model, "sampling_session_id": sampler, "seq_id": 3,
        "base_model": base, "prompt": {"chunks": [{"tokens": [5]}]}, "model_seq_id": 0,
        "sampling_params": {"max_tokens": 2}, "path": f"tinker://{model}/weights/x",
        "optimizer": True, "tags": [], "sdk_version": "0", "request_id": f"{model}:0",
        "adam_params": {}, "ttl_seconds": 7200, "tinker_path": f"tinker://{model}/weights/x",
    }  # fmt: skip
    page = api.ask("openapi.json", method="GET")
    schemas, draw = page["components"]["schemas"], random.Random(11)
    app = App(api.server.calls, Limits()).asgi
    api.server.calls.is_closing = True  # nobody waits for a result

    async def send() -> list[str]:
        faults = []
        transport = httpx.ASGITransport(app)
        headers = {"X-API-Key": api.key, "Host": "localhost"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers
        ) as client:
            for _ in range(12):
                for path, methods in page["paths"].items():
                    for method, about in methods.items():
                        content = b""
                        if "requestBody" in about:
                            (form,) = about["requestBody"]["content"].values()
                            schema = schemas[form["schema"]["$ref"].rpartition("/")[2]]
                            content = json.dumps(bodies(draw, schema, known)).encode()
                        names = {
                            "run": model, "session": session, "sampler": sampler, "name": "x",
                            "segment": "weights",
                        }  # fmt: skip
                        if path.endswith("/finish"):
                            names["session"] = "none"
                        found = await client.request(
                            method.upper(), path.format(**names), content=content
                        )
                        if found.status_code >= 500 and found.status_code not in FINE:
                            faults.append(f"{method} {path} {content[:300]!r}: {found.text}")
        return faults

    assert not asyncio.run(send())


def test_no_message_is_a_fault(api: Api) -> None:
    model, draw = api.model(), random.Random(3)
    whole = request(model, 1)
    app = App(api.server.calls, Limits()).asgi

    async def send() -> set[int]:
        transport = httpx.ASGITransport(app)
        headers = {"X-API-Key": api.key, **PROTO}
        found = set()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for _ in range(300):
                content = bytearray(whole)
                for _ in range(draw.randrange(1, 4)):
                    content[draw.randrange(len(content))] = draw.randrange(256)
                body, more = bytes(content), {}
                if draw.random() < 0.3:
                    body = bytearray(zstandard.ZstdCompressor().compress(body))
                    body[draw.randrange(len(body))] ^= draw.randrange(256)
                    body, more = bytes(body), {"Content-Encoding": "zstd"}
                answer = await client.post(
                    "/api/v1/forward_backward", content=body, headers={**headers, **more}
                )
                found.add(answer.status_code)
        return found

    assert asyncio.run(send()) <= {200, 400, 404, 413, 422, 429}
