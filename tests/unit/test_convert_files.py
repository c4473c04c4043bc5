"""The reader of safetensors files: what the format's own package writes, and files that are broken."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from jaxmoe.convert import open_safetensors
from jaxmoe.convert.placing import copy
from jaxmoe.convert.safetensors_files import DTYPES, INDEX

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def random(rng: Any, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns any bits that a type can have."""
    dtype = np.dtype(DTYPES[kind])
    if kind == "BOOL":
        return np.array(rng.integers(0, 2, shape), bool)
    count = int(np.prod(shape)) * dtype.itemsize
    return rng.integers(0, 256, count).astype(np.uint8).view(dtype).reshape(shape)


@given(kinds=st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=6), seed=st.integers(0, 9))
def test_every_type_and_shape_is_read_as_the_package_of_the_format_wrote_it(kinds, seed, tmp_path_factory):
    rng = np.random.default_rng(seed)
    written = {f"layer.{number}": random(rng, kind, shape) for number, (kind, shape) in enumerate(kinds)}
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    save_file(written, path, metadata={"format": "pt"})
    read = open_safetensors(path)
    assert (sorted(read), len(read)) == (sorted(written), len(written))
    for name, array in written.items():
        assert name in read
        assert (read[name].dtype, read[name].shape, read[name].tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert not read[name].flags.writeable


def test_a_directory_is_read_by_its_index_or_all_of_its_files(tmp_path):
    a, b, c = (np.arange(3.0) + number for number in range(3))
    save_file({"a": a}, tmp_path / "1.safetensors")
    save_file({"b": b}, tmp_path / "2.safetensors")
    np.testing.assert_array_equal(open_safetensors(str(tmp_path))["b"], b)
    assert list(open_safetensors(tmp_path)) == ["a", "b"]
    # The files of another format of the same model, as some directories have them.
    save_file({"a": c}, tmp_path / "consolidated.safetensors")
    with pytest.raises(ValueError, match=r"'a' is in 1.safetensors and in consolidated.safetensors"):
        open_safetensors(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    np.testing.assert_array_equal(open_safetensors(tmp_path)["a"], a)
    with pytest.raises(KeyError):
        open_safetensors(tmp_path)["c"]


def test_what_a_download_has_left_out_is_said(tmp_path):
    save_file({"a": np.ones(3)}, tmp_path / "1.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"lists 2 files, of which 1 are not there: 2\.safetensors\. Download"):
        open_safetensors(tmp_path)
    save_file({"c": np.ones(3)}, tmp_path / "2.safetensors")
    with pytest.raises(ValueError, match=r"2\.safetensors: has no tensor 'b', which .* says is there"):
        open_safetensors(tmp_path)["b"]


def test_an_index_stands_for_its_directory(tmp_path):
    save_file({"a": np.arange(3.0), "left out": np.ones(1)}, tmp_path / "1.safetensors")
    index = tmp_path / "fp16.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    read = open_safetensors(index)
    assert list(read) == ["a"]
    np.testing.assert_array_equal(read["a"], np.arange(3.0))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"metadata": {}}', "KeyError.*weight_map"),
        ('["weight_map"]', "TypeError"),
        ('{"weight_map": ["a"]}', "AttributeError"),
        ('{"weight_map": {"a": 1}}', "TypeError"),
        ('{"weight_map": {"a": "1.safe', "JSONDecodeError"),
        (b"\xff\xfe\xff", "UnicodeDecodeError"),
    ],
)
@pytest.mark.parametrize("given", ["", INDEX])
def test_an_index_that_is_broken_is_an_error_that_names_the_file(content, told, given, tmp_path):
    (tmp_path / INDEX).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"{INDEX}: is no index .* a weight_map .*\({told}.*Download it again"):
        open_safetensors(tmp_path / given)


def header_of(**entry: Any) -> bytes:
    header = json.dumps({"w": entry}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize("spaces", range(4))
def test_tensors_may_begin_at_any_byte(spaces, tmp_path):
    wanted = np.arange(6, dtype=np.float32).reshape(2, 3)
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode() + b" " * spaces
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + wanted.tobytes())
    read = open_safetensors(tmp_path)["w"]
    np.testing.assert_array_equal(read, wanted)
    copied = np.empty((3, 2), np.float32)
    copy(copied, read.T)
    np.testing.assert_array_equal(copied, wanted.T)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is no whole safetensors file: 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
        (save({"w": np.ones(100)})[:-1], r"ends at byte \d+, and tensor 'w' lies up to byte \d+. Download"),
        (save({"w": np.ones(100)})[:20], "bytes of header follow"),
        (b"\x04" + bytes(7) + b"null", "its header cannot be read"),
        (b"\x04" + bytes(7) + b"{{{{", "its header cannot be read"),
        (header_of(dtype="F32", shape=[2]), "its header cannot be read .*data_offsets"),
        (header_of(dtype="F32", shape=[2], data_offsets=[0, 4]) + bytes(4), r"F32 \[2\], cannot have 4 bytes"),
        (header_of(dtype="F4", shape=[2], data_offsets=[0, 1]) + b"\x21", "is of dtype F4, which is none of F64"),
    ],
)
def test_a_file_that_is_broken_is_an_error_that_says_how(content, told, tmp_path):
    path: Path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises((ValueError, TypeError), match=f"w.safetensors: .*{told}"):
        open_safetensors(path)["w"]


def test_an_empty_file_that_an_index_lists_is_named(tmp_path):
    save_file({"one": np.ones(1)}, tmp_path / "one.safetensors")
    (tmp_path / "other.safetensors").touch()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"one": "one.safetensors", "two": "other.safetensors"}}))
    files = open_safetensors(tmp_path)
    assert files["one"].tolist() == [1]
    with pytest.raises(ValueError, match=r"other\.safetensors: is no whole safetensors file: 0 bytes"):
        files["two"]
