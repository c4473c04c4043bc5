"""What every implementation is given: a checked call, and its arrays on one rank. Also what they share."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import Array, Float, Int

from jaxmoe.activation import Activation
from jaxmoe.block_scaled import BLOCK
from jaxmoe.expert_split import ExpertSplit
from jaxmoe.experts import AnyExperts
from jaxmoe.formats import BF16, Format, Formats, bits
from jaxmoe.options import Accumulation, ImplementationName, Precision, Residuals
from jaxmoe.sharding import ExpertGroup, Placement, vary_alike
from jaxmoe.token_split import TokenSplit

if TYPE_CHECKING:
    from jaxmoe.network.levels import Levels

# Rows of one pass over the balanced number. Beyond it comes another pass; below it rows are allocated and not used. The
# same of the rows that the megakernel saves for its backward pass.
ROWS_OVER_BALANCED = 1.25
# Names of the values that a jax.checkpoint policy may keep for the backward pass: the inputs of the activation, of the
# rows of the first pass. Without them the backward pass repeats the gate and up GEMMs; it never repeats the down GEMM.
# The last one is the megakernel's, which has both in one array.
CHECKPOINT_NAMES = ("jaxmoe_gate", "jaxmoe_up", "jaxmoe_gate_up")
# What has crossed the network and is kept for the backward pass, unless a policy of the caller's own says otherwise.
ARRIVED_NAME = "jaxmoe_arrived"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of one call, as one rank sees them.

    Args:
      tokens: tokens of this rank.
      hidden: width of a token.
      intermediate: width between the two GEMMs of an expert.
      num_experts: experts of the whole group.
      top_k: slots per token.
      ranks: size of the expert-parallel group.
      gated: whether the experts have an up projection.
      formats: of the arrays.
      used_slots: share of the slots that name an expert of the group; the others are -1. Below 1 where the experts are
        on several hosts, and this is the group of one.
    """

    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    ranks: int = 1
    gated: bool = True
    formats: Formats = BF16
    used_slots: float = 1.0

    @property
    def all_slots(self) -> int:
        """Slots of all ranks: the rows of one rank if every slot names its experts."""
        return self.ranks * self.tokens * self.top_k

    @property
    def balanced_rows(self) -> int:
        """Rows of a rank when all ranks have equally many."""
        return math.ceil(self.tokens * self.top_k * self.used_slots)

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.ranks

    @property
    def projections(self) -> int:
        """Inputs of the activation: gate, and up where there is one."""
        return 2 if self.gated else 1

    @property
    def token_bytes(self) -> int:
        """Of a token."""
        return self.formats.tokens.bytes(1, self.hidden)

    @property
    def answer_bytes(self) -> int:
        """Of an answer to one of its slots."""
        return self.formats.answers.bytes(1, self.hidden)

    @property
    def h_bytes(self) -> int:
        """Of a row between the two GEMMs of an expert."""
        return self.formats.h.bytes(1, self.intermediate)

    @property
    def matrix_bytes(self) -> int:
        """Of a matrix from hidden to intermediate; the one back has as many, but for scales of outputs."""
        return self.formats.weights.bytes(self.intermediate, self.hidden)

    @property
    def expert_bytes(self) -> int:
        """Of all matrices of an expert."""
        return self.projections * self.matrix_bytes + self.formats.weights.bytes(self.hidden, self.intermediate)

    @property
    def wide(self) -> "Shape":
        """The same sizes without 8 bits: those of a backward pass."""
        return dataclasses.replace(self, formats=self.formats.wide)

    @property
    def decoded(self) -> "Shape":
        """The same sizes and weights, with rows in the dtype of x: those of a backward pass beside frozen experts."""
        return dataclasses.replace(self, formats=self.formats.decoded)

    @property
    def multiplied(self) -> "Shape":
        """The same sizes with weights as a ring of decoded ones has them: in 8 bits beside such rows, else wide."""
        if not self.formats.tokens.scale_rows:
            return self.wide
        weights = Format(self.formats.tokens.dtype, BLOCK, BLOCK)
        return dataclasses.replace(self, formats=dataclasses.replace(self.formats, weights=weights))

    @property
    def flops(self) -> int:
        """Floating-point operations of a rank in a balanced forward pass."""
        return 2 * (self.projections + 1) * self.balanced_rows * self.hidden * self.intermediate


