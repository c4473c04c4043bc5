"""Tiny layers with the names and layouts of published checkpoints, and what each of them computes, in plain NumPy.

Everything here is written down a second time, from the published descriptions: nothing of `jaxmoe.convert` is used.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxmoe
from jaxmoe import RouterConfig, SwiGLU
from tests.quantized_layer import NUMBERS_IN_4_BITS

# No multiples of 128, so that blocks at the edges are smaller; of 32, which MXFP4 needs.
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, VOCABULARY, LAYER = 8, 192, 160, 12, 40, 3
BF16, E4M3, E8M0 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e8m0fnu
Tensors = dict[str, Any]


# ---------------------------------------------------------------- tensors of a matrix [out, in]


def wide(rng: Any, out: int, inner: int) -> Tensors:
    return {"weight": (rng.standard_normal((out, inner)) * inner**-0.5).astype(BF16)}


def fp8(rng: Any, out: int, inner: int) -> Tensors:
    scales = rng.uniform(0.5, 2, (-(-out // 128), -(-inner // 128))) * inner**-0.5
    values = np.clip(rng.standard_normal((out, inner)), -4, 4).astype(E4M3)
    return {"weight": values, "weight_scale_inv": scales.astype(np.float32)}


def fp8_bf16_scales(rng: Any, out: int, inner: int) -> Tensors:
    tensors = fp8(rng, out, inner)
    return tensors | {"weight_scale_inv": tensors["weight_scale_inv"].astype(BF16)}


def exponents(rng: Any, *shape: int) -> Any:
    return rng.integers(121, 125, shape).astype(np.uint8)


def fp8_of_outputs(rng: Any, out: int, inner: int) -> Tensors:
    scales = rng.uniform(0.5, 2, (out, 1)) * inner**-0.5
    return {"weight": fp8(rng, out, inner)["weight"], "weight_scale": scales.astype(BF16)}


def fp8_of_matrices(rng: Any, out: int, inner: int) -> Tensors:
    scales = {"weight_scale": rng.uniform(0.5, 2, 1) * inner**-0.5, "input_scale": rng.uniform(0.01, 0.02, 1)}
    numbers = {name: scale.astype(np.float32) for name, scale in scales.items()}
    return {"weight": fp8(rng, out, inner)["weight"]} | numbers


def mxfp4_compressed(rng: Any, out: int, inner: int) -> Tensors:
    packed = rng.integers(0, 256, (out, inner // 2)).astype(np.uint8)
    return {"weight_packed": packed, "weight_scale": exponents(rng, out, inner // 32)}


def fp8_e8m0(rng: Any, out: int, inner: int) -> Tensors:
    scales = exponents(rng, -(-out // 128), -(-inner // 128))
    return {"weight": fp8(rng, out, inner)["weight"], "scale": scales.view(E8M0)}


def mxfp4(rng: Any, out: int, inner: int) -> Tensors:
    packed = rng.integers(0, 256, (out, inner // 2)).astype(np.uint8).view(np.int8)
    return {"weight": packed, "scale": exponents(rng, out, inner // 32).view(E8M0)}


def nvfp4(rng: Any, out: int, inner: int) -> Tensors:
    return {
        "weight": rng.integers(0, 256, (out, inner // 2)).astype(np.uint8),
        "weight_scale": rng.uniform(0.5, 2, (out, inner // 16)).astype(E4M3),
        "weight_scale_2": np.array(rng.uniform(0.01, 0.03), np.float32),
        "input_scale": np.array(rng.uniform(0.5, 1), np.float32),
    }


def numbers(tensors: Tensors, name: str) -> np.ndarray:
    """Returns a matrix [out, in] in float64, each element times the scale of its block."""
    weight = np.asarray(tensors[f"{name}.weight_packed" if f"{name}.weight_packed" in tensors else f"{name}.weight"])
    if weight.dtype in (np.uint8, np.int8):
        codes = weight.view(np.uint8)
        values = np.zeros((codes.shape[0], 2 * codes.shape[1]))
        values[:, 0::2], values[:, 1::2] = NUMBERS_IN_4_BITS[codes % 16], NUMBERS_IN_4_BITS[codes // 16]
    else:
        values = weight.astype(np.float64)
    if f"{name}.weight_scale_2" in tensors:
        scales, rows, columns = np.asarray(tensors[f"{name}.weight_scale"]).astype(np.float64), 1, 16
        scales = scales * float(tensors[f"{name}.weight_scale_2"])
    elif f"{name}.weight_packed" in tensors:
        scales = 2.0 ** (np.asarray(tensors[f"{name}.weight_scale"]).astype(int) - 127)
        rows, columns = 1, 32
    elif f"{name}.weight_scale" in tensors:
        scales = np.asarray(tensors[f"{name}.weight_scale"]).astype(np.float64)
        if scales.size == 1:
            return values * scales
        rows, columns = (1, values.shape[1]) if scales.shape == (len(values), 1) else (128, 128)
    elif f"{name}.weight_scale_inv" in tensors:
        scales, rows, columns = np.asarray(tensors[f"{name}.weight_scale_inv"]).astype(np.float64), 128, 128
    elif f"{name}.scale" in tensors:
        scales = 2.0 ** (np.asarray(tensors[f"{name}.scale"]).view(np.uint8).astype(int) - 127)
        rows, columns = (1, 32) if weight.dtype in (np.uint8, np.int8) else (128, 128)
    else:
        return values
    out, inner = (np.arange(size) for size in values.shape)
    return values * scales[out[:, None] // rows, inner[None, :] // columns]


# ---------------------------------------------------------------- layers


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer of a family.

    Args:
      family: its name.
      tensors: all of the file that has the layer.
      router: of the family, for few experts.
      compute: what the layer answers to tokens, ids of the vocabulary beside them, in NumPy.
      activation: of the experts.
      options: of `to_hf`, to give back the same bits.
    """

    family: str
    tensors: Tensors
    router: RouterConfig
    compute: Callable[[np.ndarray, np.ndarray], np.ndarray]
    activation: Any = "silu"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def silu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return silu(np.minimum(gate, 10), np.clip(up, -10, 10))


