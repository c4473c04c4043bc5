"""Builds the forward kernel in BF16 without some of its work, to see what launches in a row take their time for.

Usage: python tools/leave_out.py FOLDER [--what=products --what=pulls+answers ...]

FOLDER/NAME/_cuda.NAME.so is what this environment has built, but that launches of BF16 layers leave out what NAME says,
all but the first 60 of a process, which fill the memory that later ones read. tools/compare_builds.py times it beside
the installed build. It may say that the outputs are wrong, or that they are right, those of a launch before: only the
time counts. What is left out saves it where launches wait for that, and where power is the limit also by its power.

Without --what all of this is built, one after the other, each in a quarter of a minute:

"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "variants/forward_bf16.cu"
LATER = "cta.signals.launch_number() > 60"


class Change(NamedTuple):
    """A place of the kernel, which is there once, and what stands there instead. {later}: whether to leave it out."""

    file: str
    before: str
    after: str

    def apply(self, ffi: Path) -> None:
        """Makes the change in an ffi folder."""
        path = ffi / "cuda/kernel" / self.file
        text = path.read_text()
        if text.count(self.before) != 1:
            raise SystemExit(f"leave_out: {self.file} has no longer one place with {self.before!r}. Mend its `Change`.")
        path.write_text(text.replace(self.before, self.after.replace("{later}", LATER)))


LEFT_OUT = {
    "pulls": [
        Change("exchange/dispatch.cuh", "if (row.number != kNoToken) {", "if (row.number != kNoToken && !({later})) {")
    ],
    "h": [
        Change(
            "gemm/epilogues/h.cuh",
            "    const bool saves = task.row_tile",
            "    if ({later}) row = nullptr;\n    const bool saves = task.row_tile",
        )
    ],
    "answers": [
        Change(
            "gemm/epilogues/answers.cuh",
            "                            answer_of(cta, target));",
            "                            {later} ? nullptr : answer_of(cta, target));",
        )
    ],
    "sums": [Change("exchange/token_sum.cuh", "vectors = rehearses ? 0", "vectors = rehearses || {later} ? 0")],
    "half_rows": [
        Change(
            "gemm/load.cuh",
            "  const uint32_t bytes_of_a = (whole ?",
            "  const bool half = whole && {later};\n"
            "  const uint32_t bytes_of_a = (half ? sizeof(Stage::a) / 2 : whole ?",
        ),
        Change(
            "gemm/load.cuh",
            "        if (whole) {\n",
            "        if (half) {\n#pragma unroll 1\n"
            "          for (int32_t row = 0; row < Tiling::kRows / 2; row += kFewRows) {\n"
            "            ptx::load_box(lines[row], &(p.*A::Tensor::kFewMap), full, a_policy, x, a.first + row);\n"
            "          }\n          continue;\n        }\n        if (whole) {\n",
        ),
    ],
    "half_weights": [
        Change(
            "gemm/load.cuh",
            "    if constexpr (kMayShare) b_.first",
            "    left_out_ = {later};\n    if constexpr (kMayShare) b_.first",
        ),
        Change("gemm/load.cuh", "  B b_;\n", "  B b_;\n  bool left_out_;\n"),
        Change(
            "gemm/load.cuh",
            "    return any_ ? half_ ? sizeof(Stage::b) / 2",
            "    return any_ ? half_ || left_out_ ? sizeof(Stage::b) / 2",
        ),
        Change(
            "gemm/load.cuh",
            "      for (int i = 0; i < kSharedBoxes; ++i) {\n",
            "      for (int i = 0; i < (left_out_ ? kSharedBoxes / 2 : kSharedBoxes); ++i) {\n",
        ),
        Change(
            "gemm/load.cuh",
            "        if (kMayShare && half_ && box == kBoxes / 2) break;",
            "        if (box == kBoxes / 2 && (left_out_ || (kMayShare && half_))) break;",
        ),
    ],
    # Of all launches: the loop has no register to ask.
    "products": [
        Change(
            "gemm/multiply.cuh",
            "  bool idle = rows <= 0 && !shared;",
            "  ptx::clear_accumulators(sums);\n  bool idle = true;",
        )
    ],
}
BUILT = (*LEFT_OUT, "pulls+h+answers+sums", "half_rows+half_weights", "products+pulls+h+answers+sums")


def build(name: str, folder: Path) -> None:
    """Builds what leaves out the parts that `name` has, with a + between them."""
    out = folder / name / f"_cuda.{name}.so"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tree:
        shutil.copytree(ROOT / "ffi", Path(tree) / "ffi")
        for part in name.split("+"):
            for change in LEFT_OUT[part]:
                change.apply(Path(tree) / "ffi")
        link = [sys.executable, ROOT / "tools/link_kernels.py", tree, out, f"--sources={SOURCE}"]
        subprocess.run(link, check=True)


def main() -> None:
    names = ", ".join(BUILT)
    parser = argparse.ArgumentParser(
        description=f"{__doc__}  {names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--what", action="append", help="of these, with a + between several")
    arguments = parser.parse_args()
    for name in arguments.what or BUILT:
        if unknown := [part for part in name.split("+") if part not in LEFT_OUT]:
            parser.error(f"--what={name}: {', '.join(unknown)} is none of {', '.join(LEFT_OUT)}.")
        build(name, arguments.folder)


if __name__ == "__main__":
    main()
