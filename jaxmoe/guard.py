"""Identities that refuse a transformation, so that it ends in a sentence and not in a wrong result.

`not_mapped` refuses `jax.vmap`. A batching rule cannot be written for a layer that talks to its peers once per call:
the mapped layer would either repeat the exchange for every element or treat the mapped axis as tokens, and only the
user knows which of the two is meant. `not_differentiated` refuses gradients: a float8 would be a gradient for JAX, and
of wide experts that are rounded to few bits it would make zeros, or parts of a gradient.
`reverse_mode_only` refuses `jax.jvp` of what has a `custom_vjp`, of which JAX would say nothing but that, and
`first_derivatives_only` what stands in its forward and backward pass and has no derivative of its own.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Shaped

from jaxmoe.quantized_matrix import QuantizedMatrix

Pytree = TypeVar("Pytree")


# Whose tokens come back by them.
_DISPATCH_OF = {"combine": "dispatch", "start_combine": "start_dispatch", "matmul_combine": "dispatch_matmul"}


def _refuse(args: Any, dims: Any, *, caller: str = "moe_layer", **_: Any) -> Any:
    takes_tokens = _DISPATCH_OF.get(caller, caller)
    raise NotImplementedError(
        f"{caller}: jax.vmap over {caller} is not supported (jax.jacrev, jax.jacfwd and jax.hessian map too). A batch "
        f"of token arrays is one call: {takes_tokens} takes x of shape [..., hidden], so pass the batch dimension "
        "along. To map over different experts (several layers), use jax.lax.map or jax.lax.scan, and for a Hessian "
        "jax.lax.map over directions of jax.jvp of jax.grad."
    )


def _unmapped_identity(name: str) -> Primitive:
    identity = Primitive(name)
    identity.def_impl(lambda array, **_: array)
    identity.def_abstract_eval(lambda array, **_: array)
    mlir.register_lowering(identity, lambda context, operand, **_: [operand])
    batching.primitive_batchers[identity] = _refuse
    return identity


_identity = _unmapped_identity("jaxmoe_not_mapped")
ad.deflinear2(_identity, lambda cotangent, _, caller: [_identity.bind(cotangent, caller=caller)])
_constant = _unmapped_identity("jaxmoe_constant")
# Experts of several layers are rounded under `jax.vmap`; in `moe_layer` `not_mapped` stands before it.
batching.defvectorized(_constant)


def _refuse_gradients(primals: Any, tangents: Any, *, kind: str, bits: int, caller: str) -> Any:
    raise TypeError(
        f"{caller}: this asks for gradients of {kind} experts, and {bits}-bit values have none. To train experts, "
        "pass wide master weights with precision='fp8'. To differentiate everything but the experts, leave them out of "
        "the argnums of jax.grad, or pass jax.lax.stop_gradient(experts)."
    )


# JAX calls it where a tangent may be other than zero, and only there.
ad.primitive_jvps[_constant] = _refuse_gradients


def _refuse_forward_mode(*_: Any, caller: str, **__: Any) -> Any:
    if caller == "moe_layer":
        it, second = "the layer", "jax.jvp of jax.grad, with implementation='xla'"
        advice = (
            "pass implementation='reference', which is slow and has both, with wide experts of one host and "
            "precision=None."
        )
    else:
        # An exchange is one of several steps, each of which has to see the inner derivative.
        it, second = caller, "jax.jvp of jax.grad, both of the same arrays, with implementation='xla'"
        advice = (
            "dispatch with implementation='reference' and precision=None, and combine that: both are slow and have "
            "forward mode too, as jax.lax.ragged_dot has for products in between."
        )
    raise NotImplementedError(
        f"{caller}: this asks for forward-mode derivatives (jax.jvp, jax.linearize), and {it} has reverse-mode ones "
        f"only. Use jax.grad or jax.vjp; second derivatives are {second}. Or {advice}"
    )


# What a tangent goes through on its way into the layer. Reverse mode transposes it and never computes it.
_tangent = Primitive("jaxmoe_tangent")
_tangent.def_impl(_refuse_forward_mode)
_tangent.def_abstract_eval(lambda array, **_: array)
mlir.register_lowering(_tangent, _refuse_forward_mode)
batching.primitive_batchers[_tangent] = _refuse
ad.deflinear2(_tangent, lambda cotangent, _, caller: [cotangent])


def _guard_tangents(primals: Any, tangents: Any, *, caller: str) -> Any:
    # The primals go on without the guard: in jax.jvp of jax.grad the inner one, which is transposed, takes it off, and
    # what the outer one sees of the layer are the operations of its forward and backward pass.
    through = [each if isinstance(each, ad.Zero) else _tangent.bind(each, caller=caller) for each in tangents]
    return list(primals), through


# Of all arrays at once, so that the inner derivative takes it off all of them, whatever it is taken of.
_reversible = Primitive("jaxmoe_reverse_mode_only")
_reversible.multiple_results = True
_reversible.def_impl(lambda *arrays, **_: list(arrays))
_reversible.def_abstract_eval(lambda *arrays, **_: list(arrays))
mlir.register_lowering(_reversible, lambda context, *operands, **_: [[operand] for operand in operands])
batching.primitive_batchers[_reversible] = _refuse
ad.primitive_jvps[_reversible] = _guard_tangents


def reverse_mode_only(tree: Pytree, caller: str = "moe_layer") -> Pytree:
    """Returns the arrays; raises `NotImplementedError` where a forward-mode derivative goes through them.

    Args:
      tree: all arrays that one function may be differentiated with respect to, and others beside them.
      caller: what the user called.
    """
    leaves, structure = jax.tree.flatten(tree)
    floats = [index for index, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    bound = _reversible.bind(*(leaves[index] for index in floats), caller=caller)
    for index, guarded in zip(floats, bound, strict=True):
        leaves[index] = guarded
    return jax.tree.unflatten(structure, leaves)


_first_derivatives = _unmapped_identity("jaxmoe_first_derivatives_only")


def _refuse_second_derivatives(primals: Any, tangents: Any, *, told: str) -> Any:
    raise NotImplementedError(told)


ad.primitive_jvps[_first_derivatives] = _refuse_second_derivatives


def first_derivatives_only(tree: Pytree, told: str) -> Pytree:
    """Returns the arrays; raises `NotImplementedError(told)` where they are differentiated.

    For what a `custom_vjp` runs: a first derivative does not see that, a second one does.
    """
    return jax.tree.map(functools.partial(_first_derivatives.bind, told=told), tree)


def not_mapped(array: Shaped[Array, "..."], caller: str = "moe_layer") -> Shaped[Array, "..."]:
    """Returns the array; raises `NotImplementedError` under `jax.vmap`, in the name of what the user called."""
    return jax.tree.map(functools.partial(_identity.bind, caller=caller), array)


def not_differentiated(tree: Pytree, kind: type[QuantizedMatrix], caller: str = "moe_layer") -> Pytree:
    """Returns the arrays; raises `TypeError` where JAX would differentiate with respect to them.

    Args:
      tree: a matrix of that kind, or wide matrices that are to be rounded to it.
      kind: whose numbers have no gradients.
      caller: what the user called.
    """
    bind = functools.partial(_constant.bind, kind=kind.__name__, bits=kind.bits, caller=caller)
    return jax.tree.map(bind, tree)
