"""Activations of the expert FFN: value and derivative, one table for every implementation.

`api.py` resolves the user's `activation=` argument here once; `reference.py` uses `value` and lets JAX differentiate
it, `xla/` uses the closed forms of `vjp`, `megakernel/` passes the kind on to compiled code, which has the same table
(ffi/common/activation.h). All functions are elementwise and compute in the dtype they are given, which the callers make
float32 (or float64).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@runtime_checkable
class Activation(Protocol):
    """What an expert applies between its two GEMMs: `h = value(gate, up)`."""

    @property
    def needs_up(self) -> bool:
        """Whether the activation is defined only for gated experts (`w_up` given)."""
        ...

    def value(self, gate: Float[Array, "*rows"], up: Float[Array, "*rows"] | None) -> Float[Array, "*rows"]:
        """Returns `h` for the gate and up projections (`up=None` for a plain two-matrix FFN)."""
        ...

    def vjp(
        self, gate: Float[Array, "*rows"], up: Float[Array, "*rows"] | None, dh: Float[Array, "*rows"]
    ) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"] | None]:
        """Returns the cotangents of `gate` and `up` for the cotangent `dh` of `h`."""
        ...


@dataclasses.dataclass(frozen=True)
class Pointwise:
    """`f(gate) * up`, or `f(gate)` where the experts have no up projection; `kind` is its number in compiled code."""

    name: str
    function: Callable[[jax.Array], jax.Array] = dataclasses.field(repr=False)
    slope: Callable[[jax.Array], jax.Array] = dataclasses.field(repr=False)
    kind: int | None = dataclasses.field(default=None, repr=False)
    needs_up = False

    def value(self, gate: Float[Array, "*rows"], up: Float[Array, "*rows"] | None) -> Float[Array, "*rows"]:
        """Returns `f(gate) * up`."""
        return self.function(gate) if up is None else self.function(gate) * up

    def vjp(
        self, gate: Float[Array, "*rows"], up: Float[Array, "*rows"] | None, dh: Float[Array, "*rows"]
    ) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"] | None]:
        """Returns `(dh * up * f'(gate), dh * f(gate))`."""
        if up is None:
            return dh * self.slope(gate), None
        return dh * up * self.slope(gate), dh * self.function(gate)


@dataclasses.dataclass(frozen=True)
class SwiGLU:
    """Clamped, shifted SwiGLU.

    `(clip(up, -limit, limit) + up_offset) * g * sigmoid(alpha * g)` with `g = min(gate, limit)`.

    `SwiGLU()` equals `"silu"` on gated experts. The classmethods are those of published models.

    The slope is one up to and including the limit and zero beyond it, as in PyTorch's `clamp`.

    Args:
      limit: largest gate and largest magnitude of up; `None` does not clamp.
      alpha: factor inside the sigmoid.
      up_offset: added to the clamped up projection.

    >>> import jax.numpy as jnp, jaxmoe
    >>> jaxmoe.SwiGLU.gpt_oss().value(jnp.array([100.0]), jnp.array([-9.0])).round(2)
    Array([-42.], dtype=float32)
    """

    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    needs_up = True
    kind = 4

    def __post_init__(self) -> None:
        for name in ("limit", "alpha", "up_offset"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, float(value))
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"SwiGLU: limit={self.limit} must be positive, or None for no clamp.")

    @classmethod
    def gpt_oss(cls) -> "SwiGLU":
        """gpt-oss-20b and 120b: the activation of their published model code."""
        return cls(limit=7.0, alpha=1.702, up_offset=1.0)

    @classmethod
    def deepseek_v4(cls) -> "SwiGLU":
        """DeepSeek-V4: `swiglu_limit` of its configuration."""
        return cls(limit=10.0)

    def _clamp(self, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
        # `where` and not `clip`: JAX gives a clip half the slope at the limit itself, a value that bfloat16 rows do
        # hit.
        if self.limit is None:
            return gate, up
        limit = jnp.asarray(self.limit, gate.dtype)
        up = jnp.where(up > limit, limit, up)
        return jnp.where(gate > limit, limit, gate), jnp.where(up < -limit, -limit, up)

    def value(self, gate: Float[Array, "*rows"], up: Float[Array, "*rows"] | None) -> Float[Array, "*rows"]:
        """Returns the activation of both projections."""
        assert up is not None, "api.py rejects SwiGLU on experts without an up projection"
        gate, up = self._clamp(gate, up)
        return (up + self.up_offset) * gate * jax.nn.sigmoid(self.alpha * gate)

    def vjp(
        self, gate: Float[Array, "*rows"], up: Float[Array, "*rows"] | None, dh: Float[Array, "*rows"]
    ) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"] | None]:
        """Returns the cotangents of both projections, zero where they were clamped."""
        assert up is not None, "api.py rejects SwiGLU on experts without an up projection"
        clamped_gate, clamped_up = self._clamp(gate, up)
        sigmoid = jax.nn.sigmoid(self.alpha * clamped_gate)
        slope = sigmoid * (1 + self.alpha * clamped_gate * (1 - sigmoid))
        dgate = dh * (clamped_up + self.up_offset) * slope
        dup = dh * clamped_gate * sigmoid
        if self.limit is None:
            return dgate, dup
        return jnp.where(gate > self.limit, 0, dgate), jnp.where(jnp.abs(up) > self.limit, 0, dup)


def _silu_slope(x: jax.Array) -> jax.Array:
    sigmoid = jax.nn.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 * jax.lax.erfc(-x * math.sqrt(0.5))


def _gelu_slope(x: jax.Array) -> jax.Array:
    return _normal_cdf(x) + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


@jax.custom_jvp
def _gelu(x: jax.Array) -> jax.Array:
    return x * _normal_cdf(x)


# JAX's own derivative of erf and erfc fails inside shard_map with check_vma in jax 0.12 ("Primitive polynomial
# requires varying manual axes to match"), and the reference is differentiated there.
_gelu.defjvps(lambda tangent, value, x: tangent * _gelu_slope(x))


# Constants of the tanh approximation: Hendrycks & Gimpel, "Gaussian Error Linear Units", section 2.
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + jnp.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3)))


def _gelu_tanh_slope(x: jax.Array) -> jax.Array:
    tanh = jnp.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)


# The kinds are those of ActivationKind in ffi/common/activation.h; SwiGLU is the one after them.
ACTIVATIONS: dict[str, Activation] = {
    "silu": Pointwise("silu", lambda x: x * jax.nn.sigmoid(x), _silu_slope, kind=0),
    "gelu": Pointwise("gelu", _gelu, _gelu_slope, kind=1),
    "gelu_tanh": Pointwise("gelu_tanh", _gelu_tanh, _gelu_tanh_slope, kind=2),
    # `where` and not `maximum`: the slope at zero is zero, and NaN stays NaN.
    "relu": Pointwise(
        "relu", lambda x: jnp.where(x <= 0, 0, x), lambda x: jnp.where(x <= 0, 0, jnp.ones_like(x)), kind=3
    ),
}


class CompiledForm(NamedTuple):
    """An activation as compiled code takes it: one of its kinds, and the options of SwiGLU."""

    kind: int
    limit: float = math.inf
    alpha: float = 1.0
    up_offset: float = 0.0


def compiled_form(activation: Activation) -> CompiledForm | None:
    """Returns the form in which compiled code knows an activation; `None` for one that it does not have.

    >>> compiled_form(SwiGLU(limit=7.0))
    CompiledForm(kind=4, limit=7.0, alpha=1.0, up_offset=0.0)
    """
    # A subclass may compute something else.
    if type(activation) is SwiGLU:
        limit = math.inf if activation.limit is None else activation.limit
        return CompiledForm(SwiGLU.kind, limit, activation.alpha, activation.up_offset)
    if type(activation) is Pointwise and activation.kind is not None:
        return CompiledForm(activation.kind)
    return None


def resolve(activation: "str | Activation") -> Activation:
    """Returns the activation of a name of `ACTIVATIONS`, or the object itself.

    Raises:
      ValueError: the name is not in the table.
      TypeError: neither a name nor an `Activation`.

    >>> resolve("silu").value(jnp.zeros(1), jnp.ones(1))
    Array([0.], dtype=float32)
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"moe_layer: activation={activation!r} is not known. Use one of {', '.join(map(repr, ACTIVATIONS))}, "
                "or jaxmoe.SwiGLU(limit=, alpha=, up_offset=); SwiGLU without options is 'silu' with w_up."
            )
        return ACTIVATIONS[activation]
    if isinstance(activation, type) or not isinstance(activation, Activation):
        raise TypeError(
            f"moe_layer: activation={activation!r} is neither a name ({', '.join(map(repr, ACTIVATIONS))}) nor an "
            "object like jaxmoe.SwiGLU(). The backward pass needs a derivative beside the value."
        )
    hash(activation)  # part of the key under which compiled programs are found
    return activation
