"""`jaxmoe.convert.from_hf` onto meshes: which device gets which bits, what is read for it, and what the host holds."""

import gc
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from safetensors.numpy import save_file

import jaxmoe
from jaxmoe.convert import from_hf, open_safetensors, to_hf
from tests.unit.checkpoints import CASES, HIDDEN, LAYER, TOKENS, Counting, run


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"expert": 8}, {}),
    ({"data": 2, "expert": 4}, {}),
    ({"a": 2, "b": 4}, {"axis_name": ("b", "a")}),
    ({"expert": 4, "tensor": 2}, {"intermediate_axis": "tensor"}),
    ({"fsdp": 2, "tensor": 2, "expert": 2}, {"hidden_axis": "fsdp", "intermediate_axis": "tensor"}),
    ({"tensor": 2, "data": 4}, {"axis_name": None, "intermediate_axis": ("tensor",)}),
]


@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        *(("mixtral", *mesh) for mesh in MESHES),
        *((name, *MESHES[4]) for name in ("deepseek_v3 in FP8", "qwen3_moe in NVFP4", "gpt_oss", "gpt_oss in BF16")),
        ("mixtral in FP8 of matrices", *MESHES[4]),
    ],
)
def test_every_device_gets_its_part_of_what_one_device_gets(name, axes, options):
    case, mesh = CASES[name](), mesh_of(**axes)
    whole = from_hf(case.tensors, case.family, LAYER)
    spread = from_hf(case.tensors, case.family, LAYER, mesh=mesh, **options)
    assert jax.tree.structure(whole) == jax.tree.structure(spread)
    for wanted, found in zip(jax.tree.leaves(whole), jax.tree.leaves(spread), strict=True):
        assert (found.shape, found.dtype, found.sharding.mesh) == (wanted.shape, wanted.dtype, mesh)
        content = np.asarray(wanted)
        for shard in found.addressable_shards:
            assert np.asarray(shard.data).tobytes() == content[shard.index].tobytes()
    for tensor, array in to_hf(spread, case.family, LAYER, **case.options).items():
        assert array.tobytes() == case.tensors[tensor].tobytes()
    names = {kind: options.get(kind) for kind in ("hidden_axis", "intermediate_axis")}
    expert_axes = options.get("axis_name", "expert")
    assert spread.router_kernel.sharding.is_fully_replicated
    matrix: Any = spread.experts.w_down
    if isinstance(matrix, jax.Array):
        wanted_spec = PartitionSpec(expert_axes, names["intermediate_axis"], names["hidden_axis"])
    else:
        matrix = matrix.values
        wanted_spec = PartitionSpec(expert_axes, names["hidden_axis"], names["intermediate_axis"])
    sharding = jax.sharding.NamedSharding(mesh, wanted_spec)
    assert matrix.sharding.is_equivalent_to(sharding, 3)


def test_the_layer_runs_on_the_mesh_that_is_set_and_answers_as_on_one_device():
    case = CASES["mixtral"]()
    x = jax.random.normal(jax.random.key(0), (2 * TOKENS, HIDDEN))
    alone = from_hf(case.tensors, case.family, LAYER, dtype=jnp.float32)
    with jax.set_mesh(mesh_of(expert=8)):
        spread = from_hf(case.tensors, case.family, LAYER, dtype=jnp.float32)
        sharding: Any = spread.experts.w_gate.sharding
        assert sharding.spec[0] == "expert"
        logits = jnp.dot(x, spread.router_kernel.astype(x.dtype), precision="highest")
        routing = jaxmoe.route(logits, case.router)
        y = jaxmoe.moe_layer(x, routing.topk_ids, routing.topk_weights, spread.experts, implementation="reference")
    np.testing.assert_allclose(y, run(alone, case, x, None), rtol=1e-4, atol=1e-5)


def test_each_expert_is_read_once_although_two_groups_of_devices_hold_it():
    case = CASES["deepseek_v3 in FP8"]()
    counting = Counting(case.tensors)
    from_hf(counting, case.family, LAYER, mesh=mesh_of(data=2, expert=4))
    of_experts = {name: count for name, count in counting.reads.items() if ".experts." in name}
    assert len(of_experts) == 8 * 3 * 2
    assert set(of_experts.values()) == {1}
    assert "model.norm.weight" not in counting.reads


