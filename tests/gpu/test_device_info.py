"""The CUDA part on real devices: built for them, launched on XLA's stream, on the device that was asked for."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe.machine as machine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def hopper_devices():
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        pytest.skip("JAX sees no CUDA device")
    if machine.build_info().cuda_toolkit is None:
        pytest.fail(f"a GPU is here, but the CUDA part was not built: {machine.build_info().cuda_missing}")
    return devices


def test_code_for_sm_90a_runs_on_every_device_and_reports_a_hopper_gpu(hopper_devices):
    for device in hopper_devices:
        info = machine.device_info(device)
        assert info.compiled_arch == 900
        assert info.compute_capability == 90
        assert info.block_shared_bytes == 227 * 1024  # what compute capability 9.0 allows one block
        assert 100 <= info.num_processors <= 144  # 114 (PCIe) or 132 (SXM) of the chip's 144


def test_the_cuda_part_is_available_on_hopper(hopper_devices):
    status = machine.cuda_status()
    if machine.build_info().collectives_api is None:
        assert "collectives_api.h" in status.reason
    else:
        assert status == machine.CudaStatus(available=True, reason="")


def test_the_driver_knows_the_gpus_of_jax_by_their_numbers_and_which_reach_each_other(hopper_devices):
    numbers = [device.local_hardware_id for device in hopper_devices]
    assert set(numbers) <= set(machine.visible_gpus())
    for gpu, peer in itertools.combinations(numbers, 2):
        assert machine.peer_access(gpu, peer) == machine.peer_access(peer, gpu)
    with pytest.raises(RuntimeError, match=r"cudaDeviceCanAccessPeer: invalid device ordinal"):
        machine.peer_access(numbers[0], 1000)


def test_the_call_is_ordered_with_the_work_before_and_after_it_on_one_stream(hopper_devices):
    call = jax.ffi.ffi_call("jaxmoe_device_info", jax.ShapeDtypeStruct((4,), jnp.int32))
    machine.device_info(hopper_devices[0])  # registers the target

    @jax.jit
    def many_calls(x):
        def one(total, _):
            return total + call(), None

        return jax.lax.scan(one, x, length=1000)[0]

    start = jax.device_put(jnp.zeros(4, jnp.int32), hopper_devices[0])
    once = np.asarray(jax.jit(call)())
    # XLA may hoist a call without inputs out of the loop; the sum is the same.
    np.testing.assert_array_equal(many_calls(start), 1000 * once)
