"""What shares of the benchmark are of: rates that are measured, and none of something else in their place."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.bench import peaks


def test_peaks_are_measured_by_a_product_and_a_copy():
    found = peaks.measure(product_size=64, copy_bytes=2**12)
    assert min(found.tflops, found.fp8_tflops, found.copy_gbs) > 0


def test_a_kind_of_device_has_the_rates_of_its_own_kind_or_none():
    h200, h100 = peaks.known("NVIDIA H200"), peaks.known("NVIDIA H100 80GB HBM3")
    assert h200 is not None
    assert h100 is not None
    assert h200.copy_gbs > 1.3 * h100.copy_gbs
    # Of another memory, or of another number of multiprocessors.
    others = "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA H200 NVL", "cpu"
    assert [peaks.known(kind) for kind in others] == [None] * len(others)


def test_the_product_in_8_bits_is_that_of_its_values_and_its_scale():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((48, 32)), jnp.float8_e4m3fn) for _ in range(2))
    product = peaks.fp8_product(a, b)(a, b, jnp.float32(0.25))
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T / 4
    np.testing.assert_allclose(product, exact, rtol=1e-5, atol=1e-5)


def test_no_rate_is_measured_of_a_product_that_a_gpu_does_not_do_in_8_bits(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100")
    monkeypatch.setattr(peaks.jax, "devices", lambda: [gpu])
    a = jnp.zeros((16, 16), jnp.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=r"for NVIDIA A100 without __cublas\$lt\$matmul\$f8"):
        peaks.fp8_product(a, a)
