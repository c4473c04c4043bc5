"""What tools/compare_kernels.py says of kernels; their code is written here, so nothing is compiled."""

from pathlib import Path

import pytest

from tests.tool_modules import load_tool

ROOT = Path(__file__).parents[2]
compare_kernels = load_tool("compare_kernels")


def listing(symbol: str, *instructions: str) -> str:
    """As cuobjdump prints a function: an instruction and its encoding in two lines."""
    lines = [f"\t\tFunction : {symbol}"]
    for nth, instruction in enumerate(instructions):
        lines += [f"        /*{16 * nth:04x}*/                   {instruction} ;   /* 0x{nth:016x} */"]
        lines += [f"                                                           /* 0x{100 + nth:016x} */"]
    return "\n".join(lines)


def test_instructions_are_read_with_both_halves_of_their_encoding():
    code = compare_kernels.code_of(listing("_Z6kernelv", "MOV R1, c[0x0][0x28]", "EXIT"))
    assert code == [f"MOV R1, c[0x0][0x28] ;  0x{0:016x} 0x{100:016x}", f"EXIT ;  0x{1:016x} 0x{101:016x}"]


def test_names_of_functions_do_not_count():
    before, after = (compare_kernels.code_of(listing("f", f"CALL.REL `({name})")) for name in ("_Z3oldv", "_Z3newv"))
    assert before == after


def test_each_kernel_is_compared_with_that_of_its_file():
    same, other = (compare_kernels.code_of(listing("f", *code)) for code in (("EXIT",), ("NOP", "EXIT")))
    before = {"forward_bf16": same, "forward_e4m3_bf16": same, "forward_f16": same}
    after = {"forward_bf16": same, "forward_e4m3_bf16": other, "forward_sums_bf16": same}
    texts = list(compare_kernels.compare(before, after))
    assert [text.split()[0] for text in texts] == sorted(before.keys() | after.keys())
    assert "same, 1 instructions" in texts[0]
    assert "differs from instruction 0 on; 1 instructions before, 2 after" in texts[1]
    assert texts[1].splitlines()[-2].split() == ["after", "NOP", ";"]
    assert texts[2].endswith("only before")
    assert texts[3].endswith("only after")


def test_what_is_saved_is_read_back(tmp_path):
    names = ("forward_bf16", "backward_f16")
    kernels = {name: compare_kernels.code_of(listing("f", name.upper(), "EXIT")) for name in names}
    compare_kernels.save(tmp_path / "code", kernels)
    assert compare_kernels.load(tmp_path / "code", "*", timeline=False) == kernels
    assert list(compare_kernels.load(tmp_path / "code", "forward*", timeline=False)) == ["forward_bf16"]
    with pytest.raises(SystemExit, match="names none of forward_bf16, backward_f16"):
        compare_kernels.load(tmp_path / "code", "sideways*", timeline=False)


def test_all_files_with_a_kernel_are_found():
    names = [source.stem for source in compare_kernels.sources_of(ROOT, "*")]
    assert {"forward_bf16", "forward_packed_e4m3_bf16", "backward_f16", "matmul_bf16", "exchange_f16"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("folder", "pattern", "says"), [(ROOT, "sideways*", "forward_bf16"), (ROOT / "tests", "*", "no kernels")]
)
def test_where_none_is_found_it_is_said_what_there_is(folder, pattern, says):
    with pytest.raises(SystemExit, match=says):
        compare_kernels.sources_of(folder, pattern)
