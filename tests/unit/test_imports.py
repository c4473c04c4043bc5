"""Imports run in the order in which the files are read: a caller knows what it calls, never the other way round."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALLERS = ("api", "call", "explain", "plan", "flax", "nnx", "linen", "testing", "bench", "demo", "profiling")


def imported_by(path: Path) -> set[str]:
    """Modules that a file names in its imports, and what it takes from them, such as `jaxmoe.native`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def of_jaxmoe(file: str) -> set[str]:
    return {name for name in imported_by(ROOT / "jaxmoe" / file) if within(name, "jaxmoe")}


def within(name: str, *packages: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def test_implementations_know_neither_their_callers_nor_each_other():
    folder = ROOT / "jaxmoe" / "implementations"
    strangers = {"xla": ["megakernel"], "megakernel": ["xla"], "": ["megakernel", "xla"]}
    for path in sorted(folder.rglob("*.py")):
        own = path.relative_to(folder).parts[0] if path.parent != folder else ""
        forbidden = [f"jaxmoe.{caller}" for caller in CALLERS]
        if path != folder / "__init__.py":
            forbidden += [f"jaxmoe.implementations.{other}" for other in strangers[own]]
        against = {name for name in imported_by(path) if within(name, *forbidden)}
        assert not against, f"{path.relative_to(ROOT)} imports {sorted(against)}"


def test_what_loads_compiled_code_imports_nothing_of_jaxmoe_and_what_asks_it_for_facts_only_that():
    assert of_jaxmoe("native.py") == set()
    assert of_jaxmoe("machine.py") == {"jaxmoe.native"}


def test_what_both_flax_layers_wrap_imports_no_flax():
    for path in sorted((ROOT / "jaxmoe" / "flax").glob("*.py")):
        assert not any(within(name, "flax") for name in imported_by(path)), path
