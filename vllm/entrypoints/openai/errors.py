# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong, in OpenAI's shape."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from vllm.entrypoints.openai.protocol.common import ErrorInfo, ErrorResponse, RequestError
from vllm.logger import init_logger
from vllm.v1.engine.exceptions import (
    EngineDeadError,
    EngineGenerateError,
    RequestRefusedError,
)

logger = init_logger(__name__)

# A message may quote the request; one of megabytes helps nobody.
MAX_MESSAGE_CHARS = 1000
_TYPES = {401: "AuthenticationError", 404: "NotFoundError", 503: "ServiceUnavailableError"}


def make_error(
    message: str, status: int = 400, type: str | None = None, param: str | None = None
) -> ErrorResponse:
    """An error response: `message` as one valid, bounded line."""
    line = " ".join(message.split()).encode("utf-8", "replace").decode()
    if len(line) > MAX_MESSAGE_CHARS:
        line = line[: MAX_MESSAGE_CHARS - 1] + "\u2026"
    default = "BadRequestError" if status < 500 else "InternalServerError"
    kind = type or _TYPES.get(status, default)
    return ErrorResponse(error=ErrorInfo(message=line, type=kind, param=param, code=status))


def error_of(error: BaseException) -> ErrorResponse:
    """The response for an exception of a handler. What is nobody's fault but ours is logged, and
    its details stay in the log."""
    if isinstance(error, RequestError):
        return make_error(str(error), error.status, error.type, error.param)
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, RequestRefusedError):
        return make_error(str(error), 400)
    if isinstance(error, EngineDeadError | EngineGenerateError):
        return make_error(str(error), 500)
    if isinstance(error, ValueError):
        return make_error(str(error), param=_leading_field(str(error)))
    logger.error("a request failed", exc_info=error)
    return make_error(f"internal error ({type(error).__name__}); the server's log has it", 500)


def json_error(error: ErrorResponse, headers: dict[str, str] | None = None) -> JSONResponse:
    """The HTTP response for an error."""
    return JSONResponse(error.model_dump(), status_code=error.error.code, headers=headers)


def add_error_handlers(app: FastAPI) -> None:
    """Every error that leaves a route of `app` gets OpenAI's shape."""

    async def on_http_exception(request: Request, error: HTTPException) -> JSONResponse:
        detail = str(error.detail or HTTPStatus(error.status_code).phrase)
        if error.status_code in (404, 405):
            detail = f"{detail}: {request.method} {request.url.path}"
        headers = dict(error.headers) if error.headers else None
        return json_error(make_error(detail, error.status_code), headers)

    async def on_error(_: Request, error: Exception) -> JSONResponse:
        return json_error(error_of(error))

    app.exception_handler(HTTPException)(on_http_exception)
    for kind in (RequestValidationError, ValueError, EngineDeadError, EngineGenerateError):
        app.exception_handler(kind)(on_error)


def _validation_error(error: RequestValidationError) -> ErrorResponse:
    """The first thing that was wrong with a request's body, in one line."""
    found = error.errors()[0]
    if found["type"] == "json_invalid":
        reason = found.get("ctx", {}).get("error", "")
        return make_error(f"the body is not valid JSON: {reason}")
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return error_of(cause)
    place = [part for part in found["loc"] if part != "body"]
    if not place:
        return make_error("the body must be a JSON object")
    # Union members show up in the path as type names, which are no part of the request.
    name = str(place[0])
    path = name + "".join(f"[{part}]" for part in place[1:] if isinstance(part, int))
    message = str(cause) if cause is not None else found["msg"]
    return make_error(f"{path}: {message}", param=name)


def _leading_field(message: str) -> str | None:
    """The field that a message of `SamplingParams` begins with."""
    word = message.split(" ", 1)[0]
    return word if word.isidentifier() and word.islower() else None
