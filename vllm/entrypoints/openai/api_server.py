# SPDX-License-Identifier: Apache-2.0
"""The HTTP app over an engine, and its life."""

from __future__ import annotations

import gc
import json
import shlex
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.launcher import make_server, serve_http
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.errors import add_error_handlers
from vllm.entrypoints.openai.middleware import (
    AuthenticationMiddleware,
    BodyLimitMiddleware,
    ShutdownMiddleware,
)
from vllm.entrypoints.openai.routes import router
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat
from vllm.entrypoints.openai.serving_completion import OpenAIServingCompletion
from vllm.entrypoints.openai.serving_models import OpenAIServingModels
from vllm.entrypoints.sockets import base_url
from vllm.logger import init_logger
from vllm.version import __version__

logger = init_logger(__name__)


def build_app(engine_client: EngineClient, args: FrontendArgs) -> FastAPI:
    """The app: routes, error shapes, key and body limit over `engine_client`.

    Raises:
        ValueError: `args.chat_template` names nothing that can be read.
    """
    app = FastAPI(title="vLLM", version=__version__, lifespan=_lifespan)
    models = OpenAIServingModels(engine_client.model_config)
    app.state.engine_client = engine_client
    app.state.serving_models = models
    app.state.serving_completion = OpenAIServingCompletion(engine_client, models)
    app.state.serving_chat = OpenAIServingChat(
        engine_client,
        models,
        args.response_role,
        chat_template=load_chat_template(args.chat_template),
    )
    app.include_router(router)
    add_error_handlers(app)
    # The last one added is asked first: no key, no body.
    app.add_middleware(BodyLimitMiddleware)
    if args.keys:
        app.add_middleware(AuthenticationMiddleware, tokens=args.keys)
    app.add_middleware(ShutdownMiddleware)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    # What was made while starting lives as long as the process: the collector need not look at it.
    gc.collect()
    gc.freeze()
    yield


async def run_server(
    engine_client: EngineClient, sock: socket.socket, args: FrontendArgs
) -> int:
    """Serves until told to stop; returns the exit status (see `serve_http`)."""
    app = build_app(engine_client, args)

    def on_ready() -> None:
        name = app.state.serving_models.names[0]
        logger.info("ready on %s; try: %s", base_url(sock), example(base_url(sock), name, args))

    server = make_server(
        app,
        on_ready=on_ready,
        drain_timeout_s=engine_client.vllm_config.shutdown_timeout,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
    )
    return await serve_http(server, sock, engine_client)


def example(url: str, model: str, args: FrontendArgs) -> str:
    """A command line to paste that gets an answer from this server."""
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 16})
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if args.keys else ""
    return (
        f"curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    )
