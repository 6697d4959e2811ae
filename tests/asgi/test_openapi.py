"""openapi.json: a document of all routes and of all fields, that others can read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from aioengine import AsyncEngine
from aioengine.asgi import openai_app, service_app
from aioengine.asgi.api import fields
from aioengine.asgi.api.openapi import OPERATIONS

TABLES = {
    "post_chat_completions": fields.CHAT,
    "post_completions": fields.COMPLETIONS,
    "post_messages": fields.ANTHROPIC,
    "post_messages_count_tokens": fields.ANTHROPIC,
    "post_tokenize": fields.TOKENIZE,
    "post_detokenize": fields.DETOKENIZE,
}


async def document(app: Any, **headers: str) -> Any:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        response = await client.get("/v1/openapi.json", headers=headers)
        assert response.status_code == 200, response.text
        return response.json()


KEPT = "/responses/{response_id}"
"""There where the host keeps responses."""


def references(value: Any) -> Iterator[str]:
    """All `$ref`s in a document."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for child in value.values():
            yield from references(child)
    elif isinstance(value, list):
        for child in value:
            yield from references(child)


@pytest.fixture(params=["mounted", "service"])
def app(folder: Path, request: pytest.FixtureRequest) -> Any:
    engine = AsyncEngine.from_pretrained(folder)  # it need not run
    if request.param == "service":
        return service_app(engine)
    return Starlette(routes=[Mount("/v1", openai_app(engine))])


async def test_its_paths_are_the_routes(folder: Path, app: Any) -> None:
    found = await document(app)
    assert found["openapi"] == "3.1.0" and found["servers"] == [{"url": "/v1"}]
    routes = [
        route
        for route in openai_app(AsyncEngine.from_pretrained(folder)).routes
        if isinstance(route, Route)
    ]
    converter = re.compile(r":\w+}")
    wanted = {
        f"{method} {converter.sub('}', route.path)}"
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    operations = {
        f"{method.upper()} {path}": operation
        for path, methods in found["paths"].items()
        for method, operation in methods.items()
    }
    assert operations.keys() == wanted
    assert wanted == OPERATIONS.keys() - {f"{each} {KEPT}" for each in ("GET", "DELETE")}
    for name, operation in operations.items():
        assert operation["summary"] and operation["responses"]["default"]
        given = operation.get("parameters", [])
        names = {each["name"] for each in given if each["in"] == "path"}
        assert names == set(re.findall(r"{(\w+)}", name))
        assert {each["name"] for each in given} - names == OPERATIONS[name].query.keys()
    ids = [each["operationId"] for path in found["paths"].values() for each in path.values()]
    assert len(set(ids)) == len(ids)


async def test_its_references_lead_somewhere(app: Any) -> None:
    found = await document(app)
    targets = set(references(found))
    assert len(targets) > 5
    for target in targets:
        value = found
        for step in target.removeprefix("#/").split("/"):
            value = value[step]
        assert value["type"] == "object"


async def test_each_field_is_what_its_table_says(app: Any) -> None:
    schemas = (await document(app))["components"]["schemas"]
    for name, table in TABLES.items():
        schema = schemas[name]
        assert schema["additionalProperties"] is False
        assert schema["properties"].keys() == table.keys() >= set(schema["required"])
        for field, value in schema["properties"].items():
            assert table[field].note in value.get("description", "")
            if table[field].handling is fields.Handling.REFUSED:
                assert value["enum"] == [*table[field].neutral, None]
    chat = schemas["post_chat_completions"]["properties"]
    kinds = {name: chat[name]["type"][0] for name in ("n", "top_p", "ignore_eos", "messages")}
    assert kinds == {
        "n": "integer",
        "top_p": "number",
        "ignore_eos": "boolean",
        "messages": "array",
    }
    assert "type" not in chat["stop"]  # text, or a list of texts


async def test_keys(folder: Path) -> None:
    engine = AsyncEngine.from_pretrained(folder)
    assert (await document(service_app(engine)))["security"] == []
    app = service_app(engine, api_key="one")
    found = await document(app, authorization="Bearer one")
    schemes = found["components"]["securitySchemes"]
    assert schemes["bearer"] == {"type": "http", "scheme": "bearer"}
    assert [*schemes] == [name for each in found["security"] for name in each]
    assert found["paths"]["/health"]["get"]["security"] == []
    assert "security" not in found["paths"]["/messages"]["post"]


async def test_it_is_valid(app: Any) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(await document(app))
