"""Activations of the expert FFN: value and derivative, one table for every implementation.

`api.py` resolves the user's `activation=` argument here once; `reference.py` uses `value` and lets JAX differentiate
it, `xla/` uses the closed forms of `vjp`, `megakernel/` passes the kind on to compiled code, which has the same table
(ffi/common/activation.h). All functions are elementwise and compute in the dtype they are given, which the callers make
float32 (or float64). A function of the user's own is a `Function`: no compiled code has it, and JAX differentiates it.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.activation_values import refuse_own_values, refuse_traced_values


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

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By the name in the table: pickle would not find the functions.
        return (resolve, (self.name,)) if ACTIVATIONS.get(self.name) is self else super().__reduce_ex__(protocol)

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
class Function:
    """A function of the user's, which JAX differentiates.

    Two of them are equal, and compile to one program, if their functions are the same object.

    Args:
      function: of gate alone or of gate and up, elementwise.
      takes_up: whether it is given both where there are both; else its value is multiplied with up.
      needs_up: whether it cannot do without up.
    """

    function: Callable[..., Any]
    takes_up: bool
    needs_up: bool

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", None) or repr(self.function)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Function":
        """Returns the activation of a function, by the number of its arguments.

        Raises:
          TypeError: it takes neither one nor two arguments, or has no hash.
        """
        try:
            parameters = list(inspect.signature(function).parameters.values())
            hash(function)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"moe_layer: activation={function!r} cannot be taken: {error}. Pass a function made by def, of gate "
                "or of gate and up."
            ) from error
        by_position = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        # An option with a default, such as the slope of jax.nn.leaky_relu, must not be given up.
        needed = sum(each.default is each.empty for each in by_position)
        options = all(each.default is not each.empty for each in parameters if each.kind == each.KEYWORD_ONLY)
        if needed not in (1, 2) or not options:
            raise TypeError(
                f"moe_layer: activation={function!r} takes {inspect.signature(function)}; it must take one array "
                "without a default, gate, or two, gate and up."
            )
        return cls(function, needed == 2 or [each.name for each in by_position[1:2]] == ["up"], needed == 2)

    def value(self, gate: Float[Array, "*rows"], up: Float[Array, "*rows"] | None) -> Float[Array, "*rows"]:
        """Returns `function(gate, up)`, or `function(gate) * up` of one that takes gate alone.

        Raises:
          TypeError: the function returns something else than an array of floats of the shape of `gate`.
        """
        h = self.function(gate, up) if self.takes_up and up is not None else self.function(gate)
        shape, dtype = getattr(h, "shape", None), getattr(h, "dtype", None)
        if dtype is None or shape != gate.shape or not jnp.issubdtype(dtype, jnp.floating):
            returned = type(h).__name__ if dtype is None else f"{dtype}{list(h.shape)}"
            raise TypeError(
                f"moe_layer: activation={self!r} returns {returned} for {gate.dtype}{list(gate.shape)}; it must be "
                "elementwise, and return a float array of the shape of gate."
            )
        h = h.astype(gate.dtype)
        return h if self.takes_up or up is None else h * up

    def vjp(
        self, gate: Float[Array, "*rows"], up: Float[Array, "*rows"] | None, dh: Float[Array, "*rows"]
    ) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"] | None]:
        """Returns what `jax.vjp` of the value does."""
        return jax.vjp(self.value, gate, up)[1](dh)


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

    Raises:
      TypeError: one of them is no number, or a traced one.
      ValueError: a limit that is not positive.

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
        given: dict[str, Any] = {"alpha": self.alpha, "up_offset": self.up_offset}
        if self.limit is not None:
            given["limit"] = self.limit
        for name, value in given.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise TypeError(
                    f"SwiGLU: {name}={value!r} must be a number that is known where the layer is traced, since kernels "
                    "take it with their call. Make the SwiGLU of such numbers; traced ones, which could be trained, "
                    "are not supported."
                ) from None
            object.__setattr__(self, name, number)
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
        assert up is not None, "resolve_beside() rejects SwiGLU on experts without an up projection"
        gate, up = self._clamp(gate, up)
        return (up + self.up_offset) * gate * jax.nn.sigmoid(self.alpha * gate)

    def vjp(
        self, gate: Float[Array, "*rows"], up: Float[Array, "*rows"] | None, dh: Float[Array, "*rows"]
    ) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"] | None]:
        """Returns the cotangents of both projections, zero where they were clamped."""
        assert up is not None, "resolve_beside() rejects SwiGLU on experts without an up projection"
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


# What users may write: a name, an object like SwiGLU, or a function.
ActivationLike = str | Activation | Callable[..., jax.Array]


def check_differentiable(activation: Activation) -> None:
    """Raises where a layer that has its own derivative is differentiated with an activation that JAX traces.

    Raises:
      TypeError: a function of the user's closes over a traced value, as far as that can be seen.
    """
    if isinstance(activation, Function):
        refuse_traced_values(activation.function, repr(activation))


# JAX's own functions that the table has. `jax.nn.swish`, and Flax's of the same names, are the same objects.
_NAMES_OF_JAX: dict[Any, str] = {jax.nn.silu: "silu", jax.nn.gelu: "gelu_tanh", jax.nn.relu: "relu"}


def _name_of(function: Callable[..., Any]) -> str | None:
    """Returns the name of the table that a function of JAX goes by, if any."""
    if isinstance(function, functools.partial) and function.func is jax.nn.gelu:
        if not function.args and function.keywords.keys() == {"approximate"}:
            return "gelu_tanh" if function.keywords["approximate"] else "gelu"
        return None
    return next((name for known, name in _NAMES_OF_JAX.items() if function is known), None)


def resolve(activation: ActivationLike) -> Activation:
    """Returns the activation of a name of `ACTIVATIONS` or of a function; an `Activation` as it is.

    `jax.nn.silu`, `jax.nn.relu`, `jax.nn.gelu` (of which JAX's default is the tanh approximation) and
    `functools.partial(jax.nn.gelu, approximate=False)` are taken for their names. Any other function gets arrays of
    float32 (float64 of float64 tokens) and is a `Function`:

    - of gate alone: `h = function(gate) * up`, or `function(gate)` of experts without an up projection;
    - of gate and up: `h = function(gate, up)`. A second argument that has a default is up if it is called `up`, and
      else left at its default.

    It is elementwise. It and its derivative are finite where gate and up are zero, since rows that belong to no token
    are computed too. Define it once, at the top of a module: programs are found by the function itself, so that a
    lambda or a `functools.partial` written in the call compiles again in every call outside of `jit`.

    What it closes over, or an object that is called holds, is constant: outside of `jit`, where the program is found by
    the function, the values are those of the first call, and changing them later changes nothing. It has no gradients
    of them on `"xla"`, where a derivative of a layer whose function closes over a traced value raises. So modules and
    other pytrees with values are refused. Where something in the activation is trained, `jaxmoe.dispatch_matmul` and
    `jaxmoe.matmul_combine` take any JAX in between.

    Raises:
      ValueError: the name is not in the table.
      TypeError: neither a name nor an `Activation` nor a function of one or two arrays; a module or another pytree with
        values.

    >>> resolve("silu").value(jnp.zeros(1), jnp.ones(1))
    Array([0.], dtype=float32)
    >>> resolve(jnp.square).value(jnp.array([3.0]), jnp.array([2.0]))
    Array([18.], dtype=float32)
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"moe_layer: activation={activation!r} is not known. Use one of {', '.join(map(repr, ACTIVATIONS))}, "
                "or jaxmoe.SwiGLU(limit=, alpha=, up_offset=); SwiGLU without options is 'silu' with w_up."
            )
        return ACTIVATIONS[activation]
    if isinstance(activation, type) or not (isinstance(activation, Activation) or callable(activation)):
        raise TypeError(
            f"moe_layer: activation={activation!r} is neither a name ({', '.join(map(repr, ACTIVATIONS))}) nor an "
            "object like jaxmoe.SwiGLU() nor a function of gate, or of gate and up."
        )
    refuse_own_values(activation)
    if isinstance(activation, Activation):
        hash(activation)  # part of the key under which compiled programs are found
        return activation
    name = _name_of(activation)
    return Function.of(activation) if name is None else ACTIVATIONS[name]


def resolve_beside(activation: ActivationLike, *, gated: bool) -> Activation:
    """Returns `resolve` of the activation, beside experts with an up projection or without.

    Raises:
      ValueError: it cannot do without, or as of `resolve`.
      TypeError: as of `resolve`.
    """
    resolved = resolve(activation)
    if resolved.needs_up and not gated:
        raise ValueError(f"moe_layer: activation={activation!r} multiplies two projections, but experts.w_up is None.")
    return resolved
