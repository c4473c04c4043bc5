"""`jaxmoe.convert`: layers of every family from files, against plain NumPy, and back with the same bits."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxmoe
from jaxmoe.convert import MoEWeights, from_hf, open_safetensors, to_hf
from jaxmoe.testing import relative_error
from tests.unit.checkpoints import CASES, HIDDEN, LAYER, TOKENS, VOCABULARY, Case, run


def write(folder: Path, tensors: dict[str, Any], files: int = 2) -> Path:
    """Writes tensors into several files and an index, as published checkpoints are."""
    names, listed = sorted(tensors), {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = names[number::files]
        save_file({name: tensors[name] for name in part}, folder / file)
        listed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return folder


@pytest.fixture(scope="module", params=CASES)
def case(request) -> Case:
    return CASES[request.param]()


def test_a_layer_from_files_computes_what_their_numbers_say(case, tmp_path):
    weights = from_hf(write(tmp_path, case.tensors), case.family, LAYER, dtype=jnp.float32)
    rng = np.random.default_rng(99)
    x, token_ids = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.float32), rng.integers(0, VOCABULARY, TOKENS)
    wanted = case.compute(np.asarray(x, np.float64), token_ids)
    assert relative_error(run(weights, case, x, token_ids), wanted) < 2e-6


def test_a_layer_goes_back_with_the_same_names_types_and_bits(case, tmp_path):
    folder = write(tmp_path, case.tensors)
    again = to_hf(from_hf(folder, case.family, LAYER), case.family, LAYER, **case.options)
    assert again.keys() == case.tensors.keys() - {"model.norm.weight"}
    save_file(again, tmp_path / "again.safetensors")
    read = open_safetensors(tmp_path / "again.safetensors")
    for name, array in again.items():
        given = case.tensors[name]
        assert (array.dtype, array.shape, array.tobytes()) == (given.dtype, given.shape, given.tobytes()), name
        assert (read[name].dtype, read[name].tobytes()) == (given.dtype, given.tobytes()), name


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe in NVFP4", "gpt_oss", "deepseek_v3 in FP8", "deepseek_v4"])
def test_experts_stay_in_the_bits_of_the_checkpoint_and_a_mapping_of_arrays_is_as_good_as_files(name, tmp_path):
    case = CASES[name]()
    on_devices = {name: jnp.asarray(array) for name, array in case.tensors.items()}
    weights = from_hf(on_devices, case.family, LAYER)
    from_files = from_hf(write(tmp_path, case.tensors), case.family, LAYER)
    kind = {
        "mixtral": jax.Array,
        "qwen3_moe in NVFP4": jaxmoe.NVFP4,
        "deepseek_v3 in FP8": jaxmoe.BlockScaled,
    }.get(name, jaxmoe.MXFP4)
    assert isinstance(weights.experts.w_up, kind)
    for found, wanted in zip(jax.tree.leaves(weights), jax.tree.leaves(from_files), strict=True):
        assert isinstance(found, jax.Array)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def test_scales_that_come_as_bytes_are_the_powers_of_two_they_stand_for():
    case = CASES["deepseek_v4"]()
    as_bytes = {name: a.view(np.uint8) if name.endswith(".scale") else a for name, a in case.tensors.items()}
    leaves = [jax.tree.leaves(from_hf(tensors, "deepseek_v4", LAYER)) for tensors in (case.tensors, as_bytes)]
    for one, other in zip(*leaves, strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_blocks_of_compressed_tensors_are_those_of_deepseek_under_another_name():
    case = CASES["deepseek_v3 in FP8"]()
    renamed = {name.replace("weight_scale_inv", "weight_scale"): array for name, array in case.tensors.items()}
    assert renamed.keys() != case.tensors.keys()
    leaves = [jax.tree.leaves(from_hf(tensors, "deepseek_v3", LAYER)) for tensors in (case.tensors, renamed)]
    for found, wanted in zip(*leaves, strict=True):
        assert (found.dtype, np.asarray(found).tobytes()) == (wanted.dtype, np.asarray(wanted).tobytes())
    assert to_hf(from_hf(renamed, "deepseek_v3", LAYER), "deepseek_v3", LAYER).keys() < case.tensors.keys()


def test_gate_and_up_in_one_tensor_are_read_in_a_family_that_is_published_without():
    case = CASES["qwen3_5_moe"]()
    renamed = {name.replace("language_model.", ""): array for name, array in case.tensors.items()}
    weights = from_hf(case.tensors, "qwen3_5_moe", LAYER)
    jax.tree.map(np.testing.assert_array_equal, from_hf(renamed, "qwen3_next", LAYER), weights)
    apart = to_hf(weights, "qwen3_next", LAYER)
    jax.tree.map(np.testing.assert_array_equal, from_hf(apart, "qwen3_5_moe", LAYER), weights)


def test_nvfp4_of_compressed_tensors_divides_by_what_modelopt_multiplies_with():
    case = CASES["qwen3_moe in NVFP4"]()
    names = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}

    def renamed(name: str, array: Any) -> tuple[str, Any]:
        stem, _, suffix = name.rpartition(".")
        if suffix in names:  # powers of two have exact inverses
            return f"{stem}.{names[suffix]}", np.exp2(-np.round(np.log2(array))).reshape(1)
        return (f"{stem}.weight_packed" if suffix == "weight" and array.dtype == np.uint8 else name), array

    powers = {
        name: np.exp2(np.round(np.log2(array))) if name.rpartition(".")[2] in names else array
        for name, array in case.tensors.items()
    }
    compressed = dict(renamed(name, array) for name, array in case.tensors.items())
    weights, found = (from_hf(tensors, "qwen3_moe", LAYER) for tensors in (powers, compressed))
    jax.tree.map(np.testing.assert_array_equal, weights, found)
    again = to_hf(found, "qwen3_moe", LAYER)
    assert all(again[name].tobytes() == np.asarray(powers[name]).tobytes() for name in again)


def test_a_scale_of_a_matrix_may_lie_in_no_dimension():
    case = CASES["mixtral in FP8 of matrices"]()
    numbers = {name: array.reshape(()) if "_scale" in name else array for name, array in case.tensors.items()}
    weights: Any = from_hf(case.tensors, "mixtral", LAYER)
    found: Any = from_hf(numbers, "mixtral", LAYER)
    jax.tree.map(np.testing.assert_array_equal, weights, found)
    assert found.experts.w_up.kinds == ("expert",)
    assert found.input_scales["experts.w_up"].shape == (found.experts.num_experts,)


def test_static_scales_of_fp8_become_the_largest_of_all_experts_and_go_back_as_they_were():
    case = CASES["mixtral in FP8 of matrices"]()
    weights: Any = from_hf(case.tensors, "mixtral", LAYER)
    given = {
        which: [array for name, array in case.tensors.items() if name.endswith(f".{which}.input_scale")]
        for which in ("w1", "w2", "w3")
    }
    of_tokens, of_h = np.max(given["w1"] + given["w3"]), np.max(given["w2"])
    for name, scale in (("w_gate", of_tokens), ("w_up", of_tokens), ("w_down", of_h)):
        found = getattr(weights.experts, name).input_scale
        assert (found.dtype, found.shape) == (jnp.float32, (weights.experts.num_experts,))
        np.testing.assert_array_equal(found, scale)
    kept = np.asarray(weights.input_scales["experts.w_gate"])
    np.testing.assert_array_equal(np.sort(kept), np.sort(np.concatenate(given["w1"])))
    assert len({*kept.tolist()}) > 1
    x, slots = jnp.ones((4, weights.experts.hidden)), (jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1)))
    assert jaxmoe.explain(x, *slots, weights.experts, axis_name=None).call.precision == "fp8-static"


def test_static_scales_in_bfloat16_are_float32_in_the_experts():
    case = CASES["mixtral in FP8 of matrices"]()
    tensors = {
        name: array.astype(jnp.bfloat16) if name.endswith("input_scale") else array
        for name, array in case.tensors.items()
    }
    weights: Any = from_hf(tensors, "mixtral", LAYER)
    assert weights.input_scales["experts.w_up"].dtype == jnp.bfloat16
    assert weights.experts.w_up.input_scale.dtype == jnp.float32
    largest = np.asarray(weights.input_scales["experts.w_down"], np.float32).max()
    np.testing.assert_array_equal(weights.experts.w_down.input_scale, largest)


def test_fp8_without_static_scales_and_nvfp4_with_them_bring_none_along():
    case = CASES["mixtral in FP8 of matrices"]()
    without = {name: array for name, array in case.tensors.items() if not name.endswith("input_scale")}
    weights: Any = from_hf(without, "mixtral", LAYER)
    assert weights.input_scales is None
    assert all(getattr(weights.experts, name).input_scale is None for name in ("w_gate", "w_up", "w_down"))
    nvfp4: Any = from_hf((case := CASES["qwen3_moe in NVFP4"]()).tensors, case.family, LAYER)
    assert not hasattr(nvfp4.experts.w_up, "input_scale")
    assert nvfp4.input_scales is not None


def with_scales(weights: Any, tokens: float, h: float) -> Any:
    return dataclasses.replace(weights, experts=jaxmoe.with_input_scales(weights.experts, tokens, h))


@pytest.mark.parametrize("kept", [None, 0.5])
def test_static_scales_that_were_set_here_are_written_whatever_the_checkpoint_had(kept):
    experts = jaxmoe.Experts.init(jax.random.key(0), 4, 256, 384)
    narrow = jaxmoe.with_input_scales(jaxmoe.quantize(experts, "expert"), 4 / 448, 2 / 448)
    shared = jaxmoe.Experts.init(jax.random.key(1), 1, 256, 384)
    given: dict[str, Any] = {
        "experts": narrow,
        "router_kernel": jnp.ones((256, 4)),
        "selection_bias": jnp.zeros(4),
        "shared": jaxmoe.with_input_scales(jaxmoe.quantize(shared, "expert"), 8 / 448, 6 / 448),
    }
    if kept is not None:
        counts = {"experts": 4, "shared": 1}
        given["input_scales"] = {
            f"{field}.{name}": jnp.full(count, kept)
            for field, count in counts.items()
            for name in ("w_gate", "w_up", "w_down")
        }
    again: Any = from_hf(to_hf(MoEWeights(**given), "deepseek_v3", 0), "deepseek_v3", 0)
    for field in ("experts", "shared"):
        for name in ("w_gate", "w_up", "w_down"):
            found, wanted = (getattr(each, name) for each in (getattr(again, field), given[field]))
            assert found.input_scale is not None
            jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_static_scales_of_a_checkpoint_go_back_as_they_were_until_others_are_set():
    case = CASES["mixtral in FP8 of matrices"]()
    weights: Any = from_hf(case.tensors, "mixtral", LAYER)
    largest = {name: getattr(weights.experts, name).input_scale[0] for name in ("w_gate", "w_down")}
    tensors = to_hf(with_scales(weights, 0.25, largest["w_down"]), "mixtral", LAYER)
    for name, array in tensors.items():
        new = name.endswith(("w1.input_scale", "w3.input_scale"))
        wanted = np.full(1, 0.25, np.float32) if new else case.tensors[name]
        assert (array.dtype, array.tobytes()) == (wanted.dtype, wanted.tobytes()), name
    # Gate alone: what the layer multiplies with is the larger one of both.
    of_gate = dataclasses.replace(weights.experts.w_gate, input_scale=largest["w_gate"] / 2 + jnp.zeros(8))
    half = dataclasses.replace(weights, experts=dataclasses.replace(weights.experts, w_gate=of_gate))
    again: Any = from_hf(to_hf(half, "mixtral", LAYER), "mixtral", LAYER)
    np.testing.assert_array_equal(again.experts.w_gate.input_scale, largest["w_gate"])


@pytest.mark.parametrize(
    "change",
    [
        lambda name, scale: None if name.endswith("w3.input_scale") else scale,
        lambda name, scale: np.full_like(scale, np.nan) if name.endswith("5.w1.input_scale") else scale,
    ],
    ids=["of gate without up", "that are NaN"],
)
def test_static_scales_that_cannot_be_used_go_back_as_they_were(change):
    case = CASES["mixtral in FP8 of matrices"]()
    changed = {name: change(name, array) for name, array in case.tensors.items()}
    given = {name: array for name, array in changed.items() if array is not None and name != "model.norm.weight"}
    again = to_hf(from_hf(given, "mixtral", LAYER), "mixtral", LAYER)
    assert {name: array.tobytes() for name, array in again.items()} == {
        name: array.tobytes() for name, array in given.items()
    }


def test_matrices_of_one_block_with_static_scales_are_written_in_the_format_that_has_them():
    experts = jaxmoe.Experts.init(jax.random.key(0), 4, 64, 96)
    narrow = jaxmoe.with_input_scales(jaxmoe.quantize(experts, "expert"), 4 / 448, 2 / 448)
    again: Any = from_hf(to_hf(MoEWeights(narrow, jnp.ones((64, 4))), "mixtral", 0), "mixtral", 0)
    jax.tree.map(np.testing.assert_array_equal, again.experts, narrow)


@pytest.mark.parametrize("names", [("w_down",), ("w_gate", "w_up")])
def test_static_scales_of_some_matrices_of_one_block_decide_the_format_of_all(names):
    narrow: Any = jaxmoe.quantize(jaxmoe.Experts.init(jax.random.key(0), 4, 64, 96))
    given = {name: dataclasses.replace(getattr(narrow, name), input_scale=jnp.full(4, 0.5)) for name in names}
    experts = dataclasses.replace(narrow, **given)
    again: Any = from_hf(to_hf(MoEWeights(experts, jnp.ones((64, 4))), "mixtral", 0), "mixtral", 0)
    jax.tree.map(np.testing.assert_array_equal, again.experts, experts)


def test_static_scales_are_left_out_where_neither_the_layer_nor_the_format_has_any():
    case = CASES["qwen3_moe in NVFP4"]()
    weights: Any = from_hf(case.tensors, case.family, LAYER)
    blocks = jaxmoe.quantize(jaxmoe.dequantize(weights.experts, jnp.float32))
    tensors = to_hf(dataclasses.replace(weights, experts=blocks), case.family, LAYER)
    assert not [name for name in tensors if name.endswith("input_scale")]


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_a_shared_expert_with_gate_and_up_in_one_array_is_written_as_one_with_two(layout):
    case = CASES["deepseek_v3"]()
    weights: Any = from_hf(case.tensors, "deepseek_v3", LAYER)
    fused = dataclasses.replace(weights, shared=weights.shared.fuse(layout))
    found, wanted = (to_hf(each, "deepseek_v3", LAYER) for each in (fused, weights))
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in wanted.items()
    }


def test_experts_that_were_quantised_here_are_written_as_a_checkpoint_has_them():
    case = CASES["deepseek_v3"]()
    weights = from_hf(case.tensors, "deepseek_v3", LAYER)
    narrow: Any = dataclasses.replace(weights, experts=jaxmoe.quantize(weights.experts))
    tensors = to_hf(narrow, "deepseek_v3", LAYER)
    stem = f"model.layers.{LAYER}.mlp.experts.5.down_proj."
    assert tensors[f"{stem}weight"].dtype == jnp.float8_e4m3fn
    assert tensors[f"{stem}weight_scale_inv"].shape == (2, 2)
    again: Any = from_hf(tensors, "deepseek_v3", LAYER)
    np.testing.assert_array_equal(again.experts.w_down.values, narrow.experts.w_down.values)
    np.testing.assert_array_equal(again.experts.w_down.scales, narrow.experts.w_down.scales)


@pytest.mark.slow
def test_import_of_the_library_does_not_import_it_and_its_name_does():
    program = (
        "import sys, jaxmoe\n"
        "assert 'jaxmoe.convert' not in sys.modules and 'convert' in dir(jaxmoe)\n"
        "assert jaxmoe.convert.from_hf.__name__ == 'from_hf'\n"
        "assert not {'safetensors', 'tqdm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
