"""Builds the CUDA part with some sources of another checkout, and everything else as this environment has built it.

Usage: python tools/link_kernels.py TREE _cuda.NAME.so --sources='variants/forward_packed*' [--sources=launch.cu]
           [--option=-DNAME=VALUE ...]

TREE is a folder of the project; a source is named as in its ffi/cuda/host. A kernel takes less than a minute that way,
the whole part several. Printed are the files of ffi that differ between TREE and the checkout that this environment was
built from: what includes them and is not compiled here is still the old one. tools/compare_builds.py times the result
beside others.
"""

import argparse
import filecmp
import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HOST = "cuda/host"
OBJECT = re.compile(r"CMakeFiles/_cuda\.dir/(\S+)\.o\b")


def fail(text: str) -> SystemExit:
    return SystemExit(f"link_kernels: {text}")


class Commands(NamedTuple):
    """Of a build of the CUDA part: what compiles each source, by its name in ffi, and what links them."""

    compile: dict[str, str]
    link: str

    @classmethod
    def of(cls, lines: list[str]) -> "Commands":
        """Reads what `ninja -t commands` lists."""
        of_sources = {}
        for line in lines[:-1]:
            if found := re.search(r"-o CMakeFiles/_cuda\.dir/(\S+)\.o\b", line):
                of_sources[found[1]] = line
        if not of_sources or not OBJECT.search(lines[-1]):
            raise fail("the environment has no build of the CUDA part: JAXMOE_CUDA=on make environment makes one.")
        return cls(of_sources, lines[-1])

    def chosen(self, patterns: list[str]) -> list[str]:
        """The sources that patterns name, each of them at least one."""
        found: list[str] = []
        for pattern in patterns:
            names = [name for name in self.compile if fnmatch.fnmatch(name, f"{HOST}/{pattern}")]
            if not names:
                raise fail(f"--sources={pattern} names none of {', '.join(self.compile)}.")
            found += [name for name in names if name not in found]
        return found

    def compile_from(self, source: str, before: Path, tree: Path, target: Path, options: list[str]) -> str:
        """The command that compiles a source of the ffi folder `tree` in the place of that of `before`."""
        command = re.sub(r"-MD -MT \S+ -MF \S+", "", self.compile[source])
        command = command.replace(f"-o CMakeFiles/_cuda.dir/{source}.o", f"-o {shlex.quote(str(target))}")
        command = re.sub(rf"{re.escape(str(before))}(?=[/ ])", str(tree), command)
        return shlex.join([*shlex.split(command), *options])

    def link_with(self, objects: dict[str, Path], out: Path) -> str:
        """The command that links these objects in the place of those of their sources."""
        command = OBJECT.sub(lambda found: shlex.quote(str(objects.get(found[1], found[0]))), self.link)
        return re.sub(r"-o \S+", f"-o {shlex.quote(str(out))}", command, count=1)


def read_build(folder: Path) -> tuple[Commands, Path]:
    """The commands of a build folder, and the ffi folder that it is of."""
    cache = folder / "CMakeCache.txt"
    home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache.read_text() if cache.exists() else "", re.MULTILINE)
    ninja = shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which("ninja")
    if home is None or ninja is None:
        raise fail(f"it needs ninja, and the environment of the project, whose build would lie in {folder}.")
    listed = subprocess.run([ninja, "-C", folder, "-t", "commands"], capture_output=True, text=True, check=True).stdout
    of_part = [line for line in listed.splitlines() if "CMakeFiles/_cuda.dir/" in line]
    return Commands.of(of_part or [""]), Path(home[1])


def differences(before: Path, after: Path) -> Iterator[str]:
    """Names of the files of two ffi folders that one of them lacks or that differ."""
    names = {str(path.relative_to(root)) for root in (before, after) for path in root.rglob("*") if path.is_file()}
    for name in sorted(names):
        both = (before / name).is_file() and (after / name).is_file()
        if not both or not filecmp.cmp(before / name, after / name, shallow=False):
            yield name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("out", type=Path, help="the name begins with _cuda.")
    parser.add_argument("--sources", action="append", required=True, metavar="PATTERN")
    parser.add_argument("--option", action="append", default=[], help="of the compiler, for these sources")
    arguments = parser.parse_args()
    if not arguments.out.name.startswith("_cuda."):
        raise fail(f"{arguments.out.name} would not be found as the module _cuda: name it _cuda.NAME.so.")
    tree, build = arguments.tree.resolve() / "ffi", Path(sys.prefix) / "build"
    if not tree.is_dir():
        raise fail(f"{arguments.tree} is no folder of the project: it has no ffi.")
    commands, before = read_build(build)
    sources = commands.chosen(arguments.sources)
    for name in differences(before, tree):
        print(f"differs: {name}")
    with tempfile.TemporaryDirectory() as folder:
        objects = {source: Path(folder) / f"{nth}.o" for nth, source in enumerate(sources)}

        def compile_source(source: str) -> int:
            command = commands.compile_from(source, before, tree, objects[source], arguments.option)
            return subprocess.run(command, shell=True, cwd=build, check=False).returncode

        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            statuses = dict(zip(sources, compilers.map(compile_source, sources), strict=True))
        failed = [source for source, status in statuses.items() if status != 0]
        if failed:
            raise fail(f"{', '.join(failed)} did not compile; what the compiler said is above.")
        subprocess.run(commands.link_with(objects, arguments.out.resolve()), shell=True, cwd=build, check=True)
    print(f"{arguments.out}: {', '.join(sources)} of {arguments.tree}")


if __name__ == "__main__":
    main()
