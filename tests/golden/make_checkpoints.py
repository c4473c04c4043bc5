"""Writes checkpoints/: tiny models as Hugging Face saves them, and what Hugging Face's modules compute with them.

Run it in an environment of its own (the project does not depend on torch):

    pip install torch transformers==5.23.0 numpy absl-py safetensors
    python tests/golden/make_checkpoints.py

Every model has two layers and random weights in BF16, from numpy's generator with a fixed seed, at such a scale that
every part of it matters to the logits. Mixtral is one file; Qwen3-MoE is shards with an index. gpt-oss has the form in
which it is published, with its experts in MXFP4, which transformers does not write: values and scales are drawn here,
and the model that computes has the numbers that they stand for, all of which BF16 has too.

Each folder also holds expected.npz:
    prompts        [sequences, length] int32 token ids
    logits         [sequences, length, vocabulary] float32, computed in float32 with the weights as saved
    logits_bf16    the same computed in bfloat16
    continuations  [sequences, new] int32: what greedy decoding in float32 adds; best and second best logit are apart
                   by more than MARGIN at every step
    metadata       a JSON string with the versions used
"""

import itertools
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import torch
import transformers
from absl import app, flags
from safetensors.torch import load_file, save_file

_OUT = flags.DEFINE_string(
    "out", str(pathlib.Path(__file__).parent / "checkpoints"), "Folder that the checkpoints are written to."
)

SEQUENCES, LENGTH, NEW, MARGIN = 2, 20, 12, 0.02
VOCABULARY, HIDDEN = 96, 64
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
GROUP = 32  # values that share a scale in MXFP4

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "bfloat16",
}
CONFIGS = {
    "mixtral": transformers.MixtralConfig(
        **COMMON,
        intermediate_size=96,
        num_local_experts=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **COMMON,
        head_dim=32,  # not hidden / heads, as in the published models
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "gpt_oss": transformers.GptOssConfig(
        **COMMON,
        head_dim=16,
        intermediate_size=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        sliding_window=8,
        # Short, so that these few positions are in the part where YaRN changes the frequencies.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    ),
}


def random_parameter(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws a parameter, of the size of which `name` says what it is."""
    values = rng.standard_normal(shape)
    if "norm" in name:
        return 1 + 0.1 * values
    if "embed_tokens" in name or "sinks" in name:
        return values
    if "bias" in name:
        return 0.3 * values
    if "router.weight" in name or "mlp.gate.weight" in name:
        return 2 * values * HIDDEN**-0.5
    # Stacked experts of gpt-oss are [experts, in, out], all else is [out, in].
    inner = shape[1] if "experts" in name and "gpt_oss" in name else shape[-1]
    return values * inner**-0.5


def random_model(config: Any, rng: np.random.Generator) -> Any:
    """Returns a model in float32 whose parameters have no more bits than bfloat16."""
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            drawn = random_parameter(f"{config.model_type} {name}", tuple(parameter.shape), rng)
            parameter.copy_(torch.from_numpy(drawn).to(torch.bfloat16))
    return model


def pack_experts(model: Any, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Gives the experts of gpt-oss random numbers of MXFP4, and returns these as the published files have them."""
    packed = {}
    for layer, block in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(block.mlp.experts, name)
            experts, inner, out = parameter.shape
            codes = rng.integers(0, 16, (experts, out, inner)).astype(np.uint8)
            exponents = rng.integers(122, 125, (experts, out, inner // GROUP)).astype(np.uint8)
            numbers = np.where(codes < 8, 1, -1) * E2M1[codes % 8]
            numbers = numbers * np.repeat(2.0 ** (exponents.astype(int) - 127), GROUP, axis=2)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(numbers.swapaxes(1, 2)))
            assert torch.equal(parameter, parameter.to(torch.bfloat16).float())
            blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(experts, out, inner // GROUP, GROUP // 2)
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            packed |= {f"{stem}_blocks": torch.from_numpy(blocks), f"{stem}_scales": torch.from_numpy(exponents)}
    return packed


def save_packed(model: Any, packed: dict[str, torch.Tensor], folder: pathlib.Path) -> None:
    """Saves gpt-oss with its experts in MXFP4."""
    model.to(torch.bfloat16).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(("_up_proj", "down_proj"))}
    save_file(tensors | packed, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def expected(model: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns prompts, logits and continuations, of prompts whose continuation no rounding can change."""
    sequences: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for _ in itertools.count():
            prompt = torch.from_numpy(rng.integers(0, VOCABULARY, (1, LENGTH)))
            found = model.generate(
                prompt, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
            best = torch.stack(found.logits).topk(2, dim=-1).values
            if (best[..., 0] - best[..., 1]).min() > MARGIN:
                sequences.append((prompt, found.sequences[:, LENGTH:]))
            if len(sequences) == SEQUENCES:
                break
        prompts = torch.cat([prompt for prompt, _ in sequences])
        logits = model(prompts).logits
        logits_bf16 = model.to(torch.bfloat16)(prompts).logits.float()
    return {
        "prompts": prompts.numpy().astype(np.int32),
        "logits": logits.numpy(),
        "logits_bf16": logits_bf16.numpy(),
        "continuations": torch.cat([new for _, new in sequences]).numpy().astype(np.int32),
    }


def main(_: list[str]) -> None:
    """Makes all folders anew."""
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    metadata = json.dumps(versions | {"made_by": pathlib.Path(__file__).name})
    for number, (family, config) in enumerate(CONFIGS.items()):
        rng = np.random.default_rng(number)
        folder = pathlib.Path(_OUT.value) / family
        shutil.rmtree(folder, ignore_errors=True)
        model = random_model(config, rng)
        packed = pack_experts(model, rng) if family == "gpt_oss" else {}
        arrays = expected(model, rng)
        if packed:
            save_packed(model, packed, folder)
        else:
            model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="150KB" if family == "qwen3_moe" else "5GB")
        np.savez_compressed(folder / "expected.npz", metadata=np.array(metadata), **arrays)


if __name__ == "__main__":
    app.run(main)
