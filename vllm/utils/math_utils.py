# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic that says what it rounds."""


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(a // -b)


def round_up(x: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `x`."""
    return cdiv(x, multiple) * multiple


def exact_div(a: int, b: int) -> int:
    """`a / b`.

    Raises:
        ValueError: `b` does not divide `a`.
    """
    quotient, rest = divmod(a, b)
    if rest:
        raise ValueError(f"{b} does not divide {a}")
    return quotient
