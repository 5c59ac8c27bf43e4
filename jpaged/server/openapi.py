"""The OpenAPI document, made from the tables of parameters that the requests are checked by."""

from collections.abc import Mapping
from typing import Any, Final

from jpaged import __version__
from jpaged.server.kinds import nullable
from jpaged.server.parameters import Endpoint, Table

_INTEGER: Final = {"type": "integer", "minimum": 0}
_NUMBER_OR_NULL: Final = {"type": ["number", "null"]}
_IDS: Final = {"type": "array", "items": _INTEGER}
_TEXT: Final = {"type": "string"}
_EVENT: Final = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A piece of the answer as JSON; the last one is [DONE]."}},
    "required": ["data"],
}
_REASON: Final = {"enum": ["stop", "length", "abort", None]}
_STOP: Final = {"type": ["string", "integer", "null"]}


def _object(properties: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**properties, **(optional or {})},
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _schemas() -> dict[str, Any]:
    usage = _object(
        {
            "prompt_tokens": _INTEGER,
            "completion_tokens": _INTEGER,
            "total_tokens": _INTEGER,
            "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
        }
    )
    named = {"token": _TEXT, "logprob": {"type": "number"}, "bytes": _IDS}
    chat_logprobs = _object({"content": _list(_object({**named, "top_logprobs": _list(_object(named))}))})
    logprobs = _object(
        {
            "tokens": _list(_TEXT),
            "token_logprobs": _list(_NUMBER_OR_NULL),
            "top_logprobs": nullable(_list({"type": ["object", "null"], "additionalProperties": {"type": "number"}})),
            "text_offset": _IDS,
        }
    )
    rank = _object({"logprob": {"type": "number"}, "rank": {"type": ["integer", "null"]}, "decoded_token": _TEXT})
    prompt_logprobs = _list({"anyOf": [{"type": "object", "additionalProperties": rank}, {"type": "null"}]})
    ending = {"finish_reason": _REASON, "stop_reason": _STOP}
    head = {"id": _TEXT, "created": _INTEGER, "model": _TEXT}
    message = _object({"role": {"const": "assistant"}, "content": _TEXT})
    error = {"message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": _INTEGER}
    model = {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _TEXT,
        "root": _TEXT,
        "parent": {"type": "null"},
        "max_model_len": _INTEGER,
    }
    return {
        "Error": _object({"error": _object(error)}),
        "Completion": _object(
            {
                **head,
                "object": {"const": "text_completion"},
                "choices": _list(
                    _object(
                        {"index": _INTEGER, "text": _TEXT, "logprobs": nullable(logprobs), **ending},
                        {"prompt_logprobs": prompt_logprobs, "token_ids": _IDS, "prompt_token_ids": _IDS},
                    )
                ),
                "usage": usage,
            }
        ),
        "ChatCompletion": _object(
            {
                **head,
                "object": {"const": "chat.completion"},
                "choices": _list(
                    _object(
                        {"index": _INTEGER, "message": message, "logprobs": nullable(chat_logprobs), **ending},
                        {"token_ids": _IDS},
                    )
                ),
                "usage": usage,
            },
            {"prompt_logprobs": prompt_logprobs, "prompt_token_ids": _IDS},
        ),
        "Model": _object(model),
        "Models": _object({"object": {"const": "list"}, "data": _list(_object(model))}),
        "Tokens": _object({"count": _INTEGER, "max_model_len": _INTEGER, "tokens": _IDS}, {"token_strs": _list(_TEXT)}),
        "Text": _object({"prompt": _TEXT}),
        "Version": _object({"version": _TEXT}),
        "Load": _object({"server_load": _INTEGER}),
    }


# path -> operation id, table, schema of the answer, what it does.
_POSTS: Final[dict[str, tuple[str, Endpoint, str, str]]] = {
    "/v1/completions": ("completions", "completions", "Completion", "Continue prompts."),
    "/v1/chat/completions": ("chat", "chat", "ChatCompletion", "Answer a conversation."),
    "/tokenize": ("tokenize", "tokenize", "Tokens", "Text or a conversation to token ids."),
    "/detokenize": ("detokenize", "detokenize", "Text", "Token ids to text."),
}
_GETS: Final = {
    "/v1/models": ("models", "Models", "The model."),
    "/version": ("version", "Version", "The version of jpaged."),
    "/load": ("load", "Load", "Requests that are being served."),
}


def openapi_document(tables: Mapping[Endpoint, Table], *, needs_key: bool) -> dict[str, Any]:
    """The document.

    Args:
      tables: the parameters of each endpoint.
      needs_key: clients must send an API key.
    """
    paths: dict[str, Any] = {}
    for path, (name, endpoint, answer, about) in _POSTS.items():
        table = tables[endpoint]
        body = {
            "type": "object",
            "properties": {name: parameter.schema() for name, parameter in table.items()},
            "required": [name for name, parameter in table.items() if parameter.required],
            "additionalProperties": False,
        }
        content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}}}
        if endpoint in ("completions", "chat"):
            content["text/event-stream"] = {"schema": _EVENT}
        paths[path] = {
            "post": {
                "operationId": name,
                "summary": about,
                "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                "responses": {"200": {"description": "The answer.", "content": content}, **_errors(needs_key)},
            }
        }
    for path, (name, answer, about) in _GETS.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}}}
        responses: dict[str, Any] = {"200": {"description": about, "content": content}}
        if path.startswith("/v1/") and needs_key:
            responses["401"] = _error("There is no valid key.")
        paths[path] = {"get": {"operationId": name, "summary": about, "responses": responses}}
    for path in ("/health", "/ping"):
        responses = {"200": {"description": "The server serves."}, "503": _error("It does not serve now.")}
        paths[path] = {
            "get": {"operationId": path[1:], "summary": "Whether the server serves.", "responses": responses}
        }
    metrics = {"200": {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": _TEXT}}}}
    paths["/metrics"] = {"get": {"operationId": "metrics", "summary": "Counters and histograms.", "responses": metrics}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jpaged", "version": __version__, "description": "Language models on a paged KV cache."},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in (*_POSTS, "/v1/models"):
            for operation in paths[path].values():
                operation["security"] = [{"key": []}]
    return document


def _errors(needs_key: bool) -> dict[str, Any]:
    errors = {
        "400": "The request is refused; the message says why.",
        "404": "There is no such model.",
        "408": "The body did not come in time.",
        "413": "The body is too large.",
        "415": "The body is not declared as JSON.",
        "500": "The request failed.",
        "503": "The server is full, about to end, or its engine does not serve.",
    }
    if needs_key:
        errors |= {"401": "There is no valid key.", "429": "Too many requests at once with this key."}
    return {status: _error(about) for status, about in sorted(errors.items())}


def _error(about: str) -> dict[str, Any]:
    return {"description": about, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
