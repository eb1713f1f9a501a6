"""The description of an API in the form of OpenAPI 3.1, made from its addresses and bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"
Bodies = tuple[type[BaseModel], ...]


class Address(NamedTuple):
    method: str
    path: str
    bodies: Bodies
    """The forms that the body of a request may have; empty if it has none."""
    needs_body: bool = True
    """Whether a request without a body is refused. Read only if there are `bodies`."""
    query: tuple[str, ...] = ()
    """The names that the query may have."""


def describe(
    title: str,
    version: str,
    addresses: Sequence[Address],
    *,
    security: dict[str, Any] | None,
    error_key: str,
) -> dict[str, Any]:
    """Return the description of these addresses. `security` is the scheme by which a caller shows
    that it may call; None if there is none."""
    known = {body for each in addresses for body in each.bodies}
    kinds = sorted(known, key=lambda kind: kind.__name__)
    _, schemas = models_json_schema([(body, "validation") for body in kinds], ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for each in addresses:
        path = re.sub(r":path\}", "}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, path)
    error = {
        "type": "object",
        "properties": {error_key: {"type": "string"}},
        "required": [error_key],
    }
    components: dict[str, Any] = {"schemas": {**schemas.get("$defs", {}), "Error": error}}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": components,
    }
    if security is not None:
        components["securitySchemes"] = {"key": security}
        found["security"] = [{"key": []}]
    return found


def _operation(address: Address, path: str) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{address.method.lower()}{path}").strip("_")
    error = {"application/json": {"schema": {"$ref": REF.format(model="Error")}}}
    found: dict[str, Any] = {
        "operationId": name,
        "responses": {
            "2XX": {"description": "the answer", "content": {"application/json": {}}},
            "default": {"description": "why the request is refused", "content": error},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
        for name in address.query
    ]
    if parameters:
        found["parameters"] = parameters
    if address.bodies:
        schemas = [{"$ref": REF.format(model=each.__name__)} for each in address.bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        content = {"application/json": {"schema": schema}}
        found["requestBody"] = {"required": address.needs_body, "content": content}
    return found
