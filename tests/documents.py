"""The Python blocks of the repository's pages, which tests run as they stand."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def python_blocks(page: str) -> list[str]:
    """Returns the blocks of a page, by its path in the repository."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


def run_page(page: str) -> dict[str, Any]:
    """Runs the blocks of a page one after the other, and returns the names that they have made."""
    names: dict[str, Any] = {}
    for block in python_blocks(page):
        exec(compile(block, page, "exec"), names)
    return names
