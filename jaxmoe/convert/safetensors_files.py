"""The tensors of safetensors files as a mapping of names to NumPy arrays, mapped from the files and not read yet.

A file is 8 bytes with the length of a header, the header in JSON (for each name a dtype, a shape, and where its bytes
lie behind the header), and those bytes, little-endian and row by row. The `safetensors` package (0.8.0) gives NumPy no
array in 8 bits, so this reads the header itself: `from_hf` takes one expert at a time out of mapped files.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

INDEX = "model.safetensors.index.json"
# Of the format's own reader: a longer header is no header.
LONGEST_HEADER = 100_000_000
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class _Entry(NamedTuple):
    """What a header says of a tensor; the bytes are counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFiles(Mapping[str, Any]):
    """The tensors of one or several files. `files[name]` is read-only and costs no memory until it is read.

    Files are opened when one of their tensors is asked for, so that of a large checkpoint only those with a layer's
    tensors are. What has been read stays in the system's file cache, from where it goes when memory is needed.
    """

    def __init__(self, file_of: Mapping[str, Path]) -> None:
        """`file_of` says for each tensor which file it is in."""
        self._file_of = dict(file_of)
        self._opened: dict[Path, tuple[np.ndarray, dict[str, _Entry]]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> np.ndarray:
        path = self._file_of[name]
        if path not in self._opened:
            entries = _header(path)  # before it is mapped, which an empty file cannot be
            self._opened[path] = np.asarray(np.memmap(path, np.uint8, "r")), entries
        content, entries = self._opened[path]
        if name not in entries:
            raise ValueError(f"{path}: has no tensor {name!r}, which {INDEX} says is there. Download both again.")
        dtype, shape, start, stop = entries[name]
        if dtype not in DTYPES:
            raise TypeError(f"{path}: tensor {name!r} is of dtype {dtype}, which is none of {', '.join(DTYPES)}.")
        return content[start:stop].view(DTYPES[dtype]).reshape(shape)


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFiles:
    """Returns the tensors of a checkpoint: a mapping of names to NumPy arrays that are not read until they are used.

    Args:
      path: a `.safetensors` file, or a directory: the files that its `model.safetensors.index.json` lists, and without
        one all `.safetensors` files that lie in it; or such an index itself.

    Raises:
      FileNotFoundError: there is no such file, or not all of those that the index lists.
      ValueError: a file is not what the format says, for example because it ends too early.

    >>> import pathlib, tempfile
    >>> header = b'{"w": {"dtype": "F8_E4M3", "shape": [1, 2], "data_offsets": [0, 2]}}'
    >>> file = pathlib.Path(tempfile.mkdtemp(), "model.safetensors")
    >>> size = file.write_bytes(len(header).to_bytes(8, "little") + header + bytes([56, 64]))
    >>> open_safetensors(file.parent)["w"].astype(float)
    array([[1., 2.]])
    """
    path = Path(path)
    index = path if path.name.endswith(".index.json") else path / INDEX
    if index.is_file():
        return SafetensorsFiles(_listed(index))
    if path.is_file():
        return SafetensorsFiles(dict.fromkeys(_header(path), path))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{path}: is neither a .safetensors file nor a directory with any. Pass the directory of a checkpoint "
            "that has been downloaded."
        )
    file_of: dict[str, Path] = {}
    for file in files:
        for name in _header(file):
            if name in file_of:
                raise ValueError(
                    f"{path}: tensor {name!r} is in {file_of[name].name} and in {file.name}, and there is no {INDEX} "
                    "that says which to take. Pass one of the files, or a directory of one checkpoint."
                )
            file_of[name] = file
    return SafetensorsFiles(file_of)


def _listed(index: Path) -> dict[str, Path]:
    """Returns which file each tensor of an index is in; all of them are there."""
    folder = index.parent
    try:
        file_of = {name: folder / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index}: is no index of safetensors files, which has a weight_map from tensors to files: it cannot be "
            f"read ({error!r}). Download it again."
        ) from error
    if missing := sorted({file.name for file in file_of.values() if not file.is_file()}):
        raise FileNotFoundError(
            f"{index}: lists {len(set(file_of.values()))} files, of which {len(missing)} are not there: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Download them into {folder}."
        )
    return file_of


def _header(path: Path) -> dict[str, _Entry]:
    """Returns the entries of a file's header, which lie within the file and have the bytes of their shapes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise ValueError(
                f"{path}: is no whole safetensors file: {size} bytes, and its first 8 say that {length} bytes of "
                "header follow. Download it again; a file of about 130 bytes is a pointer of Git LFS."
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {
                name: _Entry(entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"]))
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: is no safetensors file: its header cannot be read ({error!r}).") from error
    for name, (dtype, shape, start, stop) in entries.items():
        if stop > size:
            raise ValueError(
                f"{path}: ends at byte {size}, and tensor {name!r} lies up to byte {stop}. Download the file again."
            )
        if dtype in DTYPES and stop - start != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
            raise ValueError(f"{path}: tensor {name!r}, {dtype} {list(shape)}, cannot have {stop - start} bytes.")
    return entries
