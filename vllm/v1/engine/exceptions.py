# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with an engine: one request, or all of it."""

from __future__ import annotations


class EngineGenerateError(Exception):
    """One request could not go on; the engine and other requests are well. The message is for the
    request's user."""


class RequestRefusedError(EngineGenerateError):
    """One request asks for what this engine can never give, such as more tokens than its KV cache
    holds. Trying again does not help."""


class EngineDeadError(Exception):
    """The engine core has ended and answers nobody any more. Its own log says why."""

    def __init__(self, reason: str = "", suppress_context: bool = False) -> None:
        said = f" ({reason})" if reason else ""
        super().__init__(
            f"the engine core has died{said}; its traceback is in the log above. Start the server "
            "again"
        )
        # The error that led here is often only the way it was noticed.
        self.__suppress_context__ = suppress_context
