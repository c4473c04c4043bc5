"""The text: the source files of Python's own standard library, as bytes, a part to train on and a part held out.

Held out are whole files, chosen by a hash of their name: the same files in every run and on every machine, and a file
keeps its side when others come or go.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int32, UInt8

NUM_BYTES = 256
# One file in this many is held out.
HELD_OUT_SHARE = 8
MIN_BYTES = 2**16
# Not part of the library, or not written by people (tables of code pages, generated documentation), or tests: their
# repetitions give a low loss to a model that has not learned much.
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes of all files of one side, one after the other.

    Args:
      content: the bytes.
      num_files: how many files they are from.
    """

    content: UInt8[np.ndarray, " length"]
    num_files: int

    def windows(self, starts: Int32[np.ndarray, " windows"], length: int) -> Int32[np.ndarray, "windows length"]:
        """Returns the `length` bytes that follow each start."""
        return self.content[starts[:, None] + np.arange(length)].astype(np.int32)

    def random_windows(self, rng: np.random.Generator, count: int, length: int) -> Int32[np.ndarray, "count length"]:
        """Returns windows that start anywhere."""
        return self.windows(rng.integers(0, len(self.content) - length, count, dtype=np.int32), length)

    def spread_windows(self, count: int, length: int) -> Int32[np.ndarray, "count length"]:
        """Returns windows spread evenly over the bytes, the same in every call."""
        return self.windows(np.linspace(0, len(self.content) - length, count, dtype=np.int32), length)

    def windows_before(self, ending: bytes, count: int, length: int) -> Int32[np.ndarray, "count length"]:
        """Returns windows that end with `ending`, spread evenly over its occurrences.

        Raises:
          ValueError: `ending` does not occur.
        """
        text, ends, at = self.content.tobytes(), [], -1
        while (at := text.find(ending, at + 1)) >= 0:
            if at + len(ending) >= length:
                ends.append(at + len(ending))
        if not ends:
            raise ValueError(f"windows_before: {ending!r} does not occur after the first {length} bytes of the corpus.")
        chosen = np.linspace(0, len(ends) - 1, count + 2, dtype=np.int32)[1:-1]
        return self.windows(np.asarray(ends, np.int32)[chosen] - np.int32(length), length)


def is_held_out(name: str) -> bool:
    """Returns whether a file, named by its path below the library's folder, is held out."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_SHARE == 0


def library_folder() -> Path:
    """Returns the folder of the standard library of the running Python."""
    return Path(os.__file__).parent


def source_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields `(name, path)` of the Python files below a folder in a fixed order; the name has forward slashes."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - EXCLUDED_FOLDERS)
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(parent, file)
                yield path.relative_to(folder).as_posix(), path


def read(folder: Path) -> tuple[Corpus, Corpus]:
    """Returns the text to train on and the text that is held out.

    Args:
      folder: where the files are, usually `library_folder()`.

    Raises:
      FileNotFoundError: there is not enough text for either.
    """
    texts: tuple[list[bytes], list[bytes]] = ([], [])
    for name, path in source_files(folder):
        texts[is_held_out(name)].append(path.read_bytes())
    train, held_out = (Corpus(np.frombuffer(b"\n".join(side), np.uint8), len(side)) for side in texts)
    if min(len(train.content), len(held_out.content)) < MIN_BYTES:
        raise FileNotFoundError(
            f"found {len(train.content)} bytes to train on and {len(held_out.content)} held out in *.py files below "
            f"{folder}; the demo needs {MIN_BYTES} of each. Use a Python that has its standard library as source files."
        )
    return train, held_out


def unigram_loss(train: Corpus, held_out: Corpus) -> float:
    """Returns the held-out loss, in nats per byte, of a model that knows only how frequent each byte is."""
    counts = np.bincount(train.content, minlength=NUM_BYTES) + 1.0
    held_out_counts = np.bincount(held_out.content, minlength=NUM_BYTES)
    return float(-np.sum(held_out_counts * np.log(counts / counts.sum())) / held_out_counts.sum())
