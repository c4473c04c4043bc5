"""Compares the machine code of the kernels of two source trees, names and addresses aside.

Usage: python tools/compare_kernels.py BEFORE AFTER      exit status 1 where a kernel differs
       python tools/compare_kernels.py --save FILE TREE  keeps the code of a tree, to be compared with later

BEFORE and AFTER are folders of the project or files that --save has written. A change that only moves or renames
leaves every kernel the same; one that does not shows here before anything runs on a GPU. Compiled are the files of
cuda/host/variants (of older trees launch.cu), with the flags that the installed jaxmoe was built with; --timeline
compiles the recorder in.
"""

import argparse
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

import jaxmoe.machine as machine

TIMELINE = "-DJAXMOE_TIMELINE"
KERNELS = ("forward bf16", "forward f16", "backward bf16", "backward f16")
TITLE = "== "


def kernel_of(symbol: str) -> str:
    """Which kernel a mangled name stands for. Its parameters and template arguments may be called anything."""
    symbol = symbol.lower()
    return f"{'backward' if 'backward' in symbol else 'forward'} {'bf16' if 'bf16' in symbol else 'f16'}"


def disassemble(tree: Path, timeline: bool) -> str:
    """Compiles the kernels of a tree and returns what cuobjdump says of them."""
    sources = sorted((tree / "ffi/cuda/host/variants").glob("*.cu")) or sorted((tree / "ffi/cuda").rglob("launch.cu"))
    if not sources:
        raise SystemExit(f"compare_kernels: no kernels under {tree}/ffi/cuda. Name a folder of the project.")
    built = machine.build_info()
    if built.nvcc is None or built.nvcc_flags is None:
        raise SystemExit(f"compare_kernels: the CUDA part of this jaxmoe was not built: {built.cuda_missing}")
    beside = str(Path(built.nvcc).parent)
    disassembler = shutil.which("cuobjdump", path=beside) or shutil.which("cuobjdump")
    if disassembler is None:
        raise SystemExit("compare_kernels: needs cuobjdump (the extra 'nvcc', or a CUDA toolkit).")
    flags = [flag for flag in shlex.split(built.nvcc_flags) if flag != TIMELINE] + [TIMELINE] * timeline
    flags += ["-I", str(tree / "ffi"), "-isystem", jax.ffi.include_dir()]
    with tempfile.TemporaryDirectory() as folder:
        cubins = [Path(folder) / f"{source.stem}.cubin" for source in sources]
        compiling = [
            subprocess.Popen([built.nvcc, *flags, "-cubin", source, "-o", cubin])
            for source, cubin in zip(sources, cubins, strict=True)
        ]
        statuses = [compiler.wait() for compiler in compiling]
        if any(statuses):
            raise SystemExit("compare_kernels: nvcc failed; what it said is above.")
        told = (subprocess.run([disassembler, "-sass", each], capture_output=True, text=True) for each in cubins)
        return "".join(each.stdout for each in told)


def code_of(listing: str) -> dict[str, list[str]]:
    """The instructions of every kernel, one a line, with their encodings and without names."""
    kernels = {}
    for part in listing.split("Function : ")[1:]:
        symbol, _, body = part.partition("\n")
        lines = []
        for line in body.splitlines():
            instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s*(.*?)\s*/\* (0x[0-9a-f]+) \*/", line)
            rest = re.match(r"\s*/\* (0x[0-9a-f]+) \*/", line)
            if instruction:
                nameless = re.sub(r"`?[(]?[$.]?_Z\w+[)]?", "NAME", instruction[1])
                lines.append(f"{nameless}  {instruction[2]}")
            elif rest and lines:
                lines[-1] += f" {rest[1]}"
        kernels[kernel_of(symbol)] = lines
    if sorted(kernels) != sorted(KERNELS):
        raise SystemExit(f"compare_kernels: found the kernels {sorted(kernels)}. They need to be {sorted(KERNELS)}.")
    return kernels


def load(path: Path, timeline: bool) -> dict[str, list[str]]:
    """The code of a source tree or of a saved file."""
    if path.is_dir():
        return code_of(disassemble(path, timeline))
    kernels: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith(TITLE):
            lines = kernels[line.removeprefix(TITLE)] = []
        else:
            lines.append(line)
    return kernels


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
    parser.add_argument("--timeline", action="store_true", help="of kernels that record what every role does when")
    arguments = parser.parse_args()
    if len(arguments.paths) != (1 if arguments.save else 2):
        parser.error("needs BEFORE and AFTER, or --save FILE and one folder")
    codes = [load(path, arguments.timeline) for path in arguments.paths]
    if arguments.save:
        arguments.save.write_text("".join(f"{TITLE}{name}\n" + "\n".join(codes[0][name]) + "\n" for name in KERNELS))
        return
    before, after = codes
    for name in KERNELS:
        if before[name] == after[name]:
            print(f"{name:13}  same, {len(after[name])} instructions")
        else:
            print(f"{name:13}  " + "\n".join(first_difference(before[name], after[name])))
    sys.exit(before != after)


if __name__ == "__main__":
    main()
