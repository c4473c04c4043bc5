#!/bin/sh
# Runs a compiler, and keeps what it says in <object>.said beside the object that it makes: remarks of ptxas about a
# kernel are no warnings, and would be lost with the log of the build. tools/environment.sh puts it before nvcc;
# tests/host/test_kernel_code.py reads the files.
output=
previous=
for argument in "$@"; do
    if [ "$previous" = -o ]; then output=$argument; fi
    previous=$argument
done
if [ -z "$output" ]; then exec "$@"; fi
rm -f "$output.said"
"$@" >"$output.says" 2>&1
status=$?
cat "$output.says"
# Moved there last: a file that is there is whole, and of a compiler that was content.
if [ "$status" -eq 0 ]; then mv "$output.says" "$output.said"; else rm -f "$output.says"; fi
exit "$status"
