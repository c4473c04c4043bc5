"""The example beside Hugging Face transformers itself, with models made here: `make test-transformers`.

tests/examples has what transformers computed once with other models, and runs without it.
"""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoint
import generate
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxmoe
from jaxmoe.convert import MoEWeights, from_hf, open_safetensors, to_hf
from jaxmoe.testing import relative_error

NEEDS = "torch and transformers are not installed: make test-transformers"
torch: Any = pytest.importorskip("torch", reason=NEEDS)
transformers: Any = pytest.importorskip("transformers", reason=NEEDS)
make_checkpoints: Any = importlib.import_module("tests.golden.make_checkpoints")  # which needs both

pytestmark = pytest.mark.filterwarnings("default")  # what transformers warns of is not ours
ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "checkpoints"
COMMON = make_checkpoints.COMMON
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def mixtral() -> Any:
    return transformers.MixtralConfig(
        **COMMON, intermediate_size=48, num_local_experts=4, head_dim=8, sliding_window=6, tie_word_embeddings=True
    )


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        **COMMON,
        moe_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=3,
        attention_bias=True,
        norm_topk_prob=False,
        use_sliding_window=True,
        sliding_window=9,
        max_position_embeddings=256,
        rope_parameters=YARN,
    )


def gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **COMMON | {"num_hidden_layers": 3},
        head_dim=32,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=3,
        sliding_window=5,
        swiglu_limit=1.5,
        max_position_embeddings=256,
        rope_parameters=YARN | {"beta_fast": 16.0, "attention_factor": 1.1},
    )


@jax.jit
def logits(model: Any, tokens: Any) -> Any:
    return model(tokens)[0]


def read_by_transformers(folder: Path, packed: bool) -> Any:
    """Returns the model of a folder in float32; what lies in MXFP4 is decoded, which needs no GPU."""
    decoded = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if packed else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **decoded
    )


@pytest.mark.parametrize("config", [mixtral, qwen3_moe, gpt_oss])
def test_a_directory_that_transformers_saved_gives_its_logits_and_its_words(config, tmp_path):
    rng = np.random.default_rng(7)
    model = make_checkpoints.random_model(config(), rng)
    wanted = make_checkpoints.expected(model, rng)  # and leaves the model in bfloat16
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    ours = checkpoint.load(tmp_path, dtype="float32")
    assert relative_error(np.asarray(logits(ours, wanted["prompts"])), wanted["logits"]) < 1e-5
    new = generate.generate(ours, wanted["prompts"], make_checkpoints.NEW)
    np.testing.assert_array_equal(new, wanted["continuations"])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_transformers_reads_the_golden_checkpoints_and_computes_what_lies_beside_them(family):
    model = read_by_transformers(GOLDEN / family, packed=family == "gpt_oss")
    with np.load(GOLDEN / family / "expected.npz") as expected, torch.no_grad():
        found = model(torch.from_numpy(expected["prompts"]).long()).logits
        assert relative_error(found.float().numpy(), expected["logits"]) < 1e-5


def test_transformers_reads_experts_that_were_quantised_and_written_here(tmp_path):
    rng = np.random.default_rng(8)
    model = make_checkpoints.random_model(gpt_oss(), rng)
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    model.to(torch.bfloat16).save_pretrained(wide)
    shutil.copytree(wide, narrow)
    tensors = open_safetensors(wide)
    written = {name: np.array(array) for name, array in tensors.items() if "mlp" not in name}
    for layer in range(3):
        read = from_hf(tensors, "gpt_oss", layer)
        weights = MoEWeights(jaxmoe.quantize(read.experts, "mxfp4"), read.router_kernel, read.router_bias)
        written |= to_hf(weights, "gpt_oss", layer)
    save_file(written, narrow / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((narrow / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (narrow / "config.json").write_text(json.dumps(config))

    prompts = rng.integers(0, COMMON["vocab_size"], (2, 16))
    theirs = read_by_transformers(narrow, packed=True)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(prompts)).logits.float().numpy()
    ours = logits(checkpoint.load(narrow, dtype="float32"), prompts)
    assert relative_error(np.asarray(ours), wanted) < 1e-5
    assert relative_error(wanted, np.asarray(logits(checkpoint.load(wide, dtype="float32"), prompts))) > 0.03


def test_a_text_is_written_on_by_the_words_of_the_tokenizer_of_the_directory(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers  # pyright: ignore[reportMissingImports]

    folder = shutil.copytree(GOLDEN / "mixtral", tmp_path / "mixtral")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    with np.load(folder / "expected.npz") as expected:
        prompt, new = expected["prompts"][0], expected["continuations"][0][:5]
    text = " ".join(f"w{number}" for number in prompt)
    command = [sys.executable, str(ROOT / "examples" / "generate.py"), f"--checkpoint={folder}", f"--prompt={text}"]
    told = subprocess.run(
        [*command, "--max-new-tokens=5", "--dtype=float32"], capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines()[0] == ",".join(map(str, new))
    assert told.stdout.splitlines()[1].split() == [f"w{number}" for number in (*prompt, *new)]
