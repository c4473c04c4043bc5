"""Layer shapes of published models, by name."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer, without its number of tokens.

    Args:
      hidden: width of a token.
      intermediate: width between the two GEMMs of an expert.
      num_experts: routed experts.
      top_k: experts per token.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int


# From the models' published configurations (hidden_size, moe_intermediate_size, number of routed experts, experts per
# token).
SHAPES: dict[str, LayerShape] = {
    "mixtral-8x7b": LayerShape(4096, 14336, 8, 2),
    "mixtral-8x22b": LayerShape(6144, 16384, 8, 2),
    "qwen3-30b-a3b": LayerShape(2048, 768, 128, 8),
    "qwen3-235b-a22b": LayerShape(4096, 1536, 128, 8),
    "deepseek-v3": LayerShape(7168, 2048, 256, 8),
    "deepseek-v4-flash": LayerShape(4096, 2048, 256, 6),
    "deepseek-v4-pro": LayerShape(7168, 3072, 384, 6),
    "gpt-oss-120b": LayerShape(2880, 2880, 128, 4),
    "kimi-k2": LayerShape(7168, 2048, 384, 8),
}


def parse(text: str) -> LayerShape:
    """Returns the shape of a name, or of `hidden,intermediate,experts,top_k`.

    >>> parse("mixtral-8x7b") == parse("4096,14336,8,2")
    True
    """
    if text in SHAPES:
        return SHAPES[text]
    try:
        return LayerShape(*(int(part) for part in text.split(",")))
    except (TypeError, ValueError):
        raise ValueError(
            f"--shape={text!r} is neither one of {', '.join(SHAPES)} nor hidden,intermediate,experts,top_k."
        ) from None
