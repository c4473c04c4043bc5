"""Experts in 8 and 4 bits beside what others compute of the same bits: `make test-transformers`.

The tensors of a layer are drawn as bits. `from_hf` and `moe_layer` make outputs of them, and so do others: loaders of
transformers and compressed-tensors decode the weights, compressed-tensors rounds tokens and h, and the experts of
transformers multiply both in float64.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.convert import from_hf
from jaxmoe.testing import relative_error
from tests.unit.checkpoints import BF16, exponents, fp8, fp8_of_matrices, mxfp4, mxfp4_compressed, nvfp4

NEEDS = "torch, transformers and compressed-tensors are not installed: make test-transformers"
torch: Any = pytest.importorskip("torch", reason=NEEDS)
transformers: Any = pytest.importorskip("transformers", reason=NEEDS)
compressed_tensors: Any = pytest.importorskip("compressed_tensors", reason=NEEDS)

pytestmark = pytest.mark.filterwarnings("default")  # what they warn of is not ours

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS, LAYER = 4, 2, 256, 384, 48, 1
IMPLEMENTATIONS = ("reference", "xla", "megakernel")
# Tokens and h are rounded by the same rule, so errors are those of float32 (8e-7). But sums in another order may put a
# number of h on the other side of the middle between two of 8 bits, which changes it by up to an eighth.
ALLOWED_BESIDE_ROUNDING = 1e-3
Linear = dict[str, np.ndarray]  # the tensors of a matrix [out, in], by their suffixes


def as_torch(array: np.ndarray) -> Any:
    """The same bits; 8-bit floats by way of their bytes, which NumPy does not know."""
    narrow = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e8m0fnu": torch.float8_e8m0fnu, "bfloat16": torch.bfloat16}
    if (kind := narrow.get(array.dtype.name)) is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"uint{8 * array.itemsize}")).view(kind)


# --- decoded by others ------------------------------------------------------------------------------------------------


def by_transformers(linear: Linear) -> Any:
    """FP8 in blocks, and DeepSeek-V4's FP4, as its loader makes wide weights of them."""
    module = importlib.import_module("transformers.integrations.finegrained_fp8")
    scales = linear["weight_scale_inv" if "weight_scale_inv" in linear else "scale"]
    given = {"weight": as_torch(linear["weight"]), "weight_scale_inv": as_torch(scales)}
    return module.Fp8Dequantize(None).convert(given)["weight"]


