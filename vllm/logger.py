# SPDX-License-Identifier: Apache-2.0
"""Logging: one handler on the `vllm` logger, lines that say when, where and what."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import cast

from vllm import envs

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class _VllmLogger(logging.Logger):
    """A logger that can say a thing once a process: for what would otherwise repeat every step."""

    def debug_once(self, msg: str, *args: object) -> None:
        _log_once(self, logging.DEBUG, msg, args)

    def info_once(self, msg: str, *args: object) -> None:
        _log_once(self, logging.INFO, msg, args)

    def warning_once(self, msg: str, *args: object) -> None:
        _log_once(self, logging.WARNING, msg, args)


@cache
def _log_once(logger: logging.Logger, level: int, msg: str, args: tuple[object, ...]) -> None:
    logger.log(level, msg, *args, stacklevel=3)


def init_logger(name: str) -> _VllmLogger:
    """The logger of module `name`, below the `vllm` logger that carries the handler."""
    previous = logging.getLoggerClass()
    logging.setLoggerClass(_VllmLogger)
    try:
        return cast(_VllmLogger, logging.getLogger(name))
    finally:
        logging.setLoggerClass(previous)


def set_log_level(level: str) -> None:
    """Sets the level of every vLLM logger in this process and in those it starts.

    Raises:
        ValueError: `level` is not one of `LOG_LEVELS`.
    """
    if level.lower() not in LOG_LEVELS:
        raise ValueError(f"unknown log level {level!r}; supported: {', '.join(LOG_LEVELS)}")
    envs.set_for_children("VLLM_LOGGING_LEVEL", level.upper())
    logging.getLogger("vllm").setLevel(level.upper())


class _StderrHandler(logging.StreamHandler):
    """Looks `sys.stderr` up when it writes, so that redirected streams are honoured."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[override]
        return sys.stderr


def _configure_root() -> None:
    root = logging.getLogger("vllm")
    if root.handlers or not envs.VLLM_CONFIGURE_LOGGING:
        return
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(envs.VLLM_LOGGING_PREFIX + _FORMAT, _DATE_FORMAT))
    root.addHandler(handler)
    root.setLevel(envs.VLLM_LOGGING_LEVEL)
    root.propagate = False


_configure_root()