def gpt_oss_activation(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate = np.minimum(gate, 7)
    return (np.clip(up, -7, 7) + 1) * gate / (1 + np.exp(-1.702 * gate))


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(scores: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-scores))


def best(scores: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-scores, axis=-1, kind="stable")[..., :count]


def weighted(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, expert: Callable[..., np.ndarray]) -> np.ndarray:
    y = np.zeros_like(x)
    for token, slot in np.ndindex(ids.shape):
        y[token] += weights[token, slot] * expert(int(ids[token, slot]), x[token])
    return y


def per_expert(
    seed: int, block: str, names: tuple[str, str, str], matrix: Any, shared: str | None = None, of_shared: Any = None
) -> Tensors:
    """Returns a router, experts with a tensor for each matrix, and a shared expert that is wider than they are."""
    rng = np.random.default_rng(seed)
    tensors = {f"{block}gate.weight": rng.standard_normal((EXPERTS, HIDDEN)).astype(BF16)}
    stems = [(f"{block}experts.{expert}", INTERMEDIATE, matrix) for expert in range(EXPERTS)]
    stems += [] if shared is None else [(f"{block}{shared}", 2 * INTERMEDIATE, of_shared)]
    for stem, width, make in stems:
        for name, out, inner in zip(names, (width, width, HIDDEN), (HIDDEN, HIDDEN, width), strict=True):
            tensors |= {f"{stem}.{name}.{part}": array for part, array in make(rng, out, inner).items()}
    # Of the model around it: nothing reads these.
    tensors["model.norm.weight"] = np.ones(HIDDEN, BF16)
    return tensors


def feed_forward(tensors: Tensors, names: tuple[str, str, str], activation: Any) -> Callable[[str, Any], np.ndarray]:
    """Returns the expert of a stem, whose matrices are decoded once."""
    decoded: dict[str, list[np.ndarray]] = {}

    def expert(stem: str, x: np.ndarray) -> np.ndarray:
        if stem not in decoded:
            decoded[stem] = [numbers(tensors, f"{stem}.{name}") for name in names]
        gate, up, down = decoded[stem]
        return down @ activation(gate @ x, up @ x)

    return expert


