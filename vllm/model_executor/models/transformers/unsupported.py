# SPDX-License-Identifier: Apache-2.0
"""Why a model is refused."""


class UnsupportedModel(ValueError):
    """The model cannot be served with Transformers' code; the message says what is in the way."""
