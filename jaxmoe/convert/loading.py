"""`from_hf`: from the tensors of a checkpoint to the arrays of a layer on their devices. Reads like what it does.

Every tensor of the layer is found and checked by name, type and shape before any is read (`tensors.py`, `matrices.py`,
`fused.py`, `gpt_oss.py`); then one shard after the other is made and sent to its devices (`placing.py`).
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxmoe.convert import fused, gpt_oss
from jaxmoe.convert.families import Family, family_named, layer_number, other_families, stem_of
from jaxmoe.convert.matrices import SIDES, WIDE_TYPES, format_of, stacked, with_largest_input_scales
from jaxmoe.convert.placing import Placing, Stack
from jaxmoe.convert.progress import Progress, reporter
from jaxmoe.convert.safetensors_files import open_safetensors
from jaxmoe.convert.tensors import Block
from jaxmoe.convert.weights import MoEWeights
from jaxmoe.experts import Experts
from jaxmoe.formats import check_wide_dtype
from jaxmoe.wording import a_type

I64 = np.dtype(np.int64)


def from_hf(
    tensors: str | os.PathLike[str] | Mapping[str, Any],
    family: str,
    layer: int,
    *,
    mesh: Mesh | None = None,
    axis_name: str | Sequence[str] | None = "expert",
    hidden_axis: str | Sequence[str] | None = None,
    intermediate_axis: str | Sequence[str] | None = None,
    dtype: DTypeLike | None = None,
    prefix: str | None = None,
    progress: Progress = None,
) -> MoEWeights:
    """Returns the weights of a Mixture-of-Experts layer of a checkpoint with the names of Hugging Face.

    Experts stay in the bits that the checkpoint has them in: BF16; FP8 as `jaxmoe.BlockScaled`, in blocks of 128 x 128
    or with a scale for each output or matrix; the MXFP4 of gpt-oss and DeepSeek-V4 as `jaxmoe.MXFP4`; FP8, NVFP4
    (`jaxmoe.NVFP4`) and MXFP4 also as ModelOpt and compressed-tensors write them, in any family but these two.
    `jaxmoe.dequantize` makes wide ones of them. Static scales of what FP8 matrices are multiplied with (`input_scale`)
    become those of `jaxmoe.BlockScaled`, with which `moe_layer` rounds tokens and h: the largest of all experts of the
    layer, of gate and up together, as serving systems take it. Those of NVFP4 are kept and not used. Gate and up may be
    one tensor for all experts, as Qwen3.5 has them, where they are wide. INT4 is refused.

    Memory: everything is checked before anything is read. Then one array after the other is made, one shard at a time,
    from files that are mapped and not loaded, and is on its devices before the next shard is begun. So a process reads
    the experts of its own devices only, and its host holds at most two shards, the one that is made and the one that
    was sent before it: `2 x experts of a device x hidden x intermediate` numbers (32 experts of DeepSeek-V3 on each
    device: 0.9 GB in FP8). That is what NumPy allocates; what was read from files is in the system's file cache, which
    gives way.

    Args:
      tensors: the directory of a checkpoint, its index, or one `.safetensors` file (`open_safetensors`, whose result
        goes in as well: for many layers it opens files once), or a mapping of names to arrays, which several threads
        ask for.
      family: `"mixtral"`, `"minimax_m2"`, `"olmoe"`, `"qwen2_moe"`, `"qwen3_moe"`, `"qwen3_next"`, `"qwen3_5_moe"`,
        `"deepseek_v3"`, `"glm4_moe"`, `"kimi_k2"`, `"gpt_oss"` or `"deepseek_v4"`. `jaxmoe.RouterConfig` has a
        classmethod for most of their routers; those of MiniMax-M2 and GLM-4.5 are
        `RouterConfig.kimi_k2(scaling_factor=...)`, with 1 and with the `routed_scaling_factor` of the checkpoint; those
        of OLMoE, Qwen2-MoE, Qwen3-MoE and Qwen3-Next are, with what config.json has,
        `RouterConfig.qwen3_moe(top_k=num_experts_per_tok, renormalize=norm_topk_prob)`: false for the first two.
      layer: its number in the names, from 0.
      mesh: where the arrays go; `None` is the mesh that is set by `jax.set_mesh`, or, where none is, JAX's default
        device.
      axis_name: mesh axis, or axes, over which the experts are split, as in `moe_layer`; `None` does not split them.
        Router and biases of it are replicated.
      hidden_axis: the same for the hidden dimension of experts and shared expert.
      intermediate_axis: the same for their intermediate dimension.
      dtype: of matrices and biases of experts that are not quantised: bfloat16, float16, float32 or float64; `None`
        leaves what the checkpoint has.
      prefix: of names, before `layers.`, with its dot; `None` is found by the name of the router.
      progress: a function, called with the bytes read so far and those of all; `True` for a bar (tqdm); `False` for
        nothing; `None` for a bar where tqdm is installed and stderr is a terminal.

    Returns:
      A `MoEWeights`, with `jax.Array`s.

    Raises:
      ValueError: a family or mesh axis that is not known; a layer that is no number from 0; a prefix without its dot;
        tensors that are missing, misshapen, or more than the family has; dimensions that cannot be split.
      TypeError: a prefix that is no str; tensors of other dtypes than the family has; a `dtype` that is not wide.
      FileNotFoundError: no checkpoint, or an incomplete one.

    >>> import numpy as np
    >>> from jaxmoe.convert import from_hf, to_hf
    >>> block, ones = "model.layers.0.block_sparse_moe.", np.ones
    >>> experts = {f"experts.{e}.{w}.weight": ones((8, 4), np.float32) for e in range(2) for w in ("w1", "w3")}
    >>> experts |= {f"experts.{e}.w2.weight": ones((4, 8), np.float32) for e in range(2)}
    >>> tensors = {block + name: w for name, w in experts.items()} | {block + "gate.weight": ones((2, 4), np.float32)}
    >>> weights = from_hf(tensors, "mixtral", layer=0)
    >>> weights.experts.w_gate.shape, weights.router_kernel.shape, to_hf(weights, "mixtral", 0).keys() == tensors.keys()
    ((2, 4, 8), (4, 2), True)
    """
    table, layer = family_named("from_hf", family), layer_number("from_hf", layer)
    if dtype is not None:
        check_wide_dtype("from_hf", "dtype is", dtype)
    axes = {"experts": axis_name, "hidden": hidden_axis, "intermediate": intermediate_axis}
    placing = Placing.of(mesh, axes)
    if isinstance(tensors, str | os.PathLike):
        tensors = open_safetensors(tensors)
    if not isinstance(tensors, Mapping):
        raise TypeError(f"from_hf: tensors is {a_type(tensors)}; it must be a path, or a mapping of names to arrays.")
    block = Block(tensors, stem_of(tensors, family, layer, prefix), lambda: other_families(tensors, family, layer))
    weights = _described(block, table, dtype)
    _check_all_read(block, tensors, family, layer)

    stacks = [leaf for leaf in jax.tree.leaves(weights) if isinstance(leaf, Stack)]
    all_bytes = sum(placing.local_bytes(stack) for stack in stacks)
    with reporter(progress, f"layer {layer}", all_bytes) as done, ThreadPoolExecutor() as pool:

        def placed(leaf: Stack | np.ndarray) -> jax.Array:
            return placing.place(leaf, done, pool) if isinstance(leaf, Stack) else placing.replicate(leaf)

        return jax.tree.map(placed, weights)


def _described(block: Block, family: Family, dtype: DTypeLike | None) -> MoEWeights:
    """Returns the layer with a `Stack` for what is large, and arrays of the checkpoint for what is not."""
    router = block.checked(family.router, WIDE_TYPES, (None, None), "[experts, hidden]")
    num_experts, hidden = router.shape
    input_scales: dict[str, Any] = {}

    def experts(field: str, names: Sequence[str], split: bool) -> Experts:
        kind = format_of(block, f"{names[0]}.{family.matrices[0]}", family.formats)
        weight, *_ = kind.parts
        _, columns = weight.shape(1, hidden)
        of_gate = block.shape(
            f"{names[0]}.{family.matrices[0]}.{weight.suffix}",
            weight.types,
            (None, columns),
            f"[out, {columns}], which is {weight.words} with in={hidden}, as tensor {block.name(family.router)!r}, "
            f"[experts, hidden], has shape {list(router.shape)}",
        )
        sizes = {"hidden": hidden, "intermediate": of_gate[0]}
        fields: dict[str, Any] = {}
        for name, matrix in zip(SIDES, family.matrices, strict=True):
            of_each = [f"{expert}.{matrix}" for expert in names]
            fields[name], scales = stacked(block, name, of_each, kind, sizes, split=split, dtype=dtype)
            if scales is not None:
                input_scales[f"{field}.{name}"] = scales
        of_inputs = {name: input_scales.get(f"{field}.{name}") for name in SIDES}
        return Experts(**with_largest_input_scales(fields, of_inputs))

    def vector(name: str | None) -> np.ndarray | None:
        return None if name is None else block.checked(name, WIDE_TYPES, (num_experts,), f"[{num_experts}]")

    if family.stacked:
        routed = gpt_oss.stacked(block, num_experts, hidden, dtype)
    elif fused.INTO in block:
        routed = fused.stacked(block, num_experts, hidden, dtype)
    else:
        routed = experts("experts", [f"experts.{expert}" for expert in range(num_experts)], split=True)
    by_token = family.token_table is not None and family.token_table in block
    bias = None if by_token else vector(family.selection_bias)
    table = None
    if by_token:
        table = block.checked(str(family.token_table), (I64, np.dtype(np.int32)), (None, None), "[vocabulary, top_k]")
    shared = gate = None
    if family.shared is not None and block.has_below(family.shared):
        shared = experts("shared", [family.shared], split=False)
        if family.shared_gate is not None:
            gate = block.checked(family.shared_gate, WIDE_TYPES, (1, hidden), f"[1, {hidden}]").T
    arrays: dict[str, Any] = {
        "experts": routed,
        "router_kernel": router.T,
        "router_bias": vector(family.router_bias),
        "selection_bias": bias,
        "token_table": None if table is None else table.astype(np.int32),
        "shared": shared,
        "shared_gate": gate,
        "input_scales": input_scales or None,
    }
    return MoEWeights(**arrays)


def _check_all_read(block: Block, tensors: Mapping[str, Any], family: str, layer: int) -> None:
    """Raises where the block has tensors that the family does not: the layer would compute something else."""
    if unread := block.unread():
        raise ValueError(
            f"from_hf: {len(unread)} tensors of the layer belong to nothing that family={family!r} has: "
            f"{', '.join(unread[:4])}{', ...' if len(unread) > 4 else ''}. "
            f"{other_families(tensors, family, layer) or 'Is it another family?'}"
        )
