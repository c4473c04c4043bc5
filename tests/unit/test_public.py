"""What users see of the package before they call anything."""

import jax
import jax.numpy as jnp

import jaxmoe


def test_what_the_package_lists_is_what_users_need():
    assert set(dir(jaxmoe)) == {*jaxmoe.__all__, "__version__"}
    assert all(getattr(jaxmoe, name) is not None for name in dir(jaxmoe))


def test_experts_can_be_compared_whatever_their_arrays_hold():
    experts = jaxmoe.Experts.init(jax.random.key(0), 2, 32, 64)
    assert experts == jax.tree.map(lambda array: array, experts)  # the same arrays
    assert experts != jax.tree.map(jnp.copy, experts)
    assert experts != jaxmoe.quantize(experts, "mxfp4")
    assert experts != None  # noqa: E711
    sizes = [jax.tree.map(jnp.shape, each) for each in (experts, jax.eval_shape(lambda: experts))]
    assert sizes[0] == sizes[1]
    assert jax.jit(lambda e: jnp.where(e == e, 1, 0))(experts) == 1
