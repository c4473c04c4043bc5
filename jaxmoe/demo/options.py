"""What a run is made of: its sizes, and the devices it gets."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmoe.options import ImplementationName

DATA_AXIS, EXPERT_AXIS = "data", "expert"
VIRTUAL_DEVICES = 8
VIRTUAL_EXPERT_RANKS = 4
# Width of an attention head; the hidden width is a multiple of it.
HEAD_WIDTH = 32


@dataclasses.dataclass(frozen=True)
class Options:
    """Sizes of a run. The defaults are those of `make demo`; each is an option of the command line."""

    steps: int = 400
    batch: int = 16
    sequence: int = 128
    hidden: int = 128
    layers: int = 2
    experts: int = 8
    top_k: int = 2
    implementation: ImplementationName | None = None
    seed: int = 0

    @property
    def intermediate(self) -> int:
        """Width of an expert between its two GEMMs."""
        return self.hidden

    @property
    def promised_loss(self) -> float | None:
        """Held-out loss in nats per byte that the run falls below, `None` for sizes that nobody has tried."""
        tried = dataclasses.replace(Options(), implementation=self.implementation, seed=self.seed)
        return 2.2 if self == dataclasses.replace(tried, steps=max(self.steps, tried.steps)) else None


# A run of seconds that still shows every part: about 20 s on 2 cores.
SHORT = Options(steps=60, sequence=64, hidden=64)


@dataclasses.dataclass(frozen=True)
class Devices:
    """Where a run takes place.

    Args:
      mesh: data x expert, Auto axes.
      dtype: of activations; parameters are float32.
    """

    mesh: Mesh
    dtype: jnp.dtype

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of arrays `[batch, ...]`: over all devices, since every expert rank brings tokens of its own."""
        return NamedSharding(self.mesh, PartitionSpec((DATA_AXIS, EXPERT_AXIS)))

    @property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"`, ..."""
        return self.mesh.devices.flat[0].platform


def choose_devices() -> Devices:
    """Returns all experts' devices: GPUs where JAX has some, else 8 virtual CPU devices as a data 2 x expert 4 mesh.

    `jaxmoe.testing.use_virtual_devices` must have been called before JAX was used.
    """
    available = jax.devices()
    if available[0].platform == "cpu":
        shape, used = (len(available) // VIRTUAL_EXPERT_RANKS, VIRTUAL_EXPERT_RANKS), available
    else:
        ranks = max(count for count in (1, 2, 4, 8) if count <= len(available))
        shape, used = (1, ranks), available[:ranks]
    mesh = jax.make_mesh(shape, (DATA_AXIS, EXPERT_AXIS), axis_types=(AxisType.Auto, AxisType.Auto), devices=used)
    return Devices(mesh, jnp.dtype(jnp.float32 if available[0].platform == "cpu" else jnp.bfloat16))
