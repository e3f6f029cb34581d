# SPDX-License-Identifier: Apache-2.0
"""What the installed vLLM warns of, cell by cell."""

import functools
import logging

import vllm.logger

_ONCE = type(functools.lru_cache(print))


class Warned(logging.Handler):
    """Keeps the warnings of vLLM's loggers. One that is logged once a process is heard each time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())

    def forget(self) -> None:
        """All up to now; also lets vLLM forget what it has logged already."""
        self._messages.clear()
        root = logging.getLogger("vllm")
        if self not in root.handlers:  # Logging may be configured late.
            root.addHandler(self)
        for value in vars(vllm.logger).values():
            if isinstance(value, _ONCE):
                value.cache_clear()

    def text(self) -> str:
        """Each message once, in their order."""
        return "; ".join(dict.fromkeys(self._messages))
