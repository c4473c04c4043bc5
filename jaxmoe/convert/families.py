"""What the tensors of a Mixture-of-Experts block are called in the checkpoints of each family, as one table.

Names are those of the files, below `{prefix}layers.{layer}.{block}.`. How the tensors of one matrix lie, in which
number of bits, is in `matrices.py`; those of experts that lie in one tensor are in `fused.py` and `gpt_oss.py`.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import Any

from jaxmoe.convert.matrices import E8M0_SCALES, FLOAT_SCALES, Format
from jaxmoe.integers import integer
from jaxmoe.wording import a_type


@dataclasses.dataclass(frozen=True)
class Family:
    """The names of a family.

    Args:
      block: of the layer, the part that this library computes.
      prefix: before `layers.`, where `to_hf` is not told another one.
      matrices: gate, up and down of an expert; nothing where all experts lie in one tensor.
      formats: what a matrix may be in.
      fused: whether wide experts are written as two tensors for all of them (`fused.py`), which are read in any family.
      router: `[experts, hidden]`.
      router_bias: added to the logits.
      selection_bias: added to the scores for the selection only.
      token_table: from token to experts, in layers that choose by it and have no selection bias.
      shared: the expert that every token visits, where a layer has one.
      shared_gate: `[1, hidden]`, whose sigmoid multiplies what it answers.
    """

    block: str
    prefix: str = "model."
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    formats: tuple[Format, ...] = FLOAT_SCALES
    fused: bool = False
    router: str = "gate.weight"
    router_bias: str | None = None
    selection_bias: str | None = None
    token_table: str | None = None
    shared: str | None = None
    shared_gate: str | None = None

    @property
    def stacked(self) -> bool:
        """Whether all experts lie in one tensor."""
        return not self.matrices


_MIXTRAL = Family("block_sparse_moe", matrices=("w1", "w3", "w2"))
_MINIMAX_M2 = Family("block_sparse_moe", matrices=("w1", "w3", "w2"), selection_bias="e_score_correction_bias")
_QWEN = Family("mlp", shared="shared_expert", shared_gate="shared_expert_gate.weight")
_DEEPSEEK_V3 = Family("mlp", selection_bias="gate.e_score_correction_bias", shared="shared_experts")
_GPT_OSS = Family("mlp", matrices=(), formats=(), router="router.weight", router_bias="router.bias")
_DEEPSEEK_V4 = Family(
    "ffn",
    prefix="",
    matrices=("w1", "w3", "w2"),
    formats=E8M0_SCALES,
    selection_bias="gate.bias",
    token_table="gate.tid2eid",
    shared="shared_experts",
)

FAMILIES: dict[str, Family] = {
    "mixtral": _MIXTRAL,
    "minimax_m2": _MINIMAX_M2,
    "olmoe": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "qwen3_next": _QWEN,
    "qwen3_5_moe": dataclasses.replace(_QWEN, prefix="model.language_model.", fused=True),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "gpt_oss": _GPT_OSS,
    "deepseek_v4": _DEEPSEEK_V4,
}


def family_named(function: str, family: str) -> Family:
    """Returns a family of the table, or raises a `ValueError` that lists them."""
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"{function}: family={family!r} must be one of {', '.join(map(repr, FAMILIES))}.")
    return FAMILIES[family]


def layer_number(function: str, layer: int) -> int:
    """Returns the number of a layer as int, or raises a `ValueError` where it is none."""
    if (number := integer(layer)) is None or number < 0:
        raise ValueError(f"{function}: layer={layer!r} must be an integer of at least 0, its number in the names.")
    return number


def checked_prefix(function: str, prefix: Any) -> str:
    """Returns what names begin with, or raises where `layers.` cannot follow it."""
    if not isinstance(prefix, str):
        raise TypeError(f"{function}: prefix is {a_type(prefix)}; it must be a str such as 'model.', or None.")
    if prefix and not prefix.endswith("."):
        raise ValueError(
            f"{function}: prefix={prefix!r} has no dot at its end, and names would begin with {prefix + 'layers.'!r}. "
            f"Pass prefix={prefix + '.'!r}."
        )
    return prefix


def stem_of(tensors: Collection[str], family: str, layer: int, prefix: str | None) -> str:
    """Returns what the names of a layer's block begin with, such as `model.layers.3.mlp.`.

    Raises:
      ValueError: no router is there, or several and no prefix that says which.
    """
    table = FAMILIES[family]
    if prefix is not None:
        return f"{checked_prefix('from_hf', prefix)}layers.{layer}.{table.block}."
    # Not all names are looked at again for each layer where the usual one is there.
    if (usual := f"{table.prefix}layers.{layer}.{table.block}.{table.router}") in tensors:
        return usual.removesuffix(table.router)
    stems = _stems(tensors, table)
    found = [stem for stem in stems if _layer(stem) == layer]
    if len(found) == 1:
        return found[0]
    wanted = f"layers.{layer}.{table.block}.{table.router}"
    if found:
        raise ValueError(
            f"from_hf: there are {len(found)} routers of layer {layer}: {', '.join(found[:4])}. Pass prefix=, what "
            f"comes before {wanted!r}."
        )
    layers = sorted({_layer(stem) for stem in stems})
    raise ValueError(
        f"from_hf: no tensor is named {wanted!r}, the router of layer {layer} where family={family!r}. "
        + (f"{others} " if (others := other_families(tensors, family, layer)) else "")
        + (f"Layers that have one: {', '.join(map(str, layers))}." if layers else "No layer has one.")
    )


def other_families(tensors: Iterable[str], family: str, layer: int) -> str:
    """Returns a sentence that says whose names a layer has, where it is not the family's; else nothing."""
    fits = families_of(tensors, layer)
    return "" if family in fits or not fits else f"The names are those of {' or '.join(map(repr, fits))}."


def families_of(tensors: Iterable[str], layer: int) -> list[str]:
    """Returns the families by whose names a layer has a router, experts and, where they have one, a selection bias.

    >>> families_of([f"model.layers.0.mlp.{name}.weight" for name in ("gate", "experts.0.up_proj")], 0)
    ['olmoe', 'qwen2_moe', 'qwen3_moe', 'qwen3_next', 'qwen3_5_moe']
    """
    names = set(tensors)
    selections = {name for table in FAMILIES.values() for name in (table.selection_bias, table.token_table)}
    fits = []
    for family, table in FAMILIES.items():
        for stem in (stem for stem in _stems(names, table) if _layer(stem) == layer):
            first = (f"{stem}experts.0.{table.matrices[1]}.",) if table.matrices else ()
            has_experts = any(name.startswith((*first, f"{stem}experts.gate_up_proj")) for name in names)
            found = {name for name in selections if f"{stem}{name}" in names}
            own = {table.selection_bias, table.token_table} - {None}
            if has_experts and found <= own and bool(found) == bool(own):
                fits.append(family)
    return fits


def _stems(names: Iterable[str], table: Family) -> list[str]:
    """Returns what the names of each block begin with that has a router of a family."""
    router = re.compile(rf"((?:.*\.)?layers\.\d+\.{re.escape(table.block)}\.){re.escape(table.router)}")
    return [found[1] for name in names if (found := router.fullmatch(name))]


def _layer(stem: str) -> int:
    return int(re.findall(r"layers\.(\d+)\.", stem)[-1])
