"""The description of the served API, in OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from elastic_dp.ui.run_control import TYPES, VERBS
from elastic_dp.ui.served_runs import MOST_LISTED

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
_NAME = {
    "name": "run",
    "in": "path",
    "required": True,
    "description": "The run's name.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    "example": "mine",
}
_REFUSALS = {
    400: "the body is not JSON",
    401: "the token is missing or wrong",
    403: "nobody steers by this server, or the request comes from another site",
    404: "no such run",
    409: "the run is not live",
    413: "the body is too large",
    415: "the body is not application/json",
    421: "this server is not known by that name",
    422: "a field is wrong",
    503: "the store, or the run's controller, does not answer",
}


def api_description() -> dict[str, Any]:
    """Return the description as JSON values."""
    found = {"runs": {"type": "array"}, "number": {"type": "integer"}}
    runs = {"type": "object", "required": list(found), "properties": found}
    listed = f"The runs, the newest first: at most {MOST_LISTED} of the `number` there are."
    report = {"type": "object", "required": ["name", "phase", "verdict"]}
    paths: dict[str, Any] = {
        "/api/runs": {"get": _read(listed, runs, (401, 421, 503))},
        "/api/runs/{run}": {
            "parameters": [_NAME],
            "get": _read("The report of a run.", report, (401, 404, 421, 503)),
        },
    }
    for verb, (_, fields) in VERBS.items():
        paths[f"/api/runs/{{run}}/{verb}"] = {"parameters": [_NAME], "post": _write(verb, fields)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "elastic_dp ui",
            "version": "1",
            "description": "/api/runs/{run}/stream sends the report as server-sent events: first "
            "`report`, then `change` with a list of [kind, path, value].",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _read(summary: str, schema: dict[str, Any], refusals: tuple[int, ...]) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _answer(summary, schema), **_errors(refusals)}}


def _write(verb: str, fields: dict[str, str]) -> dict[str, Any]:
    body = {
        "type": "object",
        "additionalProperties": False,
        "required": [name for name, kind in fields.items() if not kind.endswith("?")],
        "properties": {name: _field(kind) for name, kind in fields.items()},
    }
    done = {"type": "object", "required": ["done"], "properties": {"done": {"type": "string"}}}
    return {
        "summary": f"Ask a live run: {verb}.",
        "security": [{"token": []}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"202": _answer("asked for", done), **_errors(tuple(_REFUSALS))},
    }


def _field(kind: str) -> dict[str, Any]:
    schema = TYPES[kind.removesuffix("?")]
    may_be_null = {"type": [schema["type"], "null"]} if kind.endswith("?") else {}
    return schema | may_be_null


def _errors(refusals: tuple[int, ...]) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {str(status): _answer(_REFUSALS[status], schema) for status in refusals}


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