def test_nothing_is_read_before_everything_has_been_checked():
    case = CASES["qwen3_moe"]()
    last = f"model.layers.{LAYER}.mlp.experts.7.down_proj.weight"
    counting = Counting(case.tensors | {last: case.tensors[last][:-1]})
    with pytest.raises(ValueError, match=r"7\.down_proj\.weight' has shape \[191, 160\]"):
        from_hf(counting, case.family, LAYER)
    assert not any(".experts." in name for name in counting.reads)


def test_the_host_holds_at_most_two_shards_of_24(tmp_path):
    experts, hidden, intermediate = 16, 256, 512
    rng, stem = np.random.default_rng(0), "model.layers.0.block_sparse_moe."
    tensors = {f"{stem}gate.weight": rng.standard_normal((experts, hidden)).astype(np.float32)}
    for expert in range(experts):
        for name, shape in (
            ("w1", (intermediate, hidden)),
            ("w3", (intermediate, hidden)),
            ("w2", (hidden, intermediate)),
        ):
            tensors[f"{stem}experts.{expert}.{name}.weight"] = rng.standard_normal(shape, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    mesh, one_matrix = mesh_of(expert=8), hidden * intermediate * 4
    shard = experts // 8 * one_matrix
    from_hf(tmp_path, "mixtral", 0, mesh=mesh)  # what is allocated once for all

    gc.collect()
    tracemalloc.start()
    try:
        weights = from_hf(tmp_path, "mixtral", 0, mesh=mesh)
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        # A device of a CPU may go on using memory of NumPy.
        on_devices, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(weights.experts.w_gate.addressable_shards) == 8
    assert shard <= peak <= on_devices + 2 * shard + one_matrix // 2, (peak, shard, on_devices)


def test_files_of_other_layers_are_not_opened(tmp_path):
    case = CASES["mixtral"]()
    save_file(case.tensors, tmp_path / "a.safetensors")
    listed = ", ".join(f'"{name}": "a.safetensors"' for name in case.tensors)
    index = f'{{"weight_map": {{{listed}, "model.layers.9.w": "b.safetensors"}}}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    (tmp_path / "b.safetensors").write_bytes(b"not a checkpoint")
    files = open_safetensors(tmp_path)
    assert from_hf(files, "mixtral", LAYER).experts.num_experts == 8
    with pytest.raises(ValueError, match=r"b\.safetensors: is no whole safetensors file"):
        files["model.layers.9.w"]


def test_progress_is_told_to_a_function_or_as_a_bar(capfd):
    case, told = CASES["mixtral"](), []
    weights = from_hf(case.tensors, "mixtral", LAYER, progress=lambda read, all_bytes: told.append((read, all_bytes)))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights.experts))
    assert [read for read, _ in told] == sorted({read for read, _ in told})
    assert told[-1] == (size, size)
    assert {all_bytes for _, all_bytes in told} == {size}
    from_hf(case.tensors, "mixtral", LAYER)
    assert capfd.readouterr().err == ""
    from_hf(case.tensors, "mixtral", LAYER, progress=True)
    assert f"layer {LAYER}: 100%" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("axes", "options", "told"),
    [
        ({"ep": 8}, {}, r"axis 'expert', for experts, is not in the mesh, whose axes are \{'ep': 8\}"),
        ({"expert": 8}, {"hidden_axis": "expert"}, "can split one dimension"),
        ({"expert": 3}, {}, r"experts\.w_gate, \[8, 192, 160\], cannot be split over 3 ranks .* \(8 % 3 = 2\)"),
    ],
)
def test_a_mesh_that_does_not_fit_is_an_error_that_says_what_to_change(axes, options, told):
    with pytest.raises(ValueError, match=told):
        from_hf(CASES["mixtral"]().tensors, "mixtral", LAYER, mesh=mesh_of(**axes), **options)
