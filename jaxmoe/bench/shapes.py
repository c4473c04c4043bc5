"""Layer shapes of published models, by name, and how the command line names shapes."""

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
# token). "flashdmoe-E" are the shapes with which FlashDMoE was published.
SHAPES: dict[str, LayerShape] = {
    "mixtral-8x7b": LayerShape(4096, 14336, 8, 2),
    "mixtral-8x22b": LayerShape(6144, 16384, 8, 2),
    "qwen3-30b-a3b": LayerShape(2048, 768, 128, 8),
    "qwen3-235b-a22b": LayerShape(4096, 1536, 128, 8),
    "qwen3-next-80b-a3b": LayerShape(2048, 512, 512, 10),
    "deepseek-v3": LayerShape(7168, 2048, 256, 8),
    "deepseek-v4-flash": LayerShape(4096, 2048, 256, 6),
    "deepseek-v4-pro": LayerShape(7168, 3072, 384, 6),
    "gpt-oss-120b": LayerShape(2880, 2880, 128, 4),
    "kimi-k2": LayerShape(7168, 2048, 384, 8),
    **{f"flashdmoe-{experts}": LayerShape(2048, 2048, experts, 2) for experts in (8, 16, 32, 64, 128)},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape to measure.

    Args:
      name: as it was given, without its tokens.
      shape: sizes of the layer.
      tokens: per rank, where the shape was given with them.
    """

    name: str
    shape: LayerShape
    tokens: int | None = None


def parse(text: str) -> tuple[Case, ...]:
    """Returns the shapes of one `--shape`: names with commas between, or the numbers of one shape.

    Args:
      text: `NAME[,NAME...]`, or `tokens,hidden,intermediate,experts,top_k`, or the same without the tokens.

    Raises:
      ValueError: neither.

    >>> [case.name for case in parse("mixtral-8x7b,deepseek-v3")]
    ['mixtral-8x7b', 'deepseek-v3']
    >>> [case] = parse("8192,4096,14336,8,2")
    >>> case.tokens, case.shape == SHAPES["mixtral-8x7b"]
    (8192, True)
    """
    parts = [part.strip() for part in text.split(",")]
    if all(part in SHAPES for part in parts):
        return tuple(Case(name, SHAPES[name]) for name in parts)
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(numbers) != len(parts) or len(numbers) not in (4, 5) or 0 in numbers:
        raise ValueError(
            f"--shape={text} is neither names, any of {', '.join(SHAPES)}, nor the five numbers "
            "tokens,hidden,intermediate,experts,top_k, nor the last four of them. Repeat the flag for several shapes."
        )
    sizes = LayerShape(*numbers[-4:])
    if sizes.top_k > sizes.num_experts:
        raise ValueError(f"--shape={text}: top_k={sizes.top_k} is more than the {sizes.num_experts} experts.")
    return (Case(",".join(parts[-4:]), sizes, numbers[0] if len(numbers) == 5 else None),)
