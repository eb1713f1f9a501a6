"""The descriptions of the APIs, and schemathesis, which sends what follows from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.web.apis import APIS

FOLDER = Path(os.environ.get("MRL_SCHEMATHESIS", Path(sys.prefix) / "schemathesis"))
"""Where `make tinker` installs schemathesis."""
KNOWN = {
    "service": ("/tenants/{name}/operations", "PostedSampleBody", "prompts"),
    "tinker": ("/api/v1/asample", "Sample", "prompt"),
    "rewards": ("/{path}", "Call", "completions"),
}
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,unsupported_method,"
    "ignored_auth"
)
NUM_EXAMPLES = 60
LIMIT_S = 1200


@pytest.mark.parametrize("name", APIS)
def test_each_api_describes_itself(name: str, tmp_path: Path, model: Path) -> None:
    path, body, key = KNOWN[name]
    with APIS[name](tmp_path, model) as (address, header):
        page = httpx.get(address, headers=[header.split(": ")]).json()
        if name != "tinker":
            assert httpx.get(address).status_code == 401
    assert page["openapi"] == "3.1.0"
    assert key in page["components"]["schemas"][body]["properties"]
    schema = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    forms = schema.get("anyOf", [schema])
    assert {"$ref": f"#/components/schemas/{body}"} in forms


@pytest.mark.release
@pytest.mark.skipif(
    not (FOLDER / "schemathesis").is_dir(),
    reason="schemathesis is not installed; `make tinker` installs it",
)
@pytest.mark.parametrize("name", APIS)
def test_schemathesis_finds_no_fault(name: str, tmp_path: Path, model: Path) -> None:
    """No answer has a status from 500 on, or one that the description does not allow; and none is given
    to a caller without the key."""
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    with APIS[name](tmp_path, model) as (address, header):
        page = httpx.get(address, headers=[header.split(": ")]).json()
        found = subprocess.run(
            [
                *(sys.executable, "-c", program, "run", address, "--header", header),
                *("--checks", CHECKS, "--phases", "examples,coverage,fuzzing"),
                *("--max-examples", str(NUM_EXAMPLES), "--seed", "1", "--no-color"),
                *("--generation-database", "none", "--continue-on-failure"),
            ],
            env={**os.environ, "PYTHONPATH": str(FOLDER)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    number = sum(len(methods) for methods in page["paths"].values())
    assert f"Tested: {number}\n" in found.stdout, found.stdout[-2000:]