def mixtral_or_qwen(
    family: str, matrix: Any, seed: int, with_shared: bool = False, renormalize: bool = True, **options: Any
) -> Case:
    mixtral = family == "mixtral"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    prefix = "model.language_model." if family == "qwen3_5_moe" else "model."
    block = f"{prefix}layers.{LAYER}.{'block_sparse_moe' if mixtral else 'mlp'}."
    tensors = per_expert(seed, block, names, matrix, "shared_expert" if with_shared else None, wide)
    if with_shared:
        gate = np.random.default_rng(seed + 100).standard_normal((1, HIDDEN)).astype(BF16)
        tensors[f"{block}shared_expert_gate.weight"] = gate
    expert = feed_forward(dict(tensors), names, silu)

    def compute(x: np.ndarray, _: np.ndarray) -> np.ndarray:
        scores = softmax(x @ tensors[f"{block}gate.weight"].astype(np.float64).T)
        ids = best(scores, 2)
        weights = np.take_along_axis(scores, ids, -1)
        if renormalize:
            weights /= weights.sum(-1, keepdims=True)
        y = weighted(x, ids, weights, lambda e, row: expert(f"{block}experts.{e}", row))
        if with_shared:
            opened = sigmoid(x @ tensors[f"{block}shared_expert_gate.weight"].astype(np.float64).T)
            y += opened * np.stack([expert(f"{block}shared_expert", row) for row in x])
        return y

    if family == "qwen3_5_moe":
        stems = [f"{block}experts.{expert}" for expert in range(EXPERTS)]
        gate, up, down = (np.stack([tensors.pop(f"{stem}.{name}.weight") for stem in stems]) for name in names)
        tensors |= {f"{block}experts.gate_up_proj": np.concatenate([gate, up], 1), f"{block}experts.down_proj": down}
    router = RouterConfig.mixtral() if mixtral else RouterConfig.qwen3_moe(top_k=2, renormalize=renormalize)
    return Case(family, tensors, router, compute, options=options)


def sigmoid_router(family: str, matrix: Any, seed: int, of_shared: Any = None, prefix: str = "model.") -> Case:
    """DeepSeek-V3 and the families that choose as it does, but for groups and scale."""
    groups, kept = (4, 2) if family == "deepseek_v3" else (1, 1)
    scale = {"deepseek_v3": 2.5, "kimi_k2": 2.827, "glm4_moe": 1.5, "minimax_m2": 1.0}[family]
    minimax = family == "minimax_m2"
    names = ("w1", "w3", "w2") if minimax else ("gate_proj", "up_proj", "down_proj")
    block = f"{prefix}layers.{LAYER}.{'block_sparse_moe' if minimax else 'mlp'}."
    tensors = per_expert(seed, block, names, matrix, None if minimax else "shared_experts", of_shared or matrix)
    bias = f"{block}{'' if minimax else 'gate.'}e_score_correction_bias"
    tensors[bias] = np.random.default_rng(seed + 100).uniform(-0.2, 0.2, EXPERTS).astype(np.float32)
    expert = feed_forward(tensors, names, silu)

    def compute(x: np.ndarray, _: np.ndarray) -> np.ndarray:
        scores = sigmoid(x @ tensors[f"{block}gate.weight"].astype(np.float64).T)
        choice = scores + tensors[bias]
        if groups > 1:
            grouped = choice.reshape(len(x), groups, -1)
            of_group = np.sort(grouped, -1)[..., -2:].sum(-1)
            lost = np.argsort(-of_group, -1, kind="stable")[:, kept:]
            for token, group in np.ndindex(lost.shape):
                grouped[token, lost[token, group]] = -np.inf
        ids = best(choice, 2)
        weights = np.take_along_axis(scores, ids, -1)
        weights = scale * weights / weights.sum(-1, keepdims=True)
        y = weighted(x, ids, weights, lambda e, row: expert(f"{block}experts.{e}", row))
        return y if minimax else y + np.stack([expert(f"{block}shared_experts", row) for row in x])

    router = RouterConfig.deepseek_v3() if family == "deepseek_v3" else RouterConfig.kimi_k2(scaling_factor=scale)
    router = dataclasses.replace(router, top_k=2, num_groups=groups, top_groups=kept)
    return Case(family, tensors, router, compute, options={} if prefix == "model." else {"prefix": prefix})


