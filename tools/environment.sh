#!/bin/sh
# Makes the virtual environment that the Makefile's commands run in, or leaves it alone where it is up to date.
#
#   tools/environment.sh                make or update it
#   tools/environment.sh pythons        list the suitable interpreters, newest first: "<major.minor> <path>"
#   tools/environment.sh gpu            exit 0 where an NVIDIA GPU can be used
#   tools/environment.sh fingerprints   print what the two stamps would hold
#
# Read from the environment: VENV (folder), PYTHON (interpreter; empty: the newest suitable one), EXTRAS (extras of
# pyproject.toml), CXX, JAXMOE_CUDA, JAXMOE_NVCC and JAXMOE_TIMELINE, which ffi/build.md explains, and JAXMOE_UV (path of
# uv, which installs the packages in a few seconds, by its own settings instead of pip's; empty: pip does).
#
# Two steps with a stamp each: packages (depends on pyproject.toml and EXTRAS) and the extension (depends on ffi/, the
# build's variables and the packages). Stamps hold checksums, not times, so that a checkout that touches files rebuilds
# nothing. Python files are used from where they lie; editing them needs no step.
set -u

OLDEST_MINOR=11
NEWEST_MINOR=14   # the newest Python 3 for which jaxlib has wheels
OLDEST_DRIVER=580 # the oldest NVIDIA driver that runs CUDA 13

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-}
EXTRAS=${EXTRAS:-demo,test}
LOG=$VENV/setup.log
OTHER_FOLDER="Remove that folder or name another: VENV=<folder>."

fail() {
    printf 'jaxmoe: %s\n' "$@" >&2
    exit 1
}

# ---------------------------------------------------------------- interpreters

# Prints "ok <version>", or what is wrong with the interpreter $1. Its text must parse in any Python 3.
check_python() {
    "$1" - "$OLDEST_MINOR" "$NEWEST_MINOR" 2>/dev/null <<'END' || echo "it does not run"
import sys
version = "%d.%d.%d" % sys.version_info[:3]
oldest, newest = int(sys.argv[1]), int(sys.argv[2])
if sys.implementation.name != "cpython" or not (3, oldest) <= sys.version_info[:2] <= (3, newest):
    print("it is %s %s, needed is CPython 3.%d to 3.%d" % (sys.implementation.name, version, oldest, newest))
    sys.exit()
import importlib.util, os, sysconfig
for module in "venv", "ensurepip":
    if importlib.util.find_spec(module) is None:
        print("it is %s without the module %s (Debian, Ubuntu: apt install python3-venv)" % (version, module))
        sys.exit()
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("it is %s without its header Python.h (Debian, Ubuntu: apt install python3-dev)" % version)
    sys.exit()
print("ok " + version)
END
}

# Prints the paths to try, newest version first: every python3.N of PATH, not only the first of each name, since a
# version manager's shim may stand before one that works; the versions pyenv holds; then plain python3.
python_candidates() {
    pyenv_program=$(command -v pyenv || true) # <root>/bin/pyenv
    pyenv_root=${PYENV_ROOT:-${pyenv_program%/bin/pyenv}}
    minor=$NEWEST_MINOR
    while [ "$minor" -ge "$OLDEST_MINOR" ]; do
        executables_on_path "python3.$minor"
        ls -d "${pyenv_root:-${HOME:-}/.pyenv}/versions/3.$minor".*/bin/python3 2>/dev/null
        minor=$((minor - 1))
    done
    executables_on_path python3
}

executables_on_path() {
    (
        IFS=:
        for folder in $PATH; do
            if [ -f "$folder/$1" ] && [ -x "$folder/$1" ]; then echo "$folder/$1"; fi
        done
    )
}

# Prints "<version> <path>" of each suitable interpreter, newest first; only the first where $1 is "first".
# Prints the unsuitable ones with their reason to stderr.
suitable_pythons() {
    python_candidates | while read -r candidate; do
        verdict=$(check_python "$candidate")
        case $verdict in
        ok\ *)
            echo "${verdict#ok } $candidate"
            if [ "$1" = first ]; then break; fi
            ;;
        *) echo "  $candidate: $verdict" >&2 ;;
        esac
    done
}

