"""What must hold of the experts of `MoEWeights`, said before `to_hf` writes them and `MoE.from_weights` takes them."""

from typing import Any

from jaxmoe.convert.weights import MoEWeights
from jaxmoe.expert_checks import DIMENSIONS, arrays_given, check_shapes
from jaxmoe.experts import Experts, FusedExperts, present, split
from jaxmoe.quantized_matrix import QuantizedMatrix


def routed(caller: str, weights: MoEWeights) -> Experts:
    """Returns the experts that tokens are sent to, with gate and up apart.

    Raises:
      TypeError: they are no `Experts`.
      ValueError: their arrays do not go together.
    """
    return _apart(f"{caller}: weights.experts", weights.experts)


def shared(caller: str, weights: MoEWeights) -> Experts | None:
    """Returns the expert that every token visits, with gate and up apart; `None` where there is none.

    Raises:
      TypeError: it is no `Experts`.
      ValueError: its arrays do not go together, there are several of it, or tokens of another width go in.
    """
    if weights.shared is None:
        return None
    alone = _apart(f"{caller}: weights.shared", weights.shared)
    if alone.num_experts != 1:
        raise ValueError(
            f"{caller}: weights.shared has {alone.num_experts} experts; it must have one, which every token visits. "
            "Several are one that is as wide as all of them: join w_gate and w_up along intermediate, w_down as well, "
            "and add their b_down."
        )
    if alone.hidden != weights.experts.hidden:
        raise ValueError(
            f"{caller}: weights.shared has hidden={alone.hidden}; it must be {weights.experts.hidden}, that of "
            "weights.experts. w_gate is [1, hidden, intermediate]: matrices stored as torch does, [out, in], have to "
            "be transposed."
        )
    return alone


def _apart(where: str, experts: Any) -> Experts:
    """Returns experts with gate and up in arrays of their own, whose shapes go together."""
    arrays_given(where, experts)
    for name, array in present(experts).items():
        if isinstance(array, QuantizedMatrix):
            try:
                array.check()
            except (TypeError, ValueError) as error:
                raise type(error)(f"{where}.{name}: {error}") from error
    into = "w_gate_up" if isinstance(experts, FusedExperts) else "w_gate"
    if len(shape := tuple(experts.matrix.shape)) != 3:
        raise ValueError(
            f"{where}.{into} has shape {shape}; it must be {DIMENSIONS[into]}. One expert has a dimension of 1 for "
            "itself: jax.tree.map(lambda array: array[None], experts)."
        )
    check_shapes(where, experts)
    return split(experts)