def deepseek_v4(seed: int, by_token: bool, matrix: Any = mxfp4) -> Case:
    names, block = ("w1", "w3", "w2"), f"layers.{LAYER}.ffn."
    tensors = per_expert(seed, block, names, matrix, "shared_experts", fp8_e8m0)
    rng = np.random.default_rng(seed + 100)
    table = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(VOCABULARY)]).astype(np.int64)
    bias = rng.uniform(-0.5, 0.5, EXPERTS).astype(np.float32)
    tensors |= {f"{block}gate.tid2eid": table} if by_token else {f"{block}gate.bias": bias}
    expert = feed_forward(tensors, names, clamped)

    def compute(x: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        scores = np.sqrt(np.log1p(np.exp(x @ tensors[f"{block}gate.weight"].astype(np.float64).T)))
        ids = table[token_ids] if by_token else best(scores + bias, 2)
        weights = np.take_along_axis(scores, ids, -1)
        weights = 1.5 * weights / weights.sum(-1, keepdims=True)
        y = weighted(x, ids, weights, lambda e, row: expert(f"{block}experts.{e}", row))
        return y + np.stack([expert(f"{block}shared_experts", row) for row in x])

    router = dataclasses.replace(RouterConfig.deepseek_v4(), top_k=2)
    return Case("deepseek_v4", tensors, router, compute, SwiGLU(limit=10.0))


def gpt_oss(seed: int, packed: bool) -> Case:
    rng = np.random.default_rng(seed)
    block = f"model.layers.{LAYER}.mlp."
    tensors: Tensors = {
        f"{block}router.weight": rng.standard_normal((EXPERTS, HIDDEN)).astype(BF16),
        f"{block}router.bias": rng.standard_normal(EXPERTS).astype(BF16),
    }
    matrices: dict[str, np.ndarray] = {}
    for name, out, inner in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
        stem = f"{block}experts.{name}"
        tensors[f"{stem}_bias"] = rng.standard_normal((EXPERTS, out)).astype(BF16)
        if packed:
            blocks = rng.integers(0, 256, (EXPERTS, out, inner // 32, 16)).astype(np.uint8)
            scales = exponents(rng, EXPERTS, out, inner // 32)
            tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
            flat = blocks.reshape(EXPERTS * out, inner // 2)
            as_linear = {"w.weight": flat, "w.scale": scales.reshape(EXPERTS * out, -1)}
            matrices[name] = numbers(as_linear, "w").reshape(EXPERTS, out, inner)
        else:
            lies = (rng.standard_normal((EXPERTS, inner, out)) * inner**-0.5).astype(BF16)
            tensors[stem] = lies
            matrices[name] = lies.astype(np.float64).swapaxes(1, 2)

    def expert(e: int, row: np.ndarray) -> np.ndarray:
        biases = [tensors[f"{block}experts.{name}_bias"][e].astype(np.float64) for name in matrices]
        both = matrices["gate_up_proj"][e] @ row + biases[0]
        return matrices["down_proj"][e] @ gpt_oss_activation(both[0::2], both[1::2]) + biases[1]

    def compute(x: np.ndarray, _: np.ndarray) -> np.ndarray:
        logits = x @ tensors[f"{block}router.weight"].astype(np.float64).T + tensors[f"{block}router.bias"]
        ids = best(logits, 2)
        return weighted(x, ids, softmax(np.take_along_axis(logits, ids, -1)), expert)

    router = dataclasses.replace(RouterConfig.gpt_oss(), top_k=2)
    return Case("gpt_oss", tensors, router, compute, SwiGLU(limit=7.0, alpha=1.702, up_offset=1.0))


CASES: dict[str, Callable[[], Case]] = {
    "mixtral": lambda: mixtral_or_qwen("mixtral", wide, 1),
    "qwen3_moe": lambda: mixtral_or_qwen("qwen3_moe", wide, 2),
    "qwen3_moe in FP8": lambda: mixtral_or_qwen("qwen3_moe", fp8_bf16_scales, 3, scale_dtype=BF16),
    "qwen3_moe in FP8 of outputs": lambda: mixtral_or_qwen("qwen3_moe", fp8_of_outputs, 15, scale_dtype=BF16),
    "mixtral in FP8 of matrices": lambda: mixtral_or_qwen("mixtral", fp8_of_matrices, 16),
    "qwen3_moe in MXFP4": lambda: mixtral_or_qwen("qwen3_moe", mxfp4_compressed, 17),
    "olmoe": lambda: mixtral_or_qwen("olmoe", wide, 20, renormalize=False),
    "qwen2_moe": lambda: mixtral_or_qwen("qwen2_moe", wide, 21, with_shared=True, renormalize=False),
    "qwen3_next": lambda: mixtral_or_qwen("qwen3_next", wide, 4, with_shared=True),
    "qwen3_5_moe": lambda: mixtral_or_qwen("qwen3_5_moe", wide, 22, with_shared=True),
    "deepseek_v3": lambda: sigmoid_router("deepseek_v3", wide, 5),
    "deepseek_v3 in FP8": lambda: sigmoid_router("deepseek_v3", fp8, 6),
    "kimi_k2 in FP8": lambda: sigmoid_router("kimi_k2", fp8, 7, prefix="language_model.model."),
    "glm4_moe": lambda: sigmoid_router("glm4_moe", wide, 18),
    "minimax_m2 in FP8": lambda: sigmoid_router("minimax_m2", fp8, 19),
    "gpt_oss": lambda: gpt_oss(8, packed=True),
    "gpt_oss in BF16": lambda: gpt_oss(9, packed=False),
    "deepseek_v4": lambda: deepseek_v4(10, by_token=False),
    "deepseek_v4, experts by token": lambda: deepseek_v4(11, by_token=True),
    "qwen3_moe in NVFP4": lambda: mixtral_or_qwen("qwen3_moe", nvfp4, 12),
    "deepseek_v3 in NVFP4": lambda: sigmoid_router("deepseek_v3", nvfp4, 13, of_shared=wide),
    "deepseek_v4 in NVFP4": lambda: deepseek_v4(14, by_token=False, matrix=nvfp4),
}


class Counting(Mapping[str, Any]):
    """A mapping that counts how often the content of a tensor was read."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors, self.reads = tensors, collections.Counter[str]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, name: str) -> Any:
        return _Counted(self, name)


class _Counted:
    """An array of which nothing is known but its shape and dtype until NumPy reads it."""

    def __init__(self, counting: Counting, name: str) -> None:
        self.counting, self.name = counting, name
        self.shape, self.dtype = counting.tensors[name].shape, counting.tensors[name].dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.counting.reads[self.name] += 1
        return np.asarray(self.counting.tensors[self.name])


def run(weights: Any, case: Case, x: Any, token_ids: Any) -> Any:
    """Returns what this library makes of the weights: router, experts and shared expert."""
    logits = jnp.dot(x, weights.router_kernel.astype(x.dtype), precision="highest")
    if weights.router_bias is not None:
        logits = logits + weights.router_bias.astype(x.dtype)
    table = weights.token_table
    routing = jaxmoe.route(
        logits,
        case.router,
        selection_bias=weights.selection_bias,
        topk_ids=None if table is None else table[token_ids],
    )

    def layer(ids: Any, of_ids: Any, experts: Any) -> Any:
        # Nothing but weights is rounded to few bits.
        precision = "w8a16" if isinstance(experts.w_gate, jaxmoe.BlockScaled) else None
        return jaxmoe.moe_layer(
            x,
            ids,
            of_ids,
            experts,
            activation=case.activation,
            axis_name=None,
            implementation="reference",
            precision=precision,
        )

    y = layer(routing.topk_ids, routing.topk_weights, weights.experts)
    if weights.shared is not None:
        one = jnp.ones((len(x), 1))
        opened = one
        if weights.shared_gate is not None:
            gate = weights.shared_gate.astype(x.dtype)
            opened = 1 / (1 + jnp.exp(-jnp.dot(x, gate, precision="highest")))
        y = y + opened * layer(jnp.zeros((len(x), 1), jnp.int32), one, weights.shared)
    return y
