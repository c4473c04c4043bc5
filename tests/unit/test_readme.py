"""The README's examples run as they stand, and its links lead somewhere."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
        assert names["y"].shape == (1024, 256)
        assert bool(np.isfinite(np.asarray(names["y"])).all())
    assert abs(float(names["error"]) - 0.06) < 0.01
    assert names["mesh"].size == jax.device_count() == 8


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/exchange.md",
        "docs/performance.md",
        "docs/reliability.md",
        *(f"ffi/{page}.md" for page in ("README", "kernel", "memory", "build")),
    ],
)
def test_every_relative_link_leads_to_a_file(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), f"{document}: {target}"
