"""From a directory as Hugging Face transformers saves one to a `Decoder`: config.json, and safetensors files.

    with jax.set_mesh(mesh):
        model = load("Qwen3-30B-A3B", experts="fp8")

Experts go to the devices of the mesh axis "expert", one shard at a time, in the bits that the files have them in
(gpt-oss: MXFP4) or in the format that is asked for. `jaxmoe.convert` knows the names of their tensors; those of
everything else are the same in the three families.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from decoder import Config, Decoder, Devices, Read, Yarn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import jaxmoe
from jaxmoe.convert import from_hf, open_safetensors
from jaxmoe.nnx import MoE

# By their names in config.json.
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
# What `experts` may be, and what `jaxmoe.quantize` calls it. Of the tiny checkpoints of the tests, whose weights were
# never trained for any, logits change by 3 to 4 % in FP8, 8 to 10 % in NVFP4 and 9 to 12 % in MXFP4.
FORMATS = {"fp8": "128x128", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
EXPERT_AXIS = "expert"


class Settings(dict[str, Any]):
    """config.json, which says where it lies when something is missing."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: is not there. Pass a directory that has config.json beside its weights.")
        super().__init__(json.loads(path.read_text()))
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{self.path}: has no {name!r}, which family {self.get('model_type')!r} needs.")

    def refuse_unless(self, fits: bool, name: str, known: str) -> None:
        """Raises where a setting asks for what the decoder does not compute."""
        if not fits:
            raise ValueError(f"{self.path}: {name} is {self.get(name)!r}, and this decoder has {known} only.")


def load(
    directory: str | os.PathLike[str],
    *,
    dtype: DTypeLike = jnp.bfloat16,
    experts: str | None = None,
    implementation: Literal["megakernel", "xla", "reference"] | None = None,
) -> Decoder:
    """Returns the model of a directory, on the mesh that is set, or else on JAX's default device.

    Args:
      directory: with config.json and model.safetensors, or shards and their index.
      dtype: to compute in, and of all weights but experts in few bits.
      experts: what they are quantised to, `"fp8"`, `"mxfp4"` or `"nvfp4"`; `None` leaves them as the files have them.
      implementation: of `jaxmoe.moe_layer`.

    Raises:
      FileNotFoundError: files that are not there.
      ValueError: another architecture, or settings that the decoder does not have; tensors that are missing, or have
        other shapes; experts that are in few bits already, or that cannot be split over the mesh.
    """
    settings = Settings(Path(directory) / "config.json")
    family = settings.get("model_type", "")
    settings.refuse_unless(family in FAMILIES, "model_type", ", ".join(map(repr, FAMILIES)))
    config, router, activation = model_of(settings), router_of(settings), activation_of(settings)
    tensors, mesh = open_safetensors(directory), jax.sharding.get_mesh()
    names = () if mesh.empty else mesh.axis_names
    axis_name = EXPERT_AXIS if EXPERT_AXIS in names else None

    def moe(layer: int) -> MoE:
        weights = from_hf(tensors, family, layer, axis_name=axis_name, dtype=dtype)
        if experts is not None:
            weights = dataclasses.replace(weights, experts=quantized(weights.experts, experts))
        # The model only writes on.
        if isinstance(weights.experts.w_gate, jaxmoe.MXFP4 | jaxmoe.NVFP4):
            weights = dataclasses.replace(weights, experts=jax.jit(jaxmoe.repacked)(weights.experts))
        return MoE.from_weights(
            weights,
            router,
            activation=activation,
            axis_name=axis_name,
            data_axes=tuple(name for name in names if name != EXPERT_AXIS),
            implementation=implementation,
            dtype=dtype,
        )

    moes = [moe(layer) for layer in range(len(config.windows))]
    return Decoder(config, moes, Devices(tuple(mesh.shape.items())), jnp.dtype(dtype), reader(tensors, mesh, dtype))


def quantized(experts: jaxmoe.Experts, kind: str) -> jaxmoe.Experts:
    """Returns wide experts in 8 or 4 bits, where they lie."""
    if not isinstance(experts.w_gate, jax.Array):
        raise ValueError(
            f"experts={kind!r}: the experts of this checkpoint are in {type(experts.w_gate).__name__} already. Leave "
            "experts out to take them as they are."
        )
    return jax.jit(jaxmoe.quantize, static_argnums=1)(experts, FORMATS[kind])


