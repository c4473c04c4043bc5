"""The example: tiny checkpoints as transformers saves them give its logits and its words, on meshes and in few bits.

tests/golden/make_checkpoints.py has made them, with what transformers computes with them. tests/hugging_face compares
with transformers itself.
"""

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint
import generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder import Decoder, Yarn
from safetensors.numpy import save_file

import jaxmoe
from jaxmoe.convert import open_safetensors
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.testing import relative_error

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "checkpoints"
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
# Sums of some hundred products in float32, over two layers.
FLOAT32 = 1e-5


@functools.cache
def expected(family: str) -> dict[str, Any]:
    """What transformers computes with a checkpoint."""
    with np.load(GOLDEN / family / "expected.npz") as arrays:
        return dict(arrays)


@functools.cache
def loaded(family: str, experts: str | None = None, dtype: str = "float32") -> Decoder:
    return checkpoint.load(GOLDEN / family, dtype=dtype, experts=experts)


@jax.jit
def call(model: Any, tokens: Any) -> Any:
    return model(tokens)


@functools.cache
def logits(family: str, experts: str | None = None, dtype: str = "float32") -> np.ndarray:
    return np.asarray(call(loaded(family, experts, dtype), expected(family)["prompts"])[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_a_checkpoint_are_those_of_transformers(family):
    assert relative_error(logits(family), expected(family)["logits"]) < FLOAT32


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_writes_with_a_cache_in_one_program_is_what_transformers_writes(family):
    wanted = expected(family)["continuations"]
    new = generate.generate(loaded(family), expected(family)["prompts"], wanted.shape[1])
    np.testing.assert_array_equal(new, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_its_logits_are_as_near_as_those_of_transformers_in_bfloat16(family):
    wanted = expected(family)["logits"]
    of_transformers = relative_error(expected(family)["logits_bf16"], wanted)
    assert 0 < relative_error(logits(family, dtype="bfloat16"), wanted) < 2 * of_transformers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "experts"), [("mixtral", "fp8"), ("mixtral", "nvfp4"), ("qwen3_moe", "fp8"), ("qwen3_moe", "mxfp4")]
)
def test_quantised_experts_cost_no_more_than_twice_what_their_rounding_explains(family, experts):
    def gates(model: Any) -> Any:
        of_blocks = (block.moe.w_gate.get_value() for block in model.blocks)
        return [gate.wide(jnp.float32) if isinstance(gate, QuantizedMatrix) else gate for gate in of_blocks]

    wide, narrow = (np.asarray(gates(loaded(family, each))) for each in (None, experts))
    # Three matrices round what an expert answers, each by itself; in FP8 the rows that they meet are rounded as well.
    roundings = 6 if experts == "fp8" else 3
    explained = math.sqrt(roundings) * relative_error(narrow, wide)
    assert explained / 5 < relative_error(logits(family, experts), logits(family)) < 2 * explained


def test_the_experts_of_gpt_oss_stay_packed_and_rows_per_expert_are_counted():
    model, prompts = loaded("gpt_oss"), expected("gpt_oss")["prompts"]
    assert all(isinstance(block.moe.w_down.get_value(), jaxmoe.MXFP4) for block in model.blocks)
    _, rows = call(model, prompts)
    np.testing.assert_array_equal(rows.sum(axis=1), [2 * prompts.size] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "axes", "experts", "sequences"),
    [
        ("mixtral", {"expert": 4}, None, 1),  # fewer tokens than devices
        ("qwen3_moe", {"data": 2, "expert": 4}, None, 2),
        ("gpt_oss", {"expert": 2, "data": 2}, None, 1),
        ("mixtral", {"data": 2, "expert": 2}, "mxfp4", 2),
    ],
)
def test_on_meshes_it_writes_the_same(family, axes, experts, sequences):
    prompts, wanted = (expected(family)[name][:sequences] for name in ("prompts", "continuations"))
    wanted = wanted[:, :4]
    if experts is not None:
        wanted = generate.generate(loaded(family, experts), prompts, 4)
    with jax.set_mesh(generate.mesh_of(axes)):
        model = checkpoint.load(GOLDEN / family, dtype="float32", experts=experts)
        new = generate.generate(model, jnp.asarray(prompts), 4)
    np.testing.assert_array_equal(new, wanted)
    gate = jax.tree.leaves(model.blocks[1].moe.w_gate.get_value())[0]
    assert gate.sharding.shard_shape(gate.shape)[0] == gate.shape[0] // axes["expert"]
    assert model.embedding.get_value().sharding.is_fully_replicated


@pytest.mark.slow
def test_a_sequence_is_over_behind_an_end_and_all_of_them_stop_when_the_last_is():
    wanted = expected("mixtral")["continuations"][:, :8]
    ends = (int(wanted[0, 3]), int(wanted[1, 1]))
    assert ends[0] not in wanted[1]
    assert ends[1] not in wanted[0]
    new = np.array(generate.generate(loaded("mixtral"), expected("mixtral")["prompts"], 8, ends=ends))
    stopped = wanted.copy()
    stopped[0, 4:], stopped[1, 2:] = -1, -1
    np.testing.assert_array_equal(new, stopped)


