# SPDX-License-Identifier: Apache-2.0
"""The HTTP app over an engine, and its life."""

from __future__ import annotations

import gc
import json
import shlex
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from vllm import envs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.launcher import make_server, serve_http
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.errors import add_error_handlers
from vllm.entrypoints.openai.middleware import (
    AuthenticationMiddleware,
    BodyLimitMiddleware,
    LoadMiddleware,
    RequestIdMiddleware,
    ServerLoad,
    ShutdownMiddleware,
)
from vllm.entrypoints.openai.routes import dev_router, router
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat
from vllm.entrypoints.openai.serving_completion import OpenAIServingCompletion
from vllm.entrypoints.openai.serving_models import OpenAIServingModels
from vllm.entrypoints.openai.serving_tokenization import OpenAIServingTokenization
from vllm.entrypoints.sockets import base_url
from vllm.logger import init_logger
from vllm.version import __version__

logger = init_logger(__name__)


def build_app(engine_client: EngineClient, args: FrontendArgs) -> FastAPI:
    """The app: routes, error shapes, key and body limit over `engine_client`.

    Raises:
        ValueError: `args.chat_template` names nothing that can be read.
    """
    has_docs = not args.disable_fastapi_docs
    app = FastAPI(
        title="vLLM",
        version=__version__,
        lifespan=_lifespan,
        **({} if has_docs else {"docs_url": None, "redoc_url": None, "openapi_url": None}),
    )
    # Requests come with the prefix or without, as the proxy does it.
    app.root_path = args.root_path
    models = OpenAIServingModels(engine_client.model_config)
    template = load_chat_template(args.chat_template)
    chat = OpenAIServingChat(engine_client, models, args, chat_template=template)
    app.state.engine_client = engine_client
    app.state.serving_models = models
    app.state.serving_completion = OpenAIServingCompletion(engine_client, models, args)
    app.state.serving_chat = chat
    app.state.serving_tokenization = OpenAIServingTokenization(chat)
    app.state.server_load = ServerLoad()
    app.include_router(router)
    if envs.VLLM_SERVER_DEV_MODE:
        logger.warning("VLLM_SERVER_DEV_MODE: clients can reset the prefix cache")
        app.include_router(dev_router)
    add_error_handlers(app)
    _add_middleware(app, args)
    return app


def _add_middleware(app: FastAPI, args: FrontendArgs) -> None:
    """The last one added is asked first: no key, no body."""
    app.add_middleware(BodyLimitMiddleware)
    if args.enable_server_load_tracking:
        app.add_middleware(LoadMiddleware, load=app.state.server_load)
    if args.keys:
        app.add_middleware(AuthenticationMiddleware, tokens=args.keys)
    if args.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware)
    # Before the key is asked for: a browser asks without it first whether it may send it.
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
    )
    app.add_middleware(ShutdownMiddleware)


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
        url = base_url(sock, "https" if args.ssl_certfile else "http")
        logger.info("ready on %s; try: %s", url, example(url + args.root_path, name, args))

    server = make_server(
        app,
        on_ready=on_ready,
        drain_timeout_s=engine_client.vllm_config.shutdown_timeout,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        tls=_tls_options(args),
    )
    return await serve_http(server, sock, engine_client)


def _tls_options(args: FrontendArgs) -> dict[str, Any]:
    """uvicorn's options for HTTPS; none without a certificate."""
    if not args.ssl_certfile:
        return {}
    options = {
        "ssl_certfile": args.ssl_certfile,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_ca_certs": args.ssl_ca_certs,
        "ssl_cert_reqs": args.ssl_cert_reqs,
        "ssl_ciphers": args.ssl_ciphers,
    }
    return {name: value for name, value in options.items() if value is not None}


def example(url: str, model: str, args: FrontendArgs) -> str:
    """A command line to paste that gets an answer from this server."""
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 16})
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if args.keys else ""
    return (
        f"curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    )
