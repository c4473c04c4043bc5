"""What ranks must have the same to share their arenas (ffi/common/layout.h), and what each may have its own way."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.unit.layout_model import formats_of, grown, itemsizes, large_problems
from tests.unit.schedule_model import problems, steps, with_fields


def crews():
    """Workers and dispatchers: what a rank has for itself, as many as its GPU has room for."""
    return st.tuples(st.integers(1, 400), st.integers(1, 400))


@given(problem=problems() | large_problems(), growth=st.integers(0, 5), itemsize=itemsizes, one=crews(), other=crews())
@settings(max_examples=200)
def test_ranks_with_any_numbers_of_workers_have_the_same_layout_and_agree(problem, growth, itemsize, one, other):
    shape, schedule, _ = problem
    head = grown(steps.needed_head(shape, schedule), growth)
    crewed = [with_fields(schedule, workers=workers, dispatchers=dispatchers) for workers, dispatchers in (one, other)]
    layouts = [steps.layout_of(shape, each, formats_of(itemsize), head) for each in crewed]
    assert layouts[0].head == layouts[1].head
    assert layouts[0].body == layouts[1].body
    assert layouts[0].bytes == layouts[1].bytes  # else one rank would make its arena larger and the other would not
    assert len({steps.agreement_of(shape, each, formats_of(itemsize), head) for each in crewed}) == 1
    assert steps.needed_head(shape, crewed[0]) == steps.needed_head(shape, crewed[1])


NUMBERS_OF_TILES = ("rows", "h_columns", "columns")
# What ranks have to have the same: another legal value of each number, `by` larger where any number will do.
OTHER_SHAPES = {
    "ranks": lambda shape, by: {"ranks": 2 * shape.ranks, "num_experts": 2 * shape.num_experts},
    "num_experts": lambda shape, by: {"num_experts": shape.num_experts + by * shape.ranks},
    "projections": lambda shape, by: {"projections": 3 - shape.projections},
} | {
    name: lambda shape, by, name=name: {name: getattr(shape, name) + by}
    for name in ("tokens", "hidden", "intermediate", "top_k")
}
OTHER_SCHEDULES = {
    "narrow_rows": lambda schedule, by: {"narrow_rows": abs(schedule.narrow_rows - 1)},
    "keep_tokens": lambda schedule, by: {"keep_tokens": 1 - schedule.keep_tokens},
    **{
        name: lambda schedule, by, name=name: {name: getattr(schedule, name) + by}
        for name in ("unit_tiles", "lag_units", "ring_tiles", "chunk_rows", "segment_tiles", "saved_tiles")
    },
    **{
        f"tile {name}": lambda schedule, by, name=name: {
            "tile": steps.TileSizes(*(getattr(schedule.tile, n) + by * (n == name) for n in NUMBERS_OF_TILES))
        }
        for name in NUMBERS_OF_TILES
    },
}
OTHER_HEADS = ("local_experts", "row_tiles", "slots")
FORMATS = ("tokens", "h", "answers", "weights", "sums")


def with_another(formats, name: str, by: int):
    """The same formats but for one array, which has another element or scales that it did not have."""
    arrays = {field: getattr(formats, field) for field in FORMATS}
    element = arrays[name].element
    other = steps.Format("float16") if by % 2 else steps.Format(element, scale_rows=1, scale_columns=by)
    return steps.Formats(**arrays | {name: other})


@pytest.mark.parametrize("changed", [*OTHER_SHAPES, *OTHER_SCHEDULES, *OTHER_HEADS, *FORMATS])
@given(problem=problems(), by=st.integers(1, 9), itemsize=itemsizes)
def test_ranks_that_differ_in_anything_but_their_workers_do_not_agree(changed, problem, by, itemsize):
    shape, schedule, _ = problem
    formats = formats_of(itemsize)
    need = steps.needed_head(shape, schedule)
    # Room for any of the changes, so that nothing else changes with them.
    room = {
        "local_experts": need.local_experts + 9,
        "row_tiles": 99 * need.row_tiles + 999,
        "slots": 99 * need.slots + 999,
    }

    def agreement(shape, schedule, formats=formats, **other_room: int) -> int:
        return steps.agreement_of(shape, schedule, formats, steps.HeadCapacity(shape.ranks, **room | other_room))

    if changed in OTHER_SHAPES:
        other = agreement(with_fields(shape, **OTHER_SHAPES[changed](shape, by)), schedule)
    elif changed in OTHER_SCHEDULES:
        other = agreement(shape, with_fields(schedule, **OTHER_SCHEDULES[changed](schedule, by)))
    elif changed in FORMATS:
        other = agreement(shape, schedule, with_another(formats, changed, by))
    else:
        other = agreement(shape, schedule, **{changed: room[changed] + by})
    assert other != agreement(shape, schedule)