def by_compressed_tensors(linear: Linear) -> Any:
    """What compressed-tensors writes in 8 and 4 bits, by the functions it decompresses with, in float32.

    As a whole it decompresses to BF16, which the product of three factors does not fit in.
    """
    values, scales, of_matrix = (linear.get(name) for name in ("weight_packed", "weight_scale", "weight_global_scale"))
    assert scales is not None
    if values is None:
        elements, factors, kind = as_torch(linear["weight"]).float(), as_torch(scales), {"strategy": "tensor"}
    else:
        helpers = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers")
        out, half = values.shape
        elements = helpers.unpack_fp4_from_uint8(as_torch(values), out, 2 * half, dtype=torch.float32)
        exponents_of = importlib.import_module("compressed_tensors.compressors.mx_utils").decompress_mx_scale
        factors = exponents_of(as_torch(scales)) if scales.dtype == np.uint8 else as_torch(scales)
        kind = {"strategy": "group" if of_matrix is None else "tensor_group", "group_size": 2 * half // scales.shape[1]}
    quantization = compressed_tensors.quantization
    return quantization.lifecycle.forward.dequantize(
        elements,
        factors.float(),
        args=quantization.QuantizationArgs(num_bits=8 if values is None else 4, symmetric=True, type="float", **kind),
        global_scale=None if of_matrix is None else as_torch(of_matrix),
        dtype=torch.float32,
    )


def nvfp4_compressed(rng: Any, out: int, inner: int) -> Linear:
    """As compressed-tensors writes NVFP4: it divides by the scale of a matrix."""
    drawn = nvfp4(rng, out, inner)
    of_matrix = 1 / drawn["weight_scale_2"].reshape(1)
    packed = {"weight_packed": drawn["weight"], "weight_scale": drawn["weight_scale"]}
    return packed | {"weight_global_scale": of_matrix.astype(np.float32)}


# --- layers -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
      name: in `from_hf`.
      model: in transformers, from which the module has its name, and what its classes begin with.
      config: further sizes that it wants.
      activation: of the experts.
    """

    name: str
    model: tuple[str, str]
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    activation: Any = "silu"

    def experts(self, gate_up: Any, down: Any) -> Any:
        """Returns the experts of transformers, in float64, with weights `[experts, out, in]`."""
        module = importlib.import_module(f"transformers.models.{self.model[0]}.modeling_{self.model[0]}")
        sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS} | self.config
        config = getattr(transformers, f"{self.model[1]}Config")(**sizes)
        made = getattr(module, f"{self.model[1]}Experts")(config)
        made.gate_up_proj.data, made.down_proj.data = gate_up, down
        return made.double()


MOE = {"moe_intermediate_size": INTERMEDIATE}
QWEN3 = Family("qwen3_moe", ("qwen3_moe", "Qwen3Moe"), MOE | {"num_experts": EXPERTS})
MIXTRAL = Family("mixtral", ("mixtral", "Mixtral"))
DEEPSEEK_V3 = Family("deepseek_v3", ("deepseek_v3", "DeepseekV3"), MOE | {"n_routed_experts": EXPERTS})
DEEPSEEK_V4 = Family(
    "deepseek_v4", ("deepseek_v4", "DeepseekV4"), MOE | {"n_routed_experts": EXPERTS}, jaxmoe.SwiGLU.deepseek_v4()
)
BLOCKS = {"mixtral": "model.layers.{}.block_sparse_moe.", "deepseek_v4": "layers.{}.ffn."}
NAMES = {"mixtral": ("w1", "w3", "w2"), "deepseek_v4": ("w1", "w3", "w2")}


@dataclasses.dataclass(frozen=True)
class Case:
    """Bits of a family, and who decodes them.

    Args:
      family: of the layer.
      matrix: draws a matrix.
      decode: what others make of it.
    """

    family: Family
    matrix: Callable[[Any, int, int], Linear]
    decode: Callable[[Linear], Any]


CASES = {
    "Qwen3-MoE in FP8": Case(QWEN3, fp8, by_transformers),
    "DeepSeek-V3 in FP8": Case(DEEPSEEK_V3, fp8, by_transformers),
    "DeepSeek-V4 in FP4": Case(DEEPSEEK_V4, mxfp4, by_transformers),
    "Mixtral in FP8 of matrices": Case(MIXTRAL, fp8_of_matrices, by_compressed_tensors),
    "Qwen3-MoE in NVFP4": Case(QWEN3, nvfp4_compressed, by_compressed_tensors),
    "Qwen3-MoE in MXFP4": Case(QWEN3, mxfp4_compressed, by_compressed_tensors),
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer: ours from its checkpoint, and theirs."""

    tensors: dict[str, Any]
    family: Family
    theirs: Any

    def ours(self, precision: Any, implementation: Any) -> np.ndarray:
        experts = from_hf(self.tensors, self.family.name, LAYER).experts
        biases = {name: array for name, array in vars(experts).items() if name.startswith("b_") and array is not None}
        # In the dtype of the tokens, exactly.
        experts = dataclasses.replace(experts, **{name: array.astype(jnp.float32) for name, array in biases.items()})
        x, ids, weights = (jnp.asarray(array) for array in routed_tokens())
        y = jaxmoe.moe_layer(
            x,
            ids,
            weights,
            experts,
            activation=self.family.activation,
            axis_name=None,
            implementation=implementation,
            precision=precision,
        )
        return np.asarray(y)

    def of_theirs(self) -> np.ndarray:
        x, ids, weights = (torch.from_numpy(array) for array in routed_tokens())
        with torch.no_grad():
            return self.theirs(x.double(), ids.long(), weights.double()).numpy()


def routed_tokens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens in float32 and the experts that they are given: no router stands between the two."""
    rng = np.random.default_rng(5)
    ids = np.argsort(rng.random((TOKENS, EXPERTS)), 1)[:, :TOP_K].astype(np.int32)
    weights = rng.uniform(0.2, 1, (TOKENS, TOP_K)).astype(np.float32)
    return rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32), ids, weights


def layer_of(case: Case) -> Layer:
    rng, family = np.random.default_rng(3), case.family
    block = BLOCKS.get(family.name, "model.layers.{}.mlp.").format(LAYER)
    tensors: dict[str, Any] = {f"{block}gate.weight": rng.standard_normal((EXPERTS, HIDDEN)).astype(BF16)}
    if family.name.startswith("deepseek"):
        bias = "gate.bias" if family is DEEPSEEK_V4 else "gate.e_score_correction_bias"
        tensors[f"{block}{bias}"] = np.zeros(EXPERTS, np.float32)
    decoded: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    names = NAMES.get(family.name, ("gate_proj", "up_proj", "down_proj"))
    for expert in range(EXPERTS):
        of_matrix = None
        for which, name in enumerate(names):
            sizes = (HIDDEN, INTERMEDIATE) if which == 2 else (INTERMEDIATE, HIDDEN)
            linear = case.matrix(rng, *sizes)
            if which == 1 and of_matrix is not None:  # gate and up have one in such checkpoints
                linear |= {key: of_matrix[key] for key in linear if "global_scale" in key}
            of_matrix = linear
            decoded[which].append(case.decode(linear))
            tensors |= {f"{block}experts.{expert}.{name}.{suffix}": array for suffix, array in linear.items()}
    gate, up, down = (torch.stack(decoded[which]) for which in range(3))
    return Layer(tensors, family, family.experts(torch.cat([gate, up], 1), down))


# --- tests ------------------------------------------------------------------------------------------------------------


def allowed(layer: Layer) -> float:
    """Twice the error of the same experts of theirs in float32, which sums in an order of its own."""
    x, ids, weights = (torch.from_numpy(array) for array in routed_tokens())
    truth = layer.of_theirs()
    with torch.no_grad():
        rough = layer.theirs.float()(x, ids.long(), weights).double().numpy()
    layer.theirs.double()
    return 2 * relative_error(rough, truth)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_decoded_experts_are_those_that_others_decode(name, implementation):
    layer = layer_of(CASES[name])
    kind = from_hf(layer.tensors, layer.family.name, LAYER).experts.w_gate
    precision = "w8a16" if isinstance(kind, jaxmoe.BlockScaled) else "w4a16"
    assert relative_error(layer.ours(precision, implementation), layer.of_theirs()) <= allowed(layer)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_packed_experts_of_gpt_oss_are_those_of_transformers(implementation):
    rng, block = np.random.default_rng(8), f"model.layers.{LAYER}.mlp."
    tensors: dict[str, Any] = {
        f"{block}router.weight": rng.standard_normal((EXPERTS, HIDDEN)).astype(BF16),
        f"{block}router.bias": np.zeros(EXPERTS, BF16),
    }
    mxfp4_of = importlib.import_module("transformers.integrations.mxfp4")
    decoded, biases = {}, {}
    for name, out, inner in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
        blocks = rng.integers(0, 256, (EXPERTS, out, inner // 32, 16)).astype(np.uint8)
        scales, bias = exponents(rng, EXPERTS, out, inner // 32), rng.standard_normal((EXPERTS, out)).astype(BF16)
        stem = f"{block}experts.{name}"
        tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales, f"{stem}_bias": bias}
        given = torch.from_numpy(blocks), torch.from_numpy(scales)
        decoded[name] = mxfp4_of.convert_moe_packed_tensors(*given, dtype=torch.float32)
        biases[name] = torch.from_numpy(bias.astype(np.float32))
    family = Family("gpt_oss", ("gpt_oss", "GptOss"), {}, jaxmoe.SwiGLU.gpt_oss())
    theirs = family.experts(decoded["gate_up_proj"], decoded["down_proj"])
    theirs.gate_up_proj_bias.data = biases["gate_up_proj"].double()
    theirs.down_proj_bias.data = biases["down_proj"].double()
    layer = Layer(tensors, family, theirs)
    assert relative_error(layer.ours("w4a16", implementation), layer.of_theirs()) <= allowed(layer)


@contextlib.contextmanager
def rounded_by_compressed_tensors(input_scales: dict[int, float] | None) -> Iterator[None]:
    """What experts of theirs multiply is rounded to 8 bits first, with a scale for each row and 128 columns.

    Args:
      input_scales: or with these, by the width of what is multiplied.
    """
    forward = compressed_tensors.quantization.lifecycle.forward
    helpers = compressed_tensors.quantization.utils
    linear = torch.nn.functional.linear

    def args(**fields: Any) -> Any:
        return compressed_tensors.quantization.QuantizationArgs(num_bits=8, type="float", symmetric=True, **fields)

    def rounded(x: Any, weight: Any, bias: Any = None) -> Any:
        if input_scales is None:
            of_groups = args(strategy="group", group_size=128, dynamic=True)
            scale, zero = helpers.compute_dynamic_scales_and_zp(x.float(), of_groups, None)
            x = forward.fake_quantize(x.float(), scale, zero, of_groups)
        else:
            scale = torch.tensor([input_scales[x.shape[-1]]])
            x = forward.fake_quantize(x.float(), scale, torch.zeros(1), args(strategy="tensor"))
        return linear(x.double(), weight, bias)

    torch.nn.functional.linear = rounded
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


# The megakernel rounds no tokens beside experts in 4 bits.
ROUNDED = [
    *(
        (name, implementation)
        for name in ("Qwen3-MoE in FP8", "DeepSeek-V3 in FP8")
        for implementation in IMPLEMENTATIONS
    ),
    *(("DeepSeek-V4 in FP4", implementation) for implementation in ("reference", "xla")),
]


@pytest.mark.parametrize(("name", "implementation"), ROUNDED)
def test_tokens_and_h_are_rounded_as_compressed_tensors_rounds_them(name, implementation):
    layer = layer_of(CASES[name])
    unrounded = layer.of_theirs()
    with rounded_by_compressed_tensors(None):
        rounded = layer.of_theirs()
    y = layer.ours("fp8", implementation)
    assert relative_error(rounded, unrounded) > 20 * ALLOWED_BESIDE_ROUNDING
    assert relative_error(y, rounded) <= ALLOWED_BESIDE_ROUNDING


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_with_the_scales_of_a_checkpoint_they_are_rounded_as_compressed_tensors_rounds_them(implementation):
    layer = layer_of(CASES["Mixtral in FP8 of matrices"])
    found = {name: array for name, array in layer.tensors.items() if name.endswith("input_scale")}
    of_tokens = max(float(array[0]) for name, array in found.items() if ".w2." not in name)
    of_h = max(float(array[0]) for name, array in found.items() if ".w2." in name)
    unrounded = layer.of_theirs()
    with rounded_by_compressed_tensors({HIDDEN: of_tokens, INTERMEDIATE: of_h}):
        rounded = layer.of_theirs()
    # The default, where all matrices bring such a scale.
    y = layer.ours(None, implementation)
    assert relative_error(rounded, unrounded) > 4 * ALLOWED_BESIDE_ROUNDING
    assert relative_error(y, rounded) <= ALLOWED_BESIDE_ROUNDING


def test_a_bit_more_or_less_in_one_weight_is_seen():
    layer = layer_of(CASES["DeepSeek-V3 in FP8"])
    name = f"model.layers.{LAYER}.mlp.experts.1.up_proj.weight"
    changed = layer.tensors[name].copy()
    changed.view(np.uint8)[7, 9] ^= 0x08
    wrong = dataclasses.replace(layer, tensors=layer.tensors | {name: changed})
    assert relative_error(wrong.ours("w8a16", "reference"), layer.of_theirs()) > allowed(layer)
