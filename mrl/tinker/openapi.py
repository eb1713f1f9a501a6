"""The description of the API in the form of OpenAPI 3.1, made from its addresses and bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"


class Address(NamedTuple):
    method: str
    path: str
    body: type[BaseModel] | None
    """The body of a request; None if it has none."""


def describe(addresses: Sequence[Address], version: str) -> dict[str, Any]:
    """Return the description of these addresses."""
    bodies = sorted({each.body for each in addresses if each.body}, key=lambda kind: kind.__name__)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for each in addresses:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "The Tinker API of mrl", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
        "security": [{"key": []}],
    }


def _operation(address: Address) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{address.method.lower()}{address.path}").strip("_")
    found: dict[str, Any] = {
        "operationId": name,
        "responses": {
            "200": {"description": "the answer", "content": {"application/json": {}}},
            "default": {"description": "the reason of a refusal, in `detail`"},
        },
    }
    if names := re.findall(r"\{(\w+)\}", address.path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if address.body is not None:
        schema = {"$ref": REF.format(model=address.body.__name__)}
        content = {"application/json": {"schema": schema}}
        found["requestBody"] = {"required": True, "content": content}
    return found
