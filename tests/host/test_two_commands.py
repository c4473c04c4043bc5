"""What `make demo` and `make test` do before anything is downloaded: choose an interpreter, check the compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = [
    *("awk", "cat", "cksum", "cut", "date", "dirname", "find", "grep", "head", "ls", "mkdir", "mktemp"),
    *("rm", "sed", "sh", "sort", "tail", "tr", "xargs"),
]


@pytest.fixture
def machine(tmp_path):
    """A machine with nothing but a shell's usual tools; `add(name, script)` puts a program on its PATH."""

    class Machine:
        programs = tmp_path / "bin"
        venv = tmp_path / "venv"

        def add(self, name: str, script: str) -> Path:
            path = self.programs / name
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
            return path

        def add_python(self, name: str) -> Path:
            return self.add(name, f'exec "{sys.executable}" "$@"')

        def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
            environment = {"PATH": str(self.programs), "HOME": str(tmp_path), "VENV": str(self.venv), **variables}
            script = str(ROOT / "tools/environment.sh")
            return subprocess.run(["/bin/sh", script, *arguments], env=environment, capture_output=True, text=True)

    Machine.programs.mkdir()
    for tool in TOOLS:
        (Machine.programs / tool).symlink_to(shutil.which(tool) or pytest.skip(f"this machine has no {tool}"))
    return Machine()


def test_without_a_python_the_message_says_what_to_install(machine):
    result = machine.run()
    assert result.returncode == 1
    assert "no suitable Python" in result.stderr
    assert "apt install python3 python3-venv python3-dev" in result.stderr
    assert not machine.venv.exists()


def test_a_python_that_does_not_run_is_passed_over_for_one_that_does(machine):
    machine.add("python3.14", "echo 'this shim has no version behind it' >&2; exit 127")
    works = machine.add_python("python3")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert machine.run("pythons").stdout.splitlines() == [f"{version} {works}"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("sys.version_info = (3, 10, 13)", "it is cpython 3.10.13, needed is CPython 3.11 to 3."),
        ("sys.version_info = (3, 99, 0)", "it is cpython 3.99.0, needed is CPython 3.11 to 3."),
        ("sys.modules['ensurepip'] = None", "without the module ensurepip (Debian, Ubuntu: apt install python3-venv)"),
        ("sysconfig.get_path = lambda name: '/nowhere'", "without its header Python.h"),
        ("sys.exit(127)", "it does not run"),
    ],
    ids=["old", "too_new", "no_venv", "no_headers", "broken"],
)
def test_each_unsuitable_python_is_listed_with_its_reason(machine, tmp_path, change, complaint):
    (tmp_path / "sitecustomize.py").write_text(f"import sys, sysconfig\n{change}\n")
    path = machine.add("python3", f'PYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"')
    result = machine.run()
    assert result.returncode == 1
    assert f"{path}: it " in result.stderr
    assert complaint in result.stderr
    assert not machine.venv.exists()


def test_a_python_that_was_asked_for_is_used_or_refused_but_never_replaced(machine):
    machine.add_python("python3")
    result = machine.run(PYTHON="python9")
    assert result.returncode == 1
    assert "PYTHON=python9 is not a program" in result.stderr


def test_an_environment_of_another_python_than_the_one_asked_for_is_left_alone(machine):
    machine.add_python("python3")
    (machine.venv / "bin").mkdir(parents=True)
    (machine.venv / "bin/python").symlink_to(machine.add("other", "echo 3.99.0"))
    result = machine.run(PYTHON="python3")
    assert result.returncode == 1
    assert "holds Python 3.99.0, but PYTHON=python3 is 3." in result.stderr


@pytest.mark.parametrize(
    ("compiler", "complaint"), [(None, "no C++ compiler: g++ is not a program"), ("exit 1", "g++ cannot compile C++20")]
)
def test_without_a_cpp20_compiler_nothing_is_made(machine, compiler, complaint):
    machine.add_python("python3")
    if compiler is not None:
        machine.add("g++", compiler)
    result = machine.run()
    assert result.returncode == 1
    assert complaint in result.stderr
    assert not machine.venv.exists()


@pytest.mark.parametrize(("driver", "usable"), [("580.159.04", True), ("535.288.01", False)])
def test_a_gpu_counts_only_with_a_driver_that_runs_cuda_13(machine, driver, usable):
    machine.add("nvidia-smi", f'if [ "$1" = -L ]; then echo "GPU 0: NVIDIA Example"; else echo {driver}; fi')
    result = machine.run("gpu")
    assert (result.returncode == 0) == usable
    assert ("using the CPU" in result.stderr) == (not usable)


def test_a_driver_without_a_gpu_does_not_count(machine):
    machine.add("nvidia-smi", "echo 'No devices were found'; exit 6")
    assert machine.run("gpu").returncode == 1 or os.path.exists("/dev/nvidia0")


def test_an_environment_that_is_up_to_date_is_recognised_without_starting_python(machine, tmp_path):
    # Every Python here would fail, so success shows that the stamps alone decided.
    (machine.venv / "bin").mkdir(parents=True)
    (machine.venv / "bin/python").symlink_to(machine.add("python3", "exit 1"))
    stamps = machine.run("fingerprints").stdout.split()
    (machine.venv / ".packages-demo").write_text(stamps[0])
    (machine.venv / ".extension").write_text(stamps[1])
    assert machine.run(EXTRAS="demo").returncode == 0
    assert machine.run(EXTRAS="demo", JAXMOE_CUDA="off").returncode == 1, "another build was asked for"


def test_what_a_compiler_says_of_an_object_that_it_makes_is_kept_beside_it(tmp_path):
    said = tmp_path / "a.o.said"
    said.write_text("of the object before")

    def compile_with(script: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(ROOT / "tools/keep_output.sh"), "sh", "-c", script, "-c", "a.cu", "-o", "a.o"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = compile_with("echo a remark >&2")
    assert (done.returncode, done.stdout, said.read_text()) == (0, "a remark\n", "a remark\n")
    done = compile_with("echo an error; exit 3")
    assert (done.returncode, done.stdout) == (3, "an error\n")
    assert list(tmp_path.iterdir()) == []


def test_extras_of_extras_are_followed_and_unknown_ones_are_refused():
    def ask(extras: str) -> subprocess.CompletedProcess[str]:
        script = str(ROOT / "tools/requirements.py")
        return subprocess.run([sys.executable, script, extras], capture_output=True, text=True)

    lines = ask("wheel").stdout.splitlines()
    assert "nvidia-nvvm==13.0.88" in lines
    assert not [line for line in lines if line.startswith("jaxmoe")]
    assert "no extra named cuda12" in ask("cuda12").stderr


@pytest.mark.parametrize(
    ("driver", "asked", "given"), [("500.1", None, "off"), ("580.1", None, "auto"), ("500.1", "on", "on")]
)
def test_make_builds_the_cuda_part_where_a_gpu_can_be_used_or_it_is_asked_for(machine, driver, asked, given):
    make = shutil.which("make")
    assert make is not None
    machine.add("nvidia-smi", f'case $1 in -L) echo "GPU 0: one" ;; *) echo {driver} ;; esac')
    environment = {"PATH": str(machine.programs), **({"JAXMOE_CUDA": asked} if asked else {})}
    command = [make, "--silent", "--eval=tell: ; @echo $(JAXMOE_CUDA) $$JAXMOE_CUDA", "tell"]
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [given, given], "of make, and of what it starts"