@pytest.mark.slow
def test_the_command_writes_on_a_mesh_of_virtual_devices():
    prompt, wanted = (expected("gpt_oss")[name][0] for name in ("prompts", "continuations"))
    options = {
        "checkpoint": GOLDEN / "gpt_oss",
        "prompt-ids": ",".join(map(str, prompt)),
        "max-new-tokens": 5,
        "mesh": "data=1,expert=4",
        "dtype": "float32",
    }
    command = [
        sys.executable,
        str(ROOT / "examples" / "generate.py"),
        *(f"--{name}={v}" for name, v in options.items()),
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == ",".join(map(str, wanted[:5]))


def copied(folder: Path, family: str, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    """Writes a checkpoint whose configuration and tensors have been changed."""
    config = json.loads((GOLDEN / family / "config.json").read_text())
    tensors = dict(open_safetensors(GOLDEN / family))
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return folder


def test_configurations_as_they_were_before_transformers_5_say_the_same(tmp_path):
    def older(config: dict[str, Any], _: Any) -> None:
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "experts_per_token": 2}
        del config["layer_types"], config["swiglu_alpha"]

    folder = copied(tmp_path, "gpt_oss", older)
    settings = checkpoint.Settings(folder / "config.json")
    config = checkpoint.model_of(settings)
    assert config == loaded("gpt_oss").config
    assert config.yarn == Yarn(4.0, 64, fast=8.0, truncate=False)
    assert checkpoint.activation_of(settings) == jaxmoe.SwiGLU.gpt_oss()


@pytest.mark.slow
def test_attention_in_fp8_has_the_numbers_of_its_blocks(tmp_path):
    def narrow(_: Any, tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "_proj" in name and "self_attn" in name]:
            tensors[f"{name}_scale_inv"] = np.full((1, 1), 0.01, np.float32)
            tensors[name] = (100 * tensors[name].astype(np.float32)).astype(jnp.float8_e4m3fn)

    def wide(config: Any, tensors: dict[str, Any]) -> None:
        narrow(config, tensors)
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            of = name.removesuffix("_scale_inv")
            tensors[of] = tensors[of].astype(np.float32) * tensors.pop(name)

    folders = [tmp_path / "narrow", tmp_path / "wide"]
    for folder, change in zip(folders, (narrow, wide), strict=True):
        folder.mkdir()
        copied(folder, "qwen3_moe", change)
    prompts = expected("qwen3_moe")["prompts"]
    found, wanted = (np.asarray(call(checkpoint.load(folder, dtype="float32"), prompts)[0]) for folder in folders)
    assert relative_error(found, wanted) < FLOAT32
    assert relative_error(found, logits("qwen3_moe")) > 1e-3


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mixtral", lambda c, t: c.update(model_type="llama"), "model_type is 'llama', and .* 'mixtral', 'qwen3_moe'"),
        ("mixtral", lambda c, t: c.pop("rms_norm_eps"), r"config.json: has no 'rms_norm_eps', which family 'mixtral'"),
        ("qwen3_moe", lambda c, t: c.update(mlp_only_layers=[0]), r"mlp_only_layers is \[0\], .* layers with experts"),
        (
            "gpt_oss",
            lambda c, t: c["rope_parameters"].update(rope_type="linear"),
            "rope_type 'default' and 'yarn' only",
        ),
        ("mixtral", lambda c, t: t.pop("lm_head.weight"), r"no tensor 'lm_head.weight', which has to be \[96, 64\]"),
        (
            "gpt_oss",
            lambda c, t: t.pop("model.layers.1.self_attn.sinks"),
            "no tensor 'model.layers.1.self_attn.sinks'",
        ),
        (
            "qwen3_moe",
            lambda c, t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            "model.layers.1.mlp.experts.3.up_proj.weight",
        ),
        (
            "mixtral",
            lambda c, t: t.update({"lm_head.weight": t["lm_head.weight"].astype(jnp.float8_e4m3fn)}),
            "'lm_head.weight' is float8_e4m3fn, which this decoder reads of experts only",
        ),
        (
            "qwen3_moe",
            lambda c, t: c.update(num_key_value_heads=4),
            r"'model.layers.0.self_attn.k_proj.weight' is \[64, 64\]; by config.json it has to be \[128, 64\]",
        ),
    ],
)
def test_what_is_missing_or_not_known_is_named(family, change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        checkpoint.load(copied(tmp_path, family, change))


def test_a_folder_without_a_checkpoint_and_experts_that_have_few_bits_already_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json: is not there"):
        checkpoint.load(tmp_path)
    with pytest.raises(ValueError, match="experts of this checkpoint are in MXFP4 already"):
        checkpoint.load(GOLDEN / "gpt_oss", experts="fp8")


@pytest.mark.parametrize(
    ("ids", "wrong"), [(["1", "a"], "'a'"), (["1", "-2"], "'-2'"), ([95, 96], "96; ids of tokens are .* 0 to 95")]
)
def test_ids_that_are_no_tokens_are_refused(ids, wrong):
    with pytest.raises(ValueError, match=f"the prompt has {wrong}"):
        generate.prompt_of(ids, 96)


@pytest.mark.parametrize("sizes", [["expert"], ["expert=0"], ["=4"], ["expert=two"]])
def test_axes_without_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="must be axes with their sizes, such as data=2,expert=4"):
        generate.axes_of(sizes)


def test_the_ends_of_a_text_are_those_of_the_checkpoint(tmp_path):
    assert generate.ends_of(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert generate.ends_of(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert generate.ends_of(tmp_path) == (5, 7)
