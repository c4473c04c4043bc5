"""What all benchmarks do with a line: the first process prints it, and appends it to a file."""

from pathlib import Path

import jax


def say(text: str) -> None:
    """Prints in the first process alone."""
    if jax.process_index() == 0:
        print(text, flush=True)


def open_first(path: Path | None) -> None:
    """Makes the file of results where there is none yet, in the first process, before anything is measured.

    Raises:
      ValueError: nothing can be added to it.
    """
    try:
        if path is not None and jax.process_index() == 0:
            path.open("a").close()
    except OSError as error:
        raise ValueError(f"--json={path}: {error.strerror}. Name a file of a folder that is there.") from None


def append(path: Path | None, line: str) -> None:
    """Appends a line to a file, in the first process, where there is a file."""
    if path is not None and jax.process_index() == 0:
        with path.open("a") as file:
            file.write(line + "\n")
