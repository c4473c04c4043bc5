"""What a Mixture-of-Experts block of a checkpoint holds, in the layouts of this library."""

from typing import Any

from jaxtyping import Array, Float, Int32, Shaped

from jaxmoe.experts import Experts
from jaxmoe.pytrees import pytree


@pytree
class MoEWeights:
    """The weights of one layer, as `from_hf` returns them and `to_hf` takes them. What a family lacks is `None`.

    `jaxmoe.nnx.MoE.from_weights` makes a Flax layer of them.

    Args:
      experts: for `jaxmoe.moe_layer`; in as many bits as the checkpoint has them. `FusedExperts` are taken too.
      router_kernel: `[hidden, experts]`; logits are `x @ router_kernel`, best in float32.
      router_bias: `[experts]`, added to the logits (gpt-oss).
      selection_bias: `[experts]`, the `selection_bias` of `jaxmoe.route` (DeepSeek, Kimi).
      token_table: `[vocabulary, top_k]`, the experts of each token: the `topk_ids` of `jaxmoe.route` are
        `token_table[tokens]` (the first layers of DeepSeek-V4).
      shared: the expert that every token visits, as `Experts` with one of them, as wide as it is. `FusedExperts` are
        taken too.
      shared_gate: `[hidden, 1]`; `sigmoid(x @ shared_gate)` multiplies what the shared expert answers (Qwen3-Next).
      input_scales: `[experts]` for each matrix in NVFP4 or FP8 whose checkpoint has static scales of what it is
        multiplied with, by its name, such as `experts.w_gate`. What the layer uses is in experts in FP8, the largest of
        these (`from_hf`): while it is that, `to_hf` gives these back, and else what is in the experts. Those of NVFP4
        it gives back as they are: pass others, or `None`, with experts that were quantised to it anew.
    """

    experts: Experts | Any
    router_kernel: Float[Array, "hidden experts"]
    router_bias: Float[Array, " experts"] | None = None
    selection_bias: Float[Array, " experts"] | None = None
    token_table: Int32[Array, "vocabulary top_k"] | None = None
    shared: Experts | Any | None = None
    shared_gate: Float[Array, "hidden 1"] | None = None
    input_scales: dict[str, Shaped[Array, " experts"]] | Any | None = None