@dataclasses.dataclass(frozen=True)
class Call:
    """The static side of a call, checked; equal calls compile to the same program.

    Args:
      implementation: the one that runs.
      implementation_reason: why.
      activation: resolved.
      placement: ranks, mesh and axes.
      platform: what it is compiled for.
      shape: sizes as one rank sees them.
      plan: how it is computed, of the implementation's own kind.
      residuals: what the backward pass keeps of the forward pass.
      precision: which arrays have 8 bits, see `precision.py`; `None` where none has.
      quantizes: whether the experts come wide, and are rounded to 8 bits in the call.
      accumulation: how products of rows in 8 bits become sums.
      biases: whether the experts have any.
      levels: where the experts are on several hosts: what travels between them, around calls of the layer of one host,
        whose plan this is (`network/choice.py`).
      token_split: over which axes which dimensions of the tokens are split on entry of `shard_map`.
      expert_split: over which axes experts are split beside their first dimension.
    """

    implementation: ImplementationName
    implementation_reason: str = dataclasses.field(compare=False)
    activation: Activation
    placement: Placement
    platform: str
    shape: Shape
    plan: Any
    residuals: Residuals
    precision: Precision | None = None
    quantizes: bool = False
    accumulation: Accumulation = "promoted"
    biases: bool = False
    levels: "Levels | None" = None
    token_split: TokenSplit = dataclasses.field(default_factory=TokenSplit)
    expert_split: ExpertSplit = dataclasses.field(default_factory=ExpertSplit)

    @property
    def dtype(self) -> Any:
        """Of x and y."""
        return self.shape.formats.answers.dtype

    @property
    def wide(self) -> "Call":
        """The same call without 8 bits: what a backward pass differentiates."""
        return dataclasses.replace(
            self, shape=self.shape.wide, precision=None, quantizes=False, accumulation="promoted"
        )

    @property
    def decoded(self) -> "Call":
        """The same call with rows in the dtype of x: what a backward pass beside frozen experts differentiates."""
        four_bit = bits(self.shape.formats.weights.dtype) == 4
        precision: Precision = "w4a16" if four_bit else "w8a16"
        return dataclasses.replace(
            self, shape=self.shape.decoded, precision=precision, quantizes=False, accumulation="promoted"
        )

    @property
    def freezes(self) -> bool:
        """Whether the experts come in fewer bits than x has, and so have no gradients."""
        return self.precision is not None and not self.quantizes

    @property
    def group(self) -> ExpertGroup:
        """The ranks that hold the experts."""
        return self.placement.group

    @property
    def repeated_axes(self) -> tuple[str, ...]:
        """Axes of the mesh that is entered whose ranks compute the same."""
        mesh = self.placement.mesh
        if mesh is None:
            return ()
        used = {*self.placement.token_axes, *self.expert_split.parts}
        return tuple(name for name in mesh.axis_names if mesh.shape[name] > 1 and name not in used)


class Inputs(NamedTuple):
    """The arrays of a call on one rank: ids outside the experts are -1, and masked tokens are zero."""

    x: Float[Array, "tokens hidden"]
    topk_ids: Int[Array, "tokens top_k"]
    topk_weights: Float[Array, "tokens top_k"]
    experts: AnyExperts

    def in_dtype_of_tokens(self) -> "Inputs":
        """Returns them with wide experts cast to the dtype of the tokens.

        All vary over the same mesh axes before the cast, so that the gradients of wider experts, which JAX casts back,
        are added up over ranks in the dtype that these have.
        """
        inputs = vary_alike(self)
        return inputs._replace(experts=inputs.experts.astype(inputs.x.dtype))
