"""Prints what pip has to install before jaxmoe itself is built: build requirements, dependencies, chosen extras.

Usage: python tools/requirements.py demo,test

Installing them all in one go, ahead of the build, makes one choice of jaxlib for the extension's headers and for the
runtime. pip has no option for that: it builds a package before it installs what the package depends on.
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """Returns the requirements of the project with these extras, references to its own extras followed."""
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    project = pyproject["project"]
    optional = project["optional-dependencies"]
    unknown = sorted(set(extras) - set(optional))
    if unknown:
        raise SystemExit(f"requirements: no extra named {', '.join(unknown)}. Known: {', '.join(sorted(optional))}.")

    def expand(requirement: str) -> list[str]:
        own = re.fullmatch(rf"{project['name']}\[([\w,\s-]+)\]", requirement)
        if own is None:
            return [requirement]
        return [line for extra in own[1].split(",") for entry in optional[extra.strip()] for line in expand(entry)]

    wanted = [*pyproject["build-system"]["requires"], *project["dependencies"]]
    wanted += [line for extra in extras for entry in optional[extra] for line in expand(entry)]
    return list(dict.fromkeys(wanted))


if __name__ == "__main__":
    print("\n".join(requirements([extra for extra in sys.argv[1].split(",") if extra])))
