"""Experts in 4 bits whose bits lie as the GPU kernel takes them. What layers make of them is in fp4_suite.py."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import e2m1
from jaxmoe.convert import MoEWeights, to_hf
from tests.layer_calls import mesh_of

KINDS = ("mxfp4", "nvfp4")
MATRICES = ("w_gate", "w_up", "w_down")
# Of BF16: the sign, the exponent's lowest two bits, the fraction's highest one.
BITS_OF_BF16 = 0x81C0


def in_4_bits(kind: str = "mxfp4", hidden: int = 128, intermediate: int = 64) -> jaxmoe.Experts:
    return jaxmoe.quantize(jaxmoe.Experts.init(jax.random.key(1), 8, hidden, intermediate), kind)


def same_bits(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_every_code_in_every_place_of_a_word_comes_back():
    codes = np.zeros((8, 16, 8), np.uint8)
    for place in range(8):
        codes[place, :, place] = np.arange(16)
    packed = jnp.asarray(codes[..., ::2] | codes[..., 1::2] << 4)
    words = e2m1.repack(packed)
    assert (words.shape, words.dtype) == ((8, 16, 1), jnp.uint32)
    np.testing.assert_array_equal(e2m1.unrepack(words), packed)


def test_a_number_lies_in_a_repacked_word_where_few_instructions_find_it():
    codes = np.random.default_rng(0).integers(0, 16, (1000, 8), np.uint8)
    [words] = np.asarray(e2m1.repack(jnp.asarray(codes[:, ::2] | codes[:, 1::2] << 4))).T.astype(np.int64)
    both = BITS_OF_BF16 << 16 | BITS_OF_BF16
    turned = words << 6 & 0xFFFFFFFF | words >> 26
    spread = [words & both, words * 8 & both, turned & both, (turned & 0x1B001B) * (2**14 + 2**8 + 2**3) & both]
    for number in range(8):
        half = spread[number % 4] >> 16 * (number // 4) & 0xFFFF
        np.testing.assert_array_equal(half >> 12 & 8 | half >> 6 & 7, codes[:, number])


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_the_same_weights_in_as_many_bytes(kind):
    experts = in_4_bits(kind)
    found = jaxmoe.repacked(experts)
    for name in MATRICES:
        before, after = getattr(experts, name), getattr(found, name)
        assert (after.shape, after.nbytes, after.repacked) == (before.shape, before.nbytes, True)
        assert after.values.dtype == jnp.uint32
        same_bits((after.packed, after.scales), (before.packed, before.scales))
        same_bits(after.elements.astype(jnp.float32), before.elements.astype(jnp.float32))
        same_bits(after.wide(jnp.float32), before.wide(jnp.float32))


def test_from_elements_of_4_bits_they_are_the_same_and_again_nothing_changes():
    experts = in_4_bits()
    elements = dataclasses.replace(
        experts, **{n: dataclasses.replace(m, values=m.elements) for n in MATRICES if (m := getattr(experts, n))}
    )
    found = jaxmoe.repacked(elements)
    same_bits(found, jaxmoe.repacked(experts))
    same_bits(jaxmoe.repacked(found), found)


@pytest.mark.parametrize("spec", [P("expert"), P(None, "expert"), P(None, None, "expert")])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_experts_that_are_split_stay_where_they_are(kind, spec):
    mesh = mesh_of("expert", kind=kind)
    where = NamedSharding(mesh, spec)
    # Of every matrix a rank has whole groups.
    given = in_4_bits(hidden=512, intermediate=256)
    experts = jax.device_put(given, where)
    with jax.set_mesh(mesh):
        program = jax.jit(jaxmoe.repacked).lower(experts).compile()
        found = program(experts)
    assert not [line for line in (program.as_text() or "").splitlines() if "all-" in line]
    for leaf in jax.tree.leaves(found):
        assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
    same_bits(found, jaxmoe.repacked(given))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_experts_whose_words_are_split_are_the_same(kind, jit):
    given = in_4_bits("nvfp4", hidden=64, intermediate=80)  # so a rank of eight has 10 weights of each output of down
    mesh = mesh_of("expert", kind=kind)
    where = NamedSharding(mesh, P(None, None, "expert"))
    down: Any = given.w_down
    experts = dataclasses.replace(given, w_down=dataclasses.replace(down, values=jax.device_put(down.values, where)))
    with jax.set_mesh(mesh):
        found = (jax.jit(jaxmoe.repacked) if jit else jaxmoe.repacked)(experts)
    same_bits(found, jaxmoe.repacked(given))


def test_to_hf_writes_what_they_were():
    biases = {"b_gate": jnp.ones((8, 64)), "b_up": jnp.ones((8, 64)), "b_down": jnp.ones((8, 128))}
    experts = dataclasses.replace(in_4_bits(), **biases)
    router = {"router_kernel": jnp.ones((128, 8)), "router_bias": jnp.ones(8)}
    written = [to_hf(MoEWeights(each, **router), "gpt_oss", 0) for each in (experts, jaxmoe.repacked(experts))]
    assert written[0].keys() == written[1].keys()
    same_bits(*written)


def test_wide_experts_and_some_that_are_not_repacked_are_errors_that_say_what_to_do():
    wide = jaxmoe.Experts.init(jax.random.key(0), 8, 64, 64)
    with pytest.raises(TypeError, match=r"Experts without a matrix in 4 bits.*jaxmoe\.quantize\(experts, 'mxfp4'\)"):
        jaxmoe.repacked(wide)
    experts = in_4_bits()
    mixed = dataclasses.replace(experts, w_down=jaxmoe.repacked(experts).w_down)
    x, ids = jnp.ones((4, 128)), jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"experts\.w_down is repacked\. All must be, or none: pass jaxmoe\.repacked"):
        jaxmoe.moe_layer(x, ids, jnp.ones((4, 2)), mixed, axis_name=None)
    gate: Any = jaxmoe.repacked(experts).w_gate
    with pytest.raises(ValueError, match=r"Values are \[experts, out, in / 8\]"):
        dataclasses.replace(gate, values=gate.values[..., :-1]).check()


@pytest.mark.parametrize("width", [128, 96])
@pytest.mark.parametrize("tokens", [64, 8192])
def test_the_kernel_has_the_same_plan_for_them(tokens, width):
    experts = in_4_bits(hidden=width, intermediate=width)
    x, ids = jnp.ones((tokens, width), jnp.bfloat16), jnp.zeros((tokens, 2), jnp.int32)
    options: dict[str, Any] = {"axis_name": None, "implementation": "megakernel"}
    arguments = x, ids, jnp.ones((tokens, 2))
    before, after = (str(jaxmoe.explain(*arguments, each, **options)) for each in (experts, jaxmoe.repacked(experts)))
    assert "weights float4_e2m1fn (a float8_e8m0fnu scale for 1 x 32), repacked" in after
    assert after.replace(", repacked", "") == before
