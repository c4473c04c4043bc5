"""Integers of users' arguments, which may be of any type that is one."""

import operator
from typing import Any


def integer(value: Any) -> int | None:
    """Returns an integer of any type as int; `None` for anything else, `True` included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
