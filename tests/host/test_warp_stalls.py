"""What tools/warp_stalls.py says of samples; they are written here, so nothing runs on a GPU."""

import pytest

from tests.tool_modules import load_tool

warp_stalls = load_tool("warp_stalls")

NAMES = '"Address","Source","# Samples","Instructions Executed","stall_math","stall_selected","stall_math (Not Issued)"'
# Two warps: an inner loop with a branch to code that seldom runs, in a loop over tasks.
PROGRAM = [
    ("MOV R1, c[0x0][0x28]", 2, 0, 2),
    ("LDS R2, [R3]", 8, 0, 8),
    ("@P1 BRA 0x1050", 80, 0, 80),
    ("NANOSLEEP 0x20", 3, 0, 3),
    ("@P2 BRA 0x1030", 3, 0, 3),
    ("FFMA R1, R2, R3, R1", 80, 40, 80),
    ("@P0 BRA 0x1020", 80, 0, 80),
    ("@P3 BRA 0x1010", 8, 0, 8),
    ("EXIT", 2, 0, 2),
]


def lines(unnamed: int = 0) -> list[str]:
    found = ['"Kernel Name","void moe_forward(ForwardParams)"', NAMES]
    for nth, (text, executed, math, selected) in enumerate(PROGRAM):
        samples = math + selected + unnamed
        found.append(f'"{0x1000 + 16 * nth:#x}","      {text}","{samples}","{executed}","{math}","{selected}","0"')
    return found


def test_the_inner_loop_is_found_and_not_what_holds_it_or_what_it_seldom_runs():
    assert warp_stalls.find_loops(warp_stalls.read(lines())) == [warp_stalls.Piece(2, 6, 80)]


def test_a_pass_has_the_instructions_and_the_cycles_that_a_warp_takes_for_it():
    code = warp_stalls.read(lines())
    samples = sum(instruction.samples for instruction in code)
    # Of two warps: so each sample stands for two cycles of one.
    _, loop, *_ = warp_stalls.describe(code, cycles=samples, loops=1, stretches=0, others=0)
    # (80 + 3 + 3 + 80 + 80) / 80 instructions; as many samples of 'selected' and 40 of 'math'.
    assert "40.0 passes of 3 instructions, 7 cycles: selected 6  math 1" in loop


def test_waits_are_shares_where_cycles_are_not_known():
    _, loop, *_ = warp_stalls.describe(warp_stalls.read(lines()), cycles=None, loops=1, stretches=0, others=0)
    assert loop.endswith("3 instructions: selected 86%  math 14%")


def test_samples_without_a_column_are_unnamed():
    assert [instruction.stalls["unnamed"] for instruction in warp_stalls.read(lines(unnamed=5))] == [5] * len(PROGRAM)


def test_stretches_are_what_runs_about_as_often_between_loops():
    _, _, *stretches = warp_stalls.describe(warp_stalls.read(lines()), cycles=None, loops=1, stretches=9, others=0)
    # Instruction 1 runs four times as often as 0, and 8 a quarter as often as 7; 2 to 6 are the loop.
    pieces = [stretch.partition(":")[0] for stretch in stretches]
    assert pieces == ["stretch 1-1", "stretch 7-7", "stretch 0-0", "stretch 8-8"]


def test_a_stretch_goes_on_while_it_runs_from_half_to_twice_as_often_as_its_first_instruction():
    code = [warp_stalls.Instruction(16 * nth, "NOP", runs, {}) for nth, runs in enumerate((4, 2, 8, 9, 0, 4))]
    found = warp_stalls.find_stretches(code, outside=range(6))
    assert [(piece.first, piece.last) for piece in found] == [(0, 2), (3, 3), (5, 5)]
    assert [(piece.first, piece.last) for piece in warp_stalls.find_stretches(code, outside=[0, 2])] == [(0, 0), (2, 2)]


def test_instructions_outside_of_loops_come_by_their_samples():
    _, _, *others = warp_stalls.describe(warp_stalls.read(lines()), cycles=None, loops=1, stretches=0, others=2)
    assert [other.partition(":")[0] for other in others] == ["1", "7"]


def test_a_page_without_samples_is_refused_with_what_to_ask_for():
    for page in (['"Address","Source"', '"0x1000","EXIT"'], lines()[:2], ["==ERROR== no kernel was found"]):
        with pytest.raises(ValueError, match="--section=SourceCounters"):
            warp_stalls.read(page)