choose_python() {
    if [ -n "$PYTHON" ]; then
        path=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON is not a program."
        verdict=$(check_python "$path")
        case $verdict in
        ok\ *) echo "${verdict#ok } $path" ;;
        *) fail "PYTHON=$PYTHON cannot be used: $verdict." ;;
        esac
        return
    fi
    rejected=$(mktemp)
    found=$(suitable_pythons first 2>"$rejected")
    if [ -z "$found" ]; then
        {
            echo "jaxmoe: no suitable Python. Needed: CPython 3.$OLDEST_MINOR to 3.$NEWEST_MINOR with venv and headers."
            echo "Found:"
            if [ -s "$rejected" ]; then cat "$rejected"; else echo "  none on PATH"; fi
            echo "Install one (Debian, Ubuntu: apt install python3 python3-venv python3-dev) or name one:" \
                "make test PYTHON=/path/to/python3"
        } >&2
        rm -f "$rejected"
        exit 1
    fi
    rm -f "$rejected"
    echo "$found"
}

# ---------------------------------------------------------------- compiler and GPU

check_compiler() {
    : "${CXX:=g++}"
    remedy="Install g++ 10 or newer (Debian, Ubuntu: apt install g++), or set CXX to a compiler of C++20."
    command -v "${CXX%% *}" >/dev/null 2>&1 || fail "no C++ compiler: $CXX is not a program. $remedy"
    printf '#include <concepts>\n#include <span>\nint main() { return std::span<int>().size(); }\n' |
        $CXX -std=c++20 -x c++ -fsyntax-only - >/dev/null 2>&1 ||
        fail "$CXX cannot compile C++20. $remedy"
    export CXX
}

# Prints the version of the NVIDIA driver where a GPU can be used; fails where there is none.
nvidia_driver() {
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1
    elif [ -r /proc/driver/nvidia/version ] && ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
        sed -n 's/.*Kernel Module[^0-9]*\([0-9.]*\).*/\1/p' /proc/driver/nvidia/version | head -n 1
    else
        return 1
    fi
}

usable_gpu() {
    driver=$(nvidia_driver) || return 1
    if [ "${driver%%.*}" -lt "$OLDEST_DRIVER" ] 2>/dev/null; then
        echo "jaxmoe: the NVIDIA driver $driver is older than $OLDEST_DRIVER, which CUDA 13 needs: using the CPU." >&2
        return 1
    fi
}

# ---------------------------------------------------------------- steps

checksum() { cksum | cut -d ' ' -f 1-2 | tr ' ' -; }

packages_fingerprint() { cat pyproject.toml tools/requirements.py | checksum; }

# Folders of jaxmoe/ count because an editable install notes where each module was found: one that turned from a file
# into a folder has to be noted again.
extension_fingerprint() {
    {
        packages_fingerprint
        pwd
        find ffi -type f -exec cksum {} + | sort
        find jaxmoe -type d ! -name __pycache__ | sort
        for package in jaxlib-*.dist-info nvidia/cu13/bin/nvcc; do
            # shellcheck disable=SC2086
            ls -d "$VENV"/lib/python3*/site-packages/$package 2>/dev/null
        done
        echo "${JAXMOE_CUDA:-} ${JAXMOE_NVCC:-} ${JAXMOE_TIMELINE:-} ${CXX:-g++} ${CXXFLAGS:-} ${CMAKE_ARGS:-}"
    } | checksum
}

up_to_date() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# show_progress <line>: writes the line again and again, with the number of files that the build in the log has compiled.
show_progress() {
    while sleep 1; do
        compiled=$(tail -n 100 "$LOG" | sed -n 's/^ *\[\([0-9]*\/[0-9]*\)\] .*/\1/p' | tail -n 1)
        if [ -n "$compiled" ]; then printf '\r%s %s' "$1" "$compiled"; fi
    done
}

progress= # process that shows it
stop_progress() {
    if [ -n "$progress" ]; then kill "$progress" 2>/dev/null; fi
    progress=
}

# step <name> <what it does> <command...>: one line, with the seconds it took; the log's end where it fails.
step() {
    line=$(printf '%-12s %s' "$1" "$2 ...")
    printf '%s' "$line"
    what=$2
    shift 2
    mkdir -p "$VENV"
    started=$(date +%s)
    if [ -t 1 ]; then
        show_progress "$line" &
        progress=$!
    fi
    status=0
    "$@" >>"$LOG" 2>&1 || status=$?
    stop_progress
    if [ "$status" -eq 0 ]; then
        printf ' %d s\n' $(($(date +%s) - started))
    else
        printf ' failed\n\n'
        tail -n 40 "$LOG"
        printf '\njaxmoe: %s failed; the whole log is %s.\n' "$what" "$LOG" >&2
        exit 1
    fi
}