def reader(tensors: Mapping[str, Any], mesh: Mesh, dtype: DTypeLike) -> Read:
    """Returns the function that reads a tensor onto every device of the mesh."""

    def read(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name not in tensors:
            raise ValueError(f"The checkpoint has no tensor {name!r}, which has to be {list(shape)}.")
        array = tensors[name]
        if array.shape != shape:
            raise ValueError(f"Tensor {name!r} is {list(array.shape)}; by config.json it has to be {list(shape)}.")
        if (scales := f"{name}_scale_inv") in tensors:
            # FP8 releases have a scale for each block of 128 x 128 outside of the experts too.
            array = np.asarray(jaxmoe.BlockScaled(array[None], tensors[scales][None]).wide(jnp.float32)[0].T)
        elif array.dtype.itemsize < 2:
            raise ValueError(f"Tensor {name!r} is {array.dtype}, which this decoder reads of experts only.")
        array = array.astype(dtype)
        return jnp.asarray(array) if mesh.empty else jax.device_put(array, NamedSharding(mesh, P()))

    return read


def model_of(settings: Settings) -> Config:
    """Returns what config.json says of everything but the experts."""
    family, layers, heads = settings["model_type"], settings["num_hidden_layers"], settings["num_attention_heads"]
    settings.refuse_unless(settings.get("hidden_act", "silu") == "silu", "hidden_act", "'silu'")
    settings.refuse_unless(not settings.get("mlp_only_layers"), "mlp_only_layers", "layers with experts")
    settings.refuse_unless(settings.get("decoder_sparse_step", 1) == 1, "decoder_sparse_step", "layers with experts")
    window = settings.get("sliding_window")
    if family == "qwen3_moe" and not settings.get("use_sliding_window", False):
        window = None
    kinds = ["sliding_attention" if window else "full_attention"] * layers
    if family == "gpt_oss":
        kinds = settings.get("layer_types") or ["sliding_attention", "full_attention"] * layers
    base, yarn = rotary_of(settings)
    return Config(
        vocabulary=settings["vocab_size"],
        hidden=settings["hidden_size"],
        heads=heads,
        key_value_heads=settings.get("num_key_value_heads") or heads,
        head_width=settings.get("head_dim") or settings["hidden_size"] // heads,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers]),
        rotary_base=base,
        yarn=yarn,
        norm_epsilon=settings["rms_norm_eps"],
        biases=settings.get("attention_bias", family == "gpt_oss"),
        head_norms=family == "qwen3_moe",
        sinks=family == "gpt_oss",
        tied=settings.get("tie_word_embeddings", False),
    )


def rotary_of(settings: Settings) -> tuple[float, Yarn | None]:
    """Returns the base of the rotary waves, and how they are stretched.

    transformers 5 writes both into `rope_parameters`; before, there were `rope_theta` and `rope_scaling`.
    """
    name = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
    rope = settings.get(name) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    settings.refuse_unless(kind in ("default", "yarn"), name, "rope_type 'default' and 'yarn'")
    base = rope["rope_theta"] if "rope_theta" in rope else settings["rope_theta"]
    if kind == "default":
        return base, None
    settings.refuse_unless(not rope.get("mscale"), name, "YaRN without mscale")
    return base, Yarn(
        factor=rope["factor"],
        original_length=rope["original_max_position_embeddings"],
        fast=rope.get("beta_fast") or 32.0,
        slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
        attention_factor=rope.get("attention_factor"),
    )


def router_of(settings: Settings) -> jaxmoe.RouterConfig:
    """Returns how experts are chosen."""
    top_k = settings["num_experts_per_tok"]
    match settings["model_type"]:
        case "mixtral":
            return jaxmoe.RouterConfig.mixtral(top_k=top_k)
        case "qwen3_moe":
            return jaxmoe.RouterConfig.qwen3_moe(top_k=top_k, renormalize=bool(settings.get("norm_topk_prob")))
        case _:
            return jaxmoe.RouterConfig.gpt_oss(top_k=top_k)


def activation_of(settings: Settings) -> str | jaxmoe.SwiGLU:
    """Returns what experts apply between their two products."""
    if settings["model_type"] != "gpt_oss":
        return "silu"
    published = jaxmoe.SwiGLU.gpt_oss()
    limit, alpha = settings.get("swiglu_limit", published.limit), settings.get("swiglu_alpha", published.alpha)
    return dataclasses.replace(published, limit=limit, alpha=alpha)
