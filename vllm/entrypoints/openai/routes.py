# SPDX-License-Identifier: Apache-2.0
"""The routes: each takes a request apart, asks its handler, and puts the answer together."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.errors import error_of, json_error, make_error
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.protocol.common import ErrorResponse, ModelList
from vllm.entrypoints.openai.protocol.completion import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat
from vllm.entrypoints.openai.serving_completion import OpenAIServingCompletion
from vllm.entrypoints.openai.serving_models import OpenAIServingModels
from vllm.entrypoints.openai.serving_tokenization import OpenAIServingTokenization
from vllm.entrypoints.openai.streaming import ClientGone
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.version import __version__

router = APIRouter()
# Routes that only the server's owner should reach: with VLLM_SERVER_DEV_MODE alone.
dev_router = APIRouter()

_CLIENT_CLOSED_REQUEST = 499
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 413, 415, 500)
}


def validate_json_request(raw_request: Request) -> None:
    """Refuses bodies that do not claim to be JSON."""
    kind = raw_request.headers.get("content-type", "").split(";", 1)[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the body must be JSON: send `Content-Type: application/json`")


def _engine(request: Request) -> EngineClient:
    return request.app.state.engine_client


async def _answer(work: Awaitable[BaseModel | Response]) -> Response:
    """The handler's answer as a response; an error too."""
    try:
        answer = await work
    except ClientGone:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    except Exception as error:
        return json_error(error_of(error))
    if isinstance(answer, Response):
        return answer
    return Response(answer.model_dump_json(), media_type="application/json")


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses=_ERRORS,
    dependencies=[Depends(validate_json_request)],
)
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """Continues a prompt. With `stream`, the answer is server-sent events."""
    handler: OpenAIServingCompletion = raw_request.app.state.serving_completion
    return await _answer(handler.create_completion(request, raw_request))


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletionResponse,
    responses=_ERRORS,
    dependencies=[Depends(validate_json_request)],
)
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """Answers a conversation. With `stream`, the answer is server-sent events."""
    handler: OpenAIServingChat = raw_request.app.state.serving_chat
    return await _answer(handler.create_chat_completion(request, raw_request))


@router.post(
    "/tokenize",
    response_model=TokenizeResponse,
    responses=_ERRORS,
    dependencies=[Depends(validate_json_request)],
)
async def tokenize(request: TokenizeRequest, raw_request: Request) -> Response:
    """The token ids of a prompt or a conversation."""
    handler: OpenAIServingTokenization = raw_request.app.state.serving_tokenization
    return await _answer(handler.create_tokenize(request))


@router.post(
    "/detokenize",
    response_model=DetokenizeResponse,
    responses=_ERRORS,
    dependencies=[Depends(validate_json_request)],
)
async def detokenize(request: DetokenizeRequest, raw_request: Request) -> Response:
    """The text of token ids."""
    handler: OpenAIServingTokenization = raw_request.app.state.serving_tokenization
    return await _answer(handler.create_detokenize(request))


@router.get("/v1/models", response_model=ModelList, responses={401: {"model": ErrorResponse}})
async def show_available_models(raw_request: Request) -> ModelList:
    """The names that the model is served under."""
    models: OpenAIServingModels = raw_request.app.state.serving_models
    return models.show_available_models()


@router.get("/health", responses={503: {"model": ErrorResponse}})
async def health(raw_request: Request) -> Response:
    """200 with an empty body while the engine lives, else 503."""
    try:
        await _engine(raw_request).check_health()
    except EngineDeadError as error:
        return json_error(make_error(str(error), 503))
    return Response(status_code=200)


@router.get("/ping", responses={503: {"model": ErrorResponse}})
@router.post("/ping", responses={503: {"model": ErrorResponse}})
async def ping(raw_request: Request) -> Response:
    """As `/health`, under the name that SageMaker asks for."""
    return await health(raw_request)


@router.get("/load")
async def get_server_load_metrics(raw_request: Request) -> JSONResponse:
    """Requests under way, which are counted with --enable-server-load-tracking; else 0."""
    return JSONResponse({"server_load": raw_request.app.state.server_load.value})


@dev_router.post("/reset_prefix_cache", responses={409: {"model": ErrorResponse}})
async def reset_prefix_cache(
    raw_request: Request,
    reset_running_requests: bool = Query(default=False),
    reset_external: bool = Query(default=False),
) -> Response:
    """Empties the prefix cache: 200, or 409 while requests run. With `reset_running_requests` these
    start over. `reset_external` empties what a KV connector stores as well."""
    done = await _engine(raw_request).reset_prefix_cache(reset_running_requests, reset_external)
    if done:
        return Response(status_code=200)
    message = "the prefix cache is in use: wait, or pass reset_running_requests=true"
    return json_error(make_error(message, 409))


@router.get("/version")
async def show_version() -> JSONResponse:
    """The server's version."""
    return JSONResponse({"version": __version__})


@router.get("/metrics")
async def metrics() -> Response:
    """Metrics in Prometheus' text format."""
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

    return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)
