"""Compares the machine code of the kernels of two source trees, names and addresses aside.

Usage: python tools/compare_kernels.py BEFORE AFTER      exit status 1 where a kernel differs
       python tools/compare_kernels.py --save FILE TREE  keeps the code of a tree, to be compared with later

BEFORE and AFTER are folders of the project or files that --save has written. A change that only moves or renames
leaves every kernel the same; one that does not shows here before anything runs on a GPU. Compiled are the files of
ffi/cuda/host/variants, some of them with --kernels, with the flags that the installed jaxmoe was built with;
--timeline compiles the recorder in.
"""

import argparse
import fnmatch
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

import jaxmoe.machine as machine

TIMELINE = "-DJAXMOE_TIMELINE"
TITLE = "== "

# The instructions of every kernel, one a line, with their encodings and without names. Kernels have the names of files.
Code = dict[str, list[str]]


def fail(text: str) -> SystemExit:
    return SystemExit(f"compare_kernels: {text}")


def sources_of(tree: Path, pattern: str) -> list[Path]:
    """The files of a tree that hold a kernel each, of those whose names a pattern allows."""
    found = sorted((tree / "ffi/cuda/host/variants").glob("*.cu"))
    if not found:
        raise fail(f"no kernels in {tree}/ffi/cuda/host/variants. Name a folder of the project.")
    names = chosen((source.stem for source in found), pattern)
    return [source for source in found if source.stem in names]


def chosen(kernels: Iterable[str], pattern: str) -> list[str]:
    """Those that a pattern allows, at least one."""
    found = list(kernels)
    names = fnmatch.filter(found, pattern)
    if not names:
        raise fail(f"--kernels={pattern} names none of {', '.join(found)}.")
    return names


def compile_tree(tree: Path, pattern: str, timeline: bool) -> Code:
    """Compiles kernels of a tree and returns their code."""
    built = machine.build_info()
    if built.nvcc is None or built.nvcc_flags is None:
        raise fail(f"the CUDA part of this jaxmoe was not built: {built.cuda_missing}")
    nvcc = built.nvcc
    disassembler = shutil.which("cuobjdump", path=str(Path(nvcc).parent)) or shutil.which("cuobjdump")
    if disassembler is None:
        raise fail("it needs cuobjdump (the extra 'nvcc', or a CUDA toolkit).")
    flags = [flag for flag in shlex.split(built.nvcc_flags) if flag != TIMELINE] + [TIMELINE] * timeline
    flags += ["-I", str(tree / "ffi"), "-isystem", jax.ffi.include_dir()]

    def code_of_source(source: Path) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            if subprocess.run([nvcc, *flags, "-cubin", source, "-o", cubin], check=False).returncode != 0:
                raise fail(f"nvcc failed with {source}; what it said is above.")
            listing = subprocess.run([disassembler, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        return code_of(listing)

    sources = sources_of(tree, pattern)
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        return dict(zip((source.stem for source in sources), compilers.map(code_of_source, sources), strict=True))


def code_of(listing: str) -> list[str]:
    """The instructions that cuobjdump lists, of all functions in it."""
    lines: list[str] = []
    for line in listing.splitlines():
        instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s*(.*?)\s*/\* (0x[0-9a-f]+) \*/", line)
        rest = re.match(r"\s*/\* (0x[0-9a-f]+) \*/", line)
        if instruction:
            nameless = re.sub(r"`?[(]?[$.]?_Z\w+[)]?", "NAME", instruction[1])
            lines.append(f"{nameless}  {instruction[2]}")
        elif rest and lines:
            lines[-1] += f" {rest[1]}"
    return lines


def load(path: Path, pattern: str, timeline: bool) -> Code:
    """The code of a source tree or of a saved file."""
    if path.is_dir():
        return compile_tree(path, pattern, timeline)
    kernels: Code = {}
    lines: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith(TITLE):
            lines = kernels[line.removeprefix(TITLE)] = []
        else:
            lines.append(line)
    return {name: kernels[name] for name in chosen(kernels, pattern)}


def save(path: Path, kernels: Code) -> None:
    """Writes what load() reads."""
    listings = ("\n".join([TITLE + name, *code]) + "\n" for name, code in kernels.items())
    path.write_text("".join(listings))


def compare(before: Code, after: Code) -> Iterator[str]:
    """What to print of two trees, a kernel after the other."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            yield f"{name:28}  only {'after' if old is None else 'before'}"
        elif old == new:
            yield f"{name:28}  same, {len(new)} instructions"
        else:
            yield f"{name:28}  " + "\n".join(first_difference(old, new))


def first_difference(before: list[str], after: list[str]) -> Iterator[str]:
    """What to print of two kernels that are not the same."""

    def without_addresses(line: str) -> str:
        return re.sub(r"\b(BRA|BSSY|CALL|RET|WARPSYNC|BREAK)\b.*", r"\1", line.partition("  0x")[0])

    pairs = list(enumerate(itertools.zip_longest(before, after, fillvalue="")))
    other = [nth for nth, (old, new) in pairs if without_addresses(old) != without_addresses(new)]
    nth = other[0] if other else next(nth for nth, (old, new) in pairs if old != new)
    yield f"differs from instruction {nth} on; {len(before)} instructions before, {len(after)} after"
    for name, lines in ("before", before), ("after", after):
        for line in lines[max(nth - 2, 0) : nth + 3]:
            yield f"  {name:6} {line.partition('  0x')[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="BEFORE and AFTER; with --save one folder")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the code of the one folder here")
    parser.add_argument("--kernels", default="*", metavar="PATTERN", help="only those, such as 'forward_packed*'")
    parser.add_argument("--timeline", action="store_true", help="of kernels that record what every role does when")
    arguments = parser.parse_args()
    if len(arguments.paths) != (1 if arguments.save else 2):
        parser.error("needs BEFORE and AFTER, or --save FILE and one folder")
    codes = [load(path, arguments.kernels, arguments.timeline) for path in arguments.paths]
    if arguments.save:
        save(arguments.save, codes[0])
        return
    before, after = codes
    for text in compare(before, after):
        print(text)
    sys.exit(before != after)


if __name__ == "__main__":
    main()
