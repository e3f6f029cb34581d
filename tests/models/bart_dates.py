# SPDX-License-Identifier: Apache-2.0
"""What the BART in `tests/models/bart` was trained on: dates as people write them -> ISO dates."""

from __future__ import annotations

import datetime
import random

MONTHS = (
    "January February March April May June July August September October November December"
).split()
GERMAN_MONTHS = (
    "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
).split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()
_ORDINALS = (
    "- first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
).split()
_FIRST, _LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
# A date in this many is never trained with, in whatever form.
_HELD_OUT_ONE_IN = 10


def number_words(number: int) -> str:
    """0 to 99 in words."""
    if number < 20:
        return _ONES[number]
    return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")


def ordinal_words(number: int) -> str:
    """1 to 31 as first, second, ..."""
    if number <= 20:
        return _ORDINALS[number]
    if number == 30:
        return "thirtieth"
    return f"{_TENS[number // 10]}-{_ORDINALS[number % 10]}"


def year_words(year: int) -> str:
    """1900 to 2099 as it is said."""
    century, rest = divmod(year, 100)
    if rest == 0:
        return "two thousand" if century == 20 else "nineteen hundred"
    if century == 20 and rest < 10:
        return f"two thousand and {number_words(rest)}"
    small = f"oh {number_words(rest)}" if rest < 10 else number_words(rest)
    return f"{number_words(century)} {small}"


def _suffix(day: int) -> str:
    return "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


def forms(date: datetime.date) -> list[str]:
    """The date in every form."""
    day, year, month = date.day, date.year, MONTHS[date.month - 1]
    weekday = WEEKDAYS[date.weekday()]
    return [
        f"{day} {month} {year}",
        f"{month} {day}, {year}",
        f"{month[:3]}. {day}, {year}",
        f"{day}-{month[:3]}-{year}",
        f"the {day}{_suffix(day)} of {month}, {year}",
        f"{weekday}, {day} {month} {year}",
        f"{weekday}, {month} {day}{_suffix(day)}, {year}",
        f"{day:02}.{date.month:02}.{year}",
        f"{day}/{date.month}/{year}",
        f"{year}/{date.month:02}/{day:02}",
        f"{year}{date.month:02}{day:02}",
        f"{day}. {GERMAN_MONTHS[date.month - 1]} {year}",
        f"the {ordinal_words(day)} of {month}, {year_words(year)}",
        f"{month} the {ordinal_words(day)}, {year_words(year)}",
        f"{month} {ordinal_words(day)} in the year {year}",
    ]


_SENTENCES = (
    "{}",
    "{}",
    "We met on {}.",
    "The contract was signed on {} in Geneva.",
    "Please send the report before {}, thank you!",
    "Born: {}",
)


def example(rng: random.Random, held_out: bool) -> tuple[str, str]:
    """(text, ISO date), of the dates that are held out or of the others."""
    while True:
        ordinal = rng.randint(_FIRST.toordinal(), _LAST.toordinal())
        # 7 is coprime to the length of a week and of a month: every kind of day is held out.
        if (ordinal * 7 % _HELD_OUT_ONE_IN == 3) == held_out:
            break
    date = datetime.date.fromordinal(ordinal)
    return rng.choice(_SENTENCES).format(rng.choice(forms(date))), date.isoformat()


def examples(count: int, seed: int, held_out: bool) -> list[tuple[str, str]]:
    """The same `count` examples each time."""
    rng = random.Random(seed)
    return [example(rng, held_out) for _ in range(count)]
