"""Checkpoints that are not what the family says: errors that name the tensor, what was found and what is needed."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.convert import MoEWeights, from_hf, to_hf
from tests.other_arrays import tensor
from tests.unit.checkpoints import BF16, CASES, E4M3, E8M0, EXPERTS, HIDDEN, LAYER

REMOVED = object()
BLOCKS = {"mixtral": "block_sparse_moe", "deepseek_v4": "ffn"}
FFN = f"layers.{LAYER}.ffn."
MLP = f"model.layers.{LAYER}.mlp."


def changed(tensors: dict[str, Any], name: str, change: Any) -> dict[str, Any]:
    assert name in tensors or change is not REMOVED
    rest = {other: array for other, array in tensors.items() if other != name}
    return rest if change is REMOVED else rest | {name: change(tensors.get(name))}


def raises(tensors: Any, family: str, error: type[Exception], *told: str) -> None:
    with pytest.raises(error) as raised:
        from_hf(tensors, family, LAYER)
    for part in told:
        assert part in str(raised.value), str(raised.value)


@pytest.mark.parametrize(
    ("case", "below", "change", "error", "told"),
    [
        # Missing.
        ("mixtral", "experts.5.w2.weight", REMOVED, ValueError, ["is missing", "float32 [out, in]"]),
        ("deepseek_v3", "gate.e_score_correction_bias", REMOVED, ValueError, ["is missing", "[8]"]),
        (
            "deepseek_v3 in FP8",
            "experts.7.down_proj.weight_scale_inv",
            REMOVED,
            ValueError,
            ["is missing", "float32", "[ceil(out / 128), ceil(in / 128)]", "Beside it there are weight."],
        ),
        ("deepseek_v3 in FP8", "shared_experts.up_proj.weight_scale_inv", REMOVED, ValueError, ["is missing"]),
        ("deepseek_v4", "experts.0.w1.scale", REMOVED, ValueError, ["is missing", "float8_e8m0fnu or uint8"]),
        ("qwen3_moe in NVFP4", "experts.0.up_proj.weight_scale_2", REMOVED, ValueError, ["is missing", "one number"]),
        ("gpt_oss", "experts.down_proj_scales", REMOVED, ValueError, ["is missing", "uint8", "[8, 192, 5]"]),
        ("gpt_oss", "experts.gate_up_proj_bias", REMOVED, ValueError, ["is missing", "[8, 320]"]),
        ("gpt_oss", "router.bias", REMOVED, ValueError, ["is missing", "[8]"]),
        ("qwen3_next", "shared_expert_gate.weight", REMOVED, ValueError, ["is missing", "[1, 192]"]),
        # Misshapen.
        (
            "mixtral",
            "experts.2.w3.weight",
            np.transpose,
            ValueError,
            ["has shape [192, 160]; it must be [160, 192]", "out=160, in=192"],
        ),
        ("deepseek_v3 in FP8", "experts.1.up_proj.weight_scale_inv", lambda a: a[:1], ValueError, ["[1, 2]", "[2, 2]"]),
        (
            "gpt_oss",
            "experts.gate_up_proj_blocks",
            lambda a: a[:, :, :, :8],
            ValueError,
            ["[8, 320, 6, 8]", "hidden / 32, 16]"],
        ),
        ("gpt_oss in BF16", "experts.down_proj", lambda a: a[:4], ValueError, ["[4, 160, 192]", "[8, 160, 192]"]),
        ("mixtral", "gate.weight", lambda a: a[0], ValueError, ["has shape [192]; it must be [experts, hidden]"]),
        (
            "qwen3_5_moe",
            "experts.gate_up_proj",
            lambda a: a[:, :319],
            ValueError,
            ["has 319 rows for gate and up, which must be even"],
        ),
        ("qwen3_5_moe", "experts.down_proj", lambda a: a[:, :, :80], ValueError, ["[8, 192, 80]", "hidden, inter"]),
        (
            "mixtral",
            "experts.0.w1.weight",
            np.transpose,
            ValueError,
            [
                "has shape [192, 160]; it must be [out, 192]",
                "block_sparse_moe.gate.weight', [experts, hidden]",
                "[8, 192]",
            ],
        ),
        (
            "mixtral",
            "gate.weight",
            np.transpose,
            ValueError,
            ["has shape [160, 192]; it must be [out, 8]", "[experts, hidden], has shape [192, 8]"],
        ),
        (
            "deepseek_v4",
            "gate.weight",
            np.transpose,
            ValueError,
            ["it must be [out, 4], which is [out, ceil(in / 2)] with in=8", "[experts, hidden], has shape [192, 8]"],
        ),
        # Of another type.
        (
            "mixtral",
            "experts.0.w1.weight",
            lambda a: a.astype(np.int64),
            TypeError,
            ["is int64; it must be bfloat16", "float8_e4m3fn"],
        ),
        ("mixtral", "experts.6.w2.weight", lambda a: a.astype(np.float32), TypeError, ["is float32", "must be alike"]),
        (
            "deepseek_v3 in FP8",
            "experts.0.gate_proj.weight",
            lambda a: a.view(np.uint8),
            TypeError,
            ["is uint8; with weight_scale_inv it must be float8_e4m3fn", "view(jnp.float8_e4m3fn)"],
        ),
        (
            "deepseek_v3 in FP8",
            "experts.0.gate_proj.weight_scale_inv",
            lambda a: np.full(a.shape, 120, np.uint8),
            TypeError,
            ["is uint8; it must be float32", "the exponent + 127", "view(jnp.float8_e8m0fnu)"],
        ),
        # E8M0 that something has read as numbers.
        (
            "deepseek_v4",
            "experts.0.w2.scale",
            lambda a: a.view(np.uint8).astype(np.float32),
            TypeError,
            [
                "is float32; it must be float8_e8m0fnu or uint8",
                "a byte of the exponent + 127",
                "take them from the file",
            ],
        ),
        (
            "deepseek_v4",
            "shared_experts.w1.scale",
            lambda a: a.astype(BF16),
            TypeError,
            ["is bfloat16", "exponent + 127"],
        ),
        (
            "gpt_oss",
            "experts.gate_up_proj_scales",
            lambda a: a.astype(np.float16),
            TypeError,
            ["is float16", "exponent + 127"],
        ),
        # More than the family has.
        (
            "qwen3_moe",
            "experts.8.up_proj.weight",
            lambda _: np.ones(3),
            ValueError,
            ["1 tensors of the layer belong to nothing", "experts.8"],
        ),
        ("mixtral", "experts.0.w1.bias", lambda _: np.ones(3), ValueError, ["experts.0.w1.bias"]),
        # No arrays of NumPy.
        (
            "mixtral",
            "experts.0.w1.weight",
            lambda _: [1.0],
            TypeError,
            ["is a builtins.list; pass NumPy or JAX arrays"],
        ),
        (
            "mixtral",
            "experts.0.w1.weight",
            lambda a: tensor(*a.shape, dtype=None),
            TypeError,
            ["is a tests.other_arrays.Tensor; pass NumPy or JAX arrays"],
        ),
    ],
)
def test_a_tensor_that_is_not_what_the_family_has_is_named(case, below, change, error, told):
    made = CASES[case]()
    prefix = {"deepseek_v4": "", "qwen3_5_moe": "model.language_model."}.get(made.family, "model.")
    name = f"{prefix}layers.{LAYER}.{BLOCKS.get(made.family, 'mlp')}.{below}"
    raises(changed(made.tensors, name, change), made.family, error, name, *told)


@pytest.mark.parametrize(("field", "kind"), [("w_up", "mxfp4"), ("w_down", "channel"), ("w_down", None)])
def test_experts_of_a_layer_are_not_written_in_two_formats(field, kind, unchecked_shapes):
    weights = weights_of("deepseek_v3 in FP8")
    other: Any = jaxmoe.dequantize(weights.experts, jnp.float32)
    other = other if kind is None else jaxmoe.quantize(other, kind)
    mixed = dataclasses.replace(weights.experts, **{field: getattr(other, field)})
    with pytest.raises(TypeError, match=f"experts.{field} is in .*, and experts.w_gate in FP8 in blocks; they must be"):
        to_hf(dataclasses.replace(weights, experts=mixed), "deepseek_v3", LAYER)


def test_matrices_of_one_block_that_have_no_format_in_common_are_told_theirs():
    narrow: Any = jaxmoe.quantize(jaxmoe.Experts.init(jax.random.key(0), 4, 64, 96))
    static = dataclasses.replace(narrow.w_up, input_scale=jnp.full(4, 0.5))
    powers = dataclasses.replace(narrow.w_down, scales=narrow.w_down.scales.astype(E8M0))
    experts = dataclasses.replace(narrow, w_up=static, w_down=powers)
    told = "w_down is in the format FP8 in blocks, and experts.w_gate in FP8 with a scale for each matrix; they must"
    with pytest.raises(TypeError, match=f"to_hf: experts.{told}"):
        to_hf(MoEWeights(experts, jnp.ones((64, 4))), "mixtral", 0)


def test_widths_of_gpt_oss_that_its_scales_do_not_divide_are_told():
    tensors, router, into = CASES["gpt_oss"]().tensors, f"{MLP}router.weight", f"{MLP}experts.gate_up_proj_blocks"
    wider = changed(tensors, router, lambda a: np.concatenate([a, a[:, :8]], 1))
    raises(wider, "gpt_oss", ValueError, into, "hidden=200; both", "multiples of 32")
    longer = changed(tensors, into, lambda a: np.concatenate([a, a[:, :16]], 1))
    raises(longer, "gpt_oss", ValueError, into, "intermediate=168; both", "multiples of 32")


@pytest.mark.parametrize(
    ("case", "router"),
    [
        ("qwen3_5_moe", "model.language_model.layers.3.mlp.gate.weight"),
        ("gpt_oss", f"{MLP}router.weight"),
        ("gpt_oss in BF16", f"{MLP}router.weight"),
    ],
)
def test_experts_in_one_tensor_beside_a_transposed_router_are_told_its_sizes(case, router):
    made = CASES[case]()
    told = "with experts=192 and hidden=8, those of the router, [experts, hidden]"
    raises(changed(made.tensors, router, np.transpose), made.family, ValueError, "gate_up_proj", told)


@pytest.mark.parametrize(
    ("case", "family", "told"),
    [
        ("mixtral", "qwen3_moe", ["'layers.3.mlp.gate.weight', the router of layer 3", "those of 'mixtral'"]),
        ("qwen3_moe", "deepseek_v3", ["gate.e_score_correction_bias' is missing"]),
        (
            "deepseek_v3",
            "qwen3_moe",
            ["belong to nothing that family='qwen3_moe' has", "those of 'deepseek_v3' or 'glm4_moe' or 'kimi_k2'"],
        ),
        ("gpt_oss", "mixtral", ["those of 'gpt_oss'"]),
        ("deepseek_v4", "deepseek_v3", ["those of 'deepseek_v4'"]),
        ("mixtral", "mistral", ["family='mistral' must be one of 'mixtral', 'minimax_m2',"]),
    ],
)
def test_the_wrong_family_is_told_by_the_names_that_are_there(case, family, told):
    raises(CASES[case]().tensors, family, ValueError, *told)


def test_formats_that_are_not_read_are_refused_with_what_is_there():
    case = CASES["qwen3_moe"]()
    packed = {name.replace("proj.weight", "proj.weight_packed"): array for name, array in case.tensors.items()}
    raises(
        packed, "qwen3_moe", ValueError, "experts.0.gate_proj.weight' is missing", "Beside it there are weight_packed."
    )
    case = CASES["qwen3_moe in FP8 of outputs"]()
    scales = f"{MLP}experts.0.gate_proj.weight_scale"
    halved = changed(case.tensors, scales, lambda array: array[::2])
    raises(halved, "qwen3_moe", ValueError, scales, "[80, 1] beside a weight [160, 192]", "[out, 1]: FP8 with a scale")


def test_a_layer_without_experts_is_told_which_layers_have_some():
    case = CASES["deepseek_v3"]()
    more = {name.replace("layers.3.", "layers.7."): array for name, array in case.tensors.items()}
    with pytest.raises(
        ValueError, match=r"router of layer 0 where family='deepseek_v3'\. Layers that have one: 3, 7\."
    ):
        from_hf(case.tensors | more, "deepseek_v3", 0)
    with pytest.raises(ValueError, match=r"No layer has one\."):
        from_hf({}, "deepseek_v3", 0)


def test_two_models_in_one_checkpoint_are_told_apart_by_their_prefix():
    case = CASES["kimi_k2 in FP8"]()
    both = case.tensors | {f"draft.{name}": array for name, array in case.tensors.items()}
    with pytest.raises(ValueError, match=r"2 routers of layer 3: language_model\.model\..*Pass prefix="):
        from_hf(both, "kimi_k2", LAYER)
    weights = from_hf(both, "kimi_k2", LAYER, prefix="draft.language_model.model.")
    assert weights.experts.num_experts == EXPERTS


def test_a_prefix_is_text_that_ends_with_a_dot(unchecked_shapes):
    case = CASES["mixtral"]()
    weights = from_hf(case.tensors, "mixtral", LAYER)
    for call in (
        lambda prefix: from_hf(case.tensors, "mixtral", LAYER, prefix=prefix),
        lambda prefix: to_hf(weights, "mixtral", LAYER, prefix=prefix),
    ):
        with pytest.raises(
            ValueError, match=r"prefix='model' has no dot at its end.*'modellayers\.'.*prefix='model\.'"
        ):
            call("model")
        with pytest.raises(TypeError, match="prefix is an int; it must be a str"):
            call(3)
    assert all(name.startswith("layers.") for name in to_hf(weights, "mixtral", LAYER, prefix=""))


def test_what_is_no_checkpoint_is_an_error(tmp_path, unchecked_shapes):
    with pytest.raises(TypeError, match="tensors is a list; it must be a path, or a mapping"):
        from_hf([np.ones(3)], "mixtral", 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FileNotFoundError, match=r"neither a \.safetensors file nor a directory with any"):
        from_hf(tmp_path, "mixtral", 0)


def weights_of(name: str) -> Any:
    case = CASES[name]()
    return from_hf(case.tensors, case.family, LAYER)


@pytest.mark.parametrize(
    ("case", "family", "change", "error", "told"),
    [
        ("mixtral", "deepseek_v3", {}, ValueError, "selection_bias is None; .* has 'gate.e_score_correction_bias'"),
        ("deepseek_v3", "mixtral", {}, ValueError, "selection_bias is given, and family='mixtral' has no name for it"),
        ("gpt_oss", "mixtral", {"router_bias": None}, ValueError, "experts have biases"),
        (
            "mixtral",
            "gpt_oss",
            {"router_bias": np.ones(8, np.float32)},
            ValueError,
            "experts.b_gate, experts.b_up, experts.b_down is None",
        ),
        ("deepseek_v3 in FP8", "deepseek_v4", {}, TypeError, "BlockScaled with a float32 scale for 128x128"),
        ("qwen3_next", "qwen3_next", {"shared_gate": None}, ValueError, "shared_gate is None"),
        ("qwen3_next", "qwen3_next", {"shared": None}, ValueError, "shared is None, whose answer it multiplies"),
        (
            "mixtral",
            "mixtral",
            {"input_scales": {"w_gate": np.ones(8)}},
            ValueError,
            "input_scales has 'w_gate'; names are 'experts.w_gate', .*'shared.w_down'",
        ),
    ],
)
def test_weights_that_a_family_cannot_have_are_not_written(case, family, change, error, told):
    with pytest.raises(error, match=told):
        to_hf(dataclasses.replace(weights_of(case), **change), family, LAYER)


@pytest.mark.parametrize("shape", [(EXPERTS, HIDDEN), (HIDDEN, EXPERTS - 1), (HIDDEN,)])
def test_a_router_that_does_not_fit_the_experts_is_not_written(shape, unchecked_shapes):
    weights = dataclasses.replace(weights_of("mixtral"), router_kernel=np.ones(shape, np.float32))
    told = rf"router_kernel has shape \[{', '.join(map(str, shape))}\]; it must be \[192, 8\], \[hidden, experts\]"
    with pytest.raises(ValueError, match=told):
        to_hf(weights, "mixtral", LAYER)


@pytest.mark.parametrize(
    ("case", "change", "told"),
    [
        (
            "deepseek_v3",
            lambda w: {"shared": jax.tree.map(lambda a: jnp.concatenate([a, a]), w.shared)},
            "weights.shared has 2 experts; it must have one.*join w_gate and w_up along intermediate",
        ),
        (
            "deepseek_v3",
            lambda w: {"shared": jaxmoe.Experts.init(jax.random.key(0), 1, HIDDEN + 64, 96)},
            "weights.shared has hidden=256; it must be 192, that of weights.experts",
        ),
        (
            "deepseek_v3",
            lambda w: {"shared": jax.tree.map(lambda a: a[0], w.shared)},
            r"weights.shared.w_gate has shape \(192, 320\); it must be \[experts, hidden, .*array\[None\]",
        ),
        (
            "deepseek_v3 in FP8",
            lambda w: {"shared": jax.tree.map(lambda a: a[0], w.shared)},
            r"weights.shared.w_gate: BlockScaled: values \(320, 192\) and scales \(3, 2\) make no blocks",
        ),
        (
            "mixtral",
            lambda w: {"experts": dataclasses.replace(w.experts, w_down=w.experts.w_down[:7])},
            r"weights.experts.w_down has shape \(7, 160, 192\); it must be \(8, 160, 192\)",
        ),
        (
            "gpt_oss",
            lambda w: {"experts": dataclasses.replace(w.experts, b_up=w.experts.b_up[:, :80])},
            r"weights.experts.b_up has shape \(8, 80\); it must be \(8, 160\)",
        ),
        (
            "deepseek_v3",
            lambda w: {"selection_bias": np.zeros(7, np.float32)},
            r"weights.selection_bias has shape \[7\]; it must be \[8\], \[experts\]",
        ),
        (
            "gpt_oss",
            lambda w: {"router_bias": np.zeros((8, 1), np.float32)},
            r"weights.router_bias has shape \[8, 1\]; .* \[8\]",
        ),
        (
            "qwen3_next",
            lambda w: {"shared_gate": w.shared_gate.T},
            r"weights.shared_gate has shape \[1, 192\]; it must be \[192, 1\].*Transpose it",
        ),
        (
            "mixtral in FP8 of matrices",
            lambda w: {"input_scales": {"experts.w_up": np.ones(9)}},
            r"weights.input_scales\['experts.w_up'\] has shape \[9\]; it must be \[8\]",
        ),
    ],
)
def test_arrays_that_do_not_fit_the_experts_are_not_written(case, change, told, unchecked_shapes):
    weights = weights_of(case)
    with pytest.raises(ValueError, match=f"to_hf: {told}"):
        to_hf(dataclasses.replace(weights, **change(weights)), CASES[case]().family, LAYER)


@pytest.mark.parametrize(
    ("case", "change", "told"),
    [
        (
            "mixtral",
            lambda _: {"router_kernel": None},
            r"router_kernel is a NoneType; it must be an array \[hidden, exp",
        ),
        ("mixtral", lambda w: {"router_kernel": np.asarray(w.router_kernel).tolist()}, "router_kernel is a list"),
        (
            "mixtral",
            lambda w: {"router_kernel": np.asarray(w.router_kernel, np.float64)},
            r"router_kernel is float64; .* \[hidden, experts\] in bfloat16 or float16 or float32, which from_hf reads",
        ),
        ("deepseek_v3", lambda _: {"selection_bias": np.zeros(8, int)}, "selection_bias is int64; it must"),
        ("gpt_oss", lambda _: {"router_bias": np.zeros(8)}, "router_bias is float64; it must"),
        (
            "mixtral",
            lambda w: {"experts": jax.tree.map(lambda a: np.asarray(a, np.int32), w.experts)},
            r"experts.w_gate is int32; .* which from_hf reads. Pass jaxmoe.dequantize\(experts, dtype\)",
        ),
        (
            "deepseek_v3",
            lambda w: {"shared": jax.tree.map(lambda a: a.astype(E4M3), w.shared)},
            r"shared.w_gate is float8_e4m3fn; it must be in bfloat16",
        ),
        (
            "deepseek_v4, experts by token",
            lambda w: {"token_table": w.token_table + 0.5},
            r"token_table is float32; it must be integers \[vocabulary, top_k\]",
        ),
        (
            "mixtral in FP8 of matrices",
            lambda _: {"input_scales": [1.0]},
            "input_scales is a list; it must be None, or",
        ),
    ],
)
def test_arrays_in_a_dtype_that_is_not_read_are_not_written(case, change, told, unchecked_shapes):
    weights = weights_of(case)
    with pytest.raises(TypeError, match=f"to_hf: weights.{told}"):
        to_hf(dataclasses.replace(weights, **change(weights)), CASES[case]().family, LAYER)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"selection_bias": np.zeros(8, np.float32)}, "selection_bias and weights.token_table are given"),
        ({"token_table": np.zeros(4, np.int32)}, r"token_table has shape \[4\]; it must be \[vocabulary, top_k\]"),
    ],
)
def test_a_table_of_experts_that_is_not_read_is_not_written(change, told, unchecked_shapes):
    weights = weights_of("deepseek_v4, experts by token")
    with pytest.raises(ValueError, match=f"to_hf: weights.{told}"):
        to_hf(dataclasses.replace(weights, **change), "deepseek_v4", LAYER)


def test_a_mesh_axis_that_is_no_name_is_told(unchecked_shapes):
    axis: Any = 3
    with pytest.raises(TypeError, match="from_hf: the mesh axis for experts is an int; it must be a name, several, or"):
        from_hf(CASES["mixtral"]().tensors, "mixtral", LAYER, axis_name=axis)


@pytest.mark.parametrize("field", ["experts", "shared"])
def test_what_is_no_experts_is_not_written(field, unchecked_shapes):
    weights: Any = dataclasses.replace(weights_of("deepseek_v3"), **{field: [np.ones(3)]})
    with pytest.raises(TypeError, match=f"to_hf: weights.{field}: experts is a list; pass jaxmoe.Experts"):
        to_hf(weights, "deepseek_v3", LAYER)


def test_static_scales_that_the_layer_does_not_use_are_not_written():
    weights = weights_of("qwen3_moe in NVFP4")
    narrow = jaxmoe.quantize(jaxmoe.dequantize(weights.experts, jnp.float32), "expert")
    weights = dataclasses.replace(weights, experts=narrow)
    told = "weights.input_scales has 'experts.w_gate', and the layer does not use it: .* Pass experts of jaxmoe.with_in"
    with pytest.raises(ValueError, match=told):
        to_hf(weights, "qwen3_moe", LAYER)
    calibrated = dataclasses.replace(weights, experts=jaxmoe.with_input_scales(narrow, 4 / 448, 2 / 448))
    for other in (dataclasses.replace(weights, input_scales=None), calibrated):
        again = from_hf(to_hf(other, "qwen3_moe", LAYER), "qwen3_moe", LAYER)
        jax.tree.map(np.testing.assert_array_equal, again.experts, other.experts)


@pytest.mark.parametrize(
    ("case", "block", "told"),
    [
        ("deepseek_v3", "128x128", r"FP8 in blocks has no name for it.*quantize\(experts, 'expert'\), or take it away"),
        ("deepseek_v3", "channel", r"FP8 with a scale for each output has no name for it"),
        ("deepseek_v4", "128x128", r"FP8 in blocks with powers of two has no name for it in .* Take it away"),
    ],
)
def test_static_scales_are_not_dropped_in_a_format_without_a_name_for_them(case, block, told):
    weights = weights_of(case)
    narrow: Any = jaxmoe.quantize(jaxmoe.dequantize(weights.experts, jnp.float32), block)
    if case == "deepseek_v4":
        narrow = jax.tree.map(lambda a: a.astype(E8M0) if a.dtype == jnp.float32 else a, narrow)
    weights = dataclasses.replace(weights, experts=jaxmoe.with_input_scales(narrow, 4 / 448, 2 / 448))
    with pytest.raises(ValueError, match=f"to_hf: experts.w_gate has an input_scale, and {told}"):
        to_hf(weights, case, LAYER)


@pytest.mark.parametrize("layer", [-1, "3", True, 3.0, None])
def test_a_layer_that_is_no_number_from_0_is_neither_read_nor_written(layer, unchecked_shapes):
    told = f"layer={layer!r} must be an integer of at least 0, its number in the names"
    with pytest.raises(ValueError, match=f"from_hf: {told}"):
        from_hf(CASES["mixtral"]().tensors, "mixtral", layer)
    with pytest.raises(ValueError, match=f"to_hf: {told}"):
        to_hf(weights_of("mixtral"), "mixtral", layer)


@pytest.mark.parametrize("layer", [np.int64(LAYER), jnp.asarray(LAYER)])
def test_a_layer_is_an_integer_of_any_type(layer, unchecked_shapes):
    case = CASES["mixtral"]()
    again = to_hf(from_hf(case.tensors, "mixtral", layer), "mixtral", layer)
    assert again.keys() < case.tensors.keys()


@pytest.mark.parametrize("family", [["mixtral"], None, 0])
def test_a_family_that_is_no_name_is_told_the_names(family, unchecked_shapes):
    told = re.escape(f"family={family!r} must be one of 'mixtral', 'minimax_m2',")
    with pytest.raises(ValueError, match=f"from_hf: {told}"):
        from_hf({}, family, 0)
    with pytest.raises(ValueError, match=f"to_hf: {told}"):
        to_hf(weights_of("mixtral"), family, 0)


@pytest.mark.parametrize("dtype", [jnp.int32, np.int8, bool, E4M3])
def test_wide_experts_are_not_read_in_a_dtype_that_is_not_wide(dtype):
    case = CASES["mixtral"]()
    with pytest.raises(TypeError, match=f"from_hf: dtype is {np.dtype(dtype)}; it must be one of bfloat16, float16"):
        from_hf(case.tensors, "mixtral", LAYER, dtype=dtype)


def test_scales_are_not_rounded_on_their_way_back(unchecked_shapes):
    weights = weights_of("deepseek_v3 in FP8")
    with pytest.raises(ValueError, match="weight_scale_inv cannot be bfloat16 without rounding"):
        to_hf(weights, "deepseek_v3", LAYER, scale_dtype=jnp.bfloat16)
    per_channel = jaxmoe.quantize(jaxmoe.dequantize(weights.experts, jnp.float32), "channel")
    powers = jax.tree.map(
        lambda matrix: jaxmoe.BlockScaled(matrix.values, matrix.scales.astype(E8M0)),
        per_channel,
        is_leaf=lambda leaf: isinstance(leaf, jaxmoe.BlockScaled),
    )
    with pytest.raises(TypeError, match="BlockScaled with a float8_e8m0fnu scale for channel"):
        to_hf(dataclasses.replace(weights, experts=powers), "deepseek_v3", LAYER)
    with pytest.raises(TypeError, match="weights is a dict; pass the MoEWeights"):
        to_hf({}, "mixtral", 0)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [None, np.float16, np.float64, np.int32, E4M3, "no dtype"])
def test_scales_are_not_written_in_a_dtype_that_is_not_read(dtype, unchecked_shapes):
    powers: Any = jax.tree.map(
        lambda leaf: dataclasses.replace(leaf, scales=jnp.ones_like(leaf.scales)) if hasattr(leaf, "scales") else leaf,
        weights_of("deepseek_v3 in FP8"),
        is_leaf=lambda leaf: hasattr(leaf, "scales"),
    )
    name = repr(dtype) if dtype in (None, "no dtype") else np.dtype(dtype).name
    with pytest.raises(TypeError, match=f"scale_dtype is {name}; it must be float32 or bfloat16, or float8_e8m0fnu"):
        to_hf(powers, "deepseek_v3", LAYER, scale_dtype=dtype)  # pyright: ignore[reportArgumentType]
    assert to_hf(powers, "deepseek_v3", LAYER, scale_dtype=E8M0).keys() == to_hf(powers, "deepseek_v3", LAYER).keys()
    of_channels = jaxmoe.quantize(jaxmoe.dequantize(powers.experts, jnp.float32), "channel")
    with pytest.raises(TypeError, match="scale_dtype is float8_e8m0fnu, and weight_scale is float32 or bfloat16"):
        to_hf(dataclasses.replace(powers, experts=of_channels, shared=None), "deepseek_v3", LAYER, scale_dtype=E8M0)


@pytest.mark.parametrize("kind", ["channel", "expert"])
def test_scales_that_are_no_blocks_are_written_in_the_dtype_that_is_asked_for_too(kind, unchecked_shapes):
    weights = dataclasses.replace(weights_of("deepseek_v3 in FP8"), shared=None)
    experts = jaxmoe.quantize(jaxmoe.dequantize(weights.experts, jnp.float32), kind)
    in_16_bits: Any = jax.tree.map(
        lambda leaf: dataclasses.replace(leaf, scales=leaf.scales.astype(jnp.bfloat16).astype(jnp.float32)),
        experts,
        is_leaf=lambda leaf: hasattr(leaf, "scales"),
    )
    given = dataclasses.replace(weights, experts=in_16_bits)
    for dtype in (jnp.bfloat16, jnp.float32):
        tensors = to_hf(given, "deepseek_v3", LAYER, scale_dtype=dtype)
        assert {array.dtype for name, array in tensors.items() if name.endswith("weight_scale")} == {np.dtype(dtype)}


def test_powers_of_two_stay_what_they_are_in_either_family():
    case = CASES["deepseek_v3 in FP8"]()
    name = f"{MLP}experts.3.up_proj.weight_scale_inv"
    powers = {
        key: np.exp2(np.round(np.log2(array))).astype(np.float32) if key.endswith("scale_inv") else array
        for key, array in case.tensors.items()
    }
    as_e8m0 = {key: array.astype(E8M0) if key.endswith("scale_inv") else array for key, array in powers.items()}
    weights: Any = from_hf(as_e8m0, "deepseek_v3", LAYER)
    assert weights.experts.w_up.scales.dtype == E8M0
    assert weights.experts.w_up.values.dtype == E4M3
    again = to_hf(weights, "deepseek_v3", LAYER)
    assert again[name].dtype == np.float32
    np.testing.assert_array_equal(again[name], powers[name])
    # As DeepSeek-V4 has its shared expert, all experts may be.
    in_v4 = dataclasses.replace(weights, selection_bias=weights.selection_bias)
    assert to_hf(in_v4, "deepseek_v4", LAYER)[f"{FFN}experts.3.w3.scale"].dtype == E8M0


def test_weights_are_a_pytree():
    weights: MoEWeights = weights_of("qwen3_moe in NVFP4")
    assert sorted(weights.input_scales or ()) == ["experts.w_down", "experts.w_gate", "experts.w_up"]
    doubled = jax.jit(lambda weights: jax.tree.map(lambda leaf: leaf, weights))(weights)
    assert doubled.router_kernel.shape == (HIDDEN, EXPERTS)