make_environment() {
    if [ -e "$VENV/bin/python" ] || [ -L "$VENV/bin/python" ]; then
        # A run that was stopped at the right moment leaves an environment without pip; ensurepip mends that.
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >/dev/null 2>&1 ||
            fail "$VENV exists, but its Python does not run. $OTHER_FOLDER"
        check_compiler
        return
    fi
    chosen=$(choose_python) || exit 1
    check_compiler
    printf '%-12s %s\n' python "${chosen%% *} (${chosen#* })"
    mkdir -p "$VENV" || exit 1
    step environment "making $VENV" "${chosen#* }" -m venv "$VENV"
}

install_packages() {
    "$VENV/bin/python" tools/requirements.py "$EXTRAS" >"$VENV/requirements.txt" || exit 1
    if [ -n "${JAXMOE_UV:-}" ]; then
        if "$JAXMOE_UV" pip install --python "$VENV/bin/python" -r "$VENV/requirements.txt" >>"$LOG" 2>&1; then
            printf '%-12s %s\n' packages "those for '$EXTRAS' were installed by $JAXMOE_UV"
            return
        fi
        printf '%-12s %s\n' packages "JAXMOE_UV=$JAXMOE_UV cannot install them ($LOG says why): pip does"
    fi
    # Not compiled to bytecode, half of pip's time: most of it is never imported, the rest is compiled by the first import.
    step packages "installing jax and the packages for '$EXTRAS'; minutes when they have to be downloaded" \
        "$VENV/bin/python" -m pip install --no-compile -r "$VENV/requirements.txt"
}

# Without isolation and without dependencies: both were installed by the step before. Verbose, for the compiler's output
# in the log. The build folder stays, so that only what changed is compiled again, and what nvcc said of each object.
install_extension() {
    step extension "building jaxmoe._native, and with nvcc jaxmoe._cuda" \
        env SKBUILD_BUILD_DIR="$(cd "$VENV" && pwd)/build" \
        CMAKE_CUDA_COMPILER_LAUNCHER="${CMAKE_CUDA_COMPILER_LAUNCHER:-sh;$PWD/tools/keep_output.sh}" \
        "$VENV/bin/python" -m pip install --verbose --no-build-isolation --no-deps --editable .
    sed -n 's/^.*jaxmoe: CUDA part \(.*\)$/\1/p' "$LOG" | tail -n 1 | xargs -r -d '\n' printf '%-12s %s\n' 'CUDA part'
}

# A version that was asked for must be the one that is there: nothing is replaced unasked.
check_version_asked_for() {
    [ -n "$PYTHON" ] && [ -x "$VENV/bin/python" ] || return 0
    chosen=$(choose_python) || exit 1
    there=$("$VENV/bin/python" -c 'import platform; print(platform.python_version())')
    asked=${chosen%% *}
    [ "$there" = "$asked" ] || fail "$VENV holds Python $there, but PYTHON=$PYTHON is $asked. $OTHER_FOLDER"
}

make_or_update() {
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    packages_stamp=$VENV/.packages-$EXTRAS
    extension_stamp=$VENV/.extension
    check_version_asked_for
    if [ -x "$VENV/bin/python" ] && up_to_date "$packages_stamp" "$(packages_fingerprint)" &&
        up_to_date "$extension_stamp" "$(extension_fingerprint)"; then
        return
    fi
    trap 'stop_progress; printf "\njaxmoe: stopped; the same command goes on from here.\n" >&2; exit 130' INT TERM
    make_environment
    date >"$LOG"
    if ! up_to_date "$packages_stamp" "$(packages_fingerprint)"; then
        install_packages
        packages_fingerprint >"$packages_stamp"
    fi
    if ! up_to_date "$extension_stamp" "$(extension_fingerprint)"; then
        install_extension
        extension_fingerprint >"$extension_stamp"
    fi
}

cd "$(dirname "$0")/.." || exit 1
case ${1:-} in
pythons)
    suitable_pythons all 2>/dev/null |
        awk '{ split($1, part, "."); minor = part[1] "." part[2]; if (!seen[minor]++) print minor, $2 }'
    ;;
gpu) usable_gpu ;;
fingerprints) packages_fingerprint && extension_fingerprint ;;
'') make_or_update ;;
*) fail "tools/environment.sh: unknown command $1" ;;
esac
