"""The number formats of a layer: the Python and the C++ of them, and what the layout of the arena makes of them."""

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe import native
from jaxmoe.formats import ALL, Format, Formats
from jaxmoe.implementations.megakernel.schedule import native_formats
from tests.unit.schedule_model import problems, steps

WIDE = ("float64", "float32", "bfloat16", "float16")
COMPILED = (*WIDE, "float8_e4m3fn")
ARRAYS = ("tokens", "h", "answers", "weights", "sums")
sizes = st.integers(0, 10**9)
scales = st.just((0, 0)) | st.tuples(st.integers(1, 300), st.integers(1, 300))


@given(st.sampled_from(COMPILED), scales, st.sampled_from(COMPILED), sizes, sizes)
def test_python_and_compiled_code_count_the_same_bytes(element, scale, scale_element, rows, columns):
    here = Format(element, scale[0], scale[1], scale_element)
    there = native.schedule().Format(element, scale[0], scale[1], scale_element)
    assert here.row_bytes(columns) == there.row_bytes(columns)
    assert here.scale_bytes(rows, columns) == there.scale_bytes(rows, columns)
    assert here.bytes(rows, columns) == there.bytes(rows, columns)


def test_an_array_of_blocks_has_a_scale_for_each_begun_block_behind_its_elements():
    blocks = Format(jnp.float8_e4m3fn, scale_rows=128, scale_columns=128)
    assert blocks.scale_bytes(129, 257) == 2 * 3 * 4
    assert blocks.bytes(129, 257) == 129 * 257 + 2 * 3 * 4
    assert Format(jnp.float4_e2m1fn).row_bytes(7) == 4


@pytest.mark.parametrize("element", WIDE)
def test_everything_is_of_one_type_but_sums_of_32_bits_at_least(element):
    here, there = Formats.of(element), native.schedule().Formats.of(element)
    assert {getattr(here, name).dtype.name for name in ARRAYS[:-1]} == {element}
    assert here.sums.dtype.name == ("float64" if element == "float64" else "float32")
    for name in ARRAYS:
        assert getattr(native_formats(here), name).element == getattr(there, name).element == getattr(here, name).dtype


def test_a_format_is_printed_with_its_scales_where_it_has_any():
    assert str(Format(jnp.bfloat16)) == "bfloat16"
    scaled = Format(jnp.float8_e4m3fn, scale_rows=1, scale_columns=128)
    assert str(scaled) == "float8_e4m3fn (a float32 scale for 1 x 128)"
    assert str(Format(jnp.float8_e4m3fn, 1, ALL)) == "float8_e4m3fn (a float32 scale for 1 x all)"


def test_an_element_that_layers_do_not_have_is_refused_by_name():
    with pytest.raises(ValueError, match="element int8 is none"):
        native.schedule().Format("int8")
    with pytest.raises(ValueError, match="scale_rows=1 and scale_columns=0"):
        native.schedule().Format("float32", 1, 0)


# Which arrays lie in a region; those of numbers that no format is about are not named.
REGIONS = {
    "tokens": ("tokens", "kept_tokens", "rows"),
    "h": ("h", "projections"),
    "answers": ("answers",),
    "weights": (),
    "sums": (
        *("routing_weights", "routing_weight_gradients", "row_routing_weights", "row_products", "weight_sums"),
        "answer_weights",
    ),
}


@given(problems(), st.sampled_from(ARRAYS))
def test_the_format_of_an_array_sizes_its_regions_and_no_other(problem, array):
    shape, schedule, _ = problem
    head = steps.needed_head(shape, schedule)
    plain = {name: steps.Format("float32") for name in ARRAYS}
    narrow = steps.layout_of(shape, schedule, steps.Formats(**plain), head)
    wide = steps.layout_of(shape, schedule, steps.Formats(**plain | {array: steps.Format("float64")}), head)
    assert narrow.head == wide.head
    for region, (_, size) in narrow.body.items():
        assert wide.body[region][1] == (2 * size if region in REGIONS[array] else size)
