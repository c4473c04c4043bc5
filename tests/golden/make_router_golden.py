"""Writes routers.npz and activations.npz: what Hugging Face's modules compute, for tests that have only numpy.

Run it in an environment of its own (the project does not depend on torch):

    pip install torch transformers==5.23.0 numpy absl-py
    python tests/golden/make_router_golden.py

The inputs come from numpy's generator with a fixed seed, so another version of torch gives the same inputs. The models'
own classes do the arithmetic, in float32 on the CPU, through their public `forward`.

routers.npz, for each CASE (arrays of float32 unless said otherwise):
    CASE/logits   [tokens, experts] the router's logits, as the module returned them
    CASE/bias     [experts] selection bias, where the router has one
    CASE/ids      [tokens, top_k] int32 chosen experts; in order of preference only where the module sorts them
    CASE/weights  [tokens, top_k]
    load_balancing_loss/{logits, mask, loss, masked_loss}  transformers' loss for Mixtral (top_k 2, 8 experts), without
                  and with an attention mask over the tokens

activations.npz, for each of gpt_oss and deepseek_v4:
    MODEL/gate, MODEL/up  [rows, intermediate] the two projections, well beyond the clamping limits and on them
    MODEL/output          [rows, intermediate] what the expert multiplies by its down projection

Both files hold `metadata`, a JSON string with the versions used.
"""

import json
import pathlib
from typing import Any

import numpy as np
import torch
import transformers
from absl import app, flags
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

_OUT = flags.DEFINE_string("out", str(pathlib.Path(__file__).parent), "Folder the two .npz files are written to.")

TOKENS = 16
HIDDEN = 32


def set_parameters(module: torch.nn.Module, **values: np.ndarray) -> None:
    """Fills parameters and buffers; every one must be named, so that none is left uninitialised."""
    state = module.state_dict()
    assert set(state) == set(values), (set(state), set(values))
    module.load_state_dict({name: torch.from_numpy(value).to(state[name].dtype) for name, value in values.items()})


def run_router(
    router: torch.nn.Module, rng: np.random.Generator, *arguments: Any, **extra: np.ndarray
) -> dict[str, Any]:
    """Feeds random tokens through a router with random weights, scaled so that logits have a spread of about 2."""
    num_experts = router.num_experts
    weight = (2 * rng.standard_normal((num_experts, HIDDEN)) * HIDDEN**-0.5).astype(np.float32)
    set_parameters(router, weight=weight, **extra)
    hidden = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    with torch.no_grad():
        logits, weights, ids = router(torch.from_numpy(hidden), *arguments)
    case = {"logits": logits.numpy(), "weights": weights.numpy(), "ids": ids.numpy().astype(np.int32)}
    if "e_score_correction_bias" in extra:
        case["bias"] = extra["e_score_correction_bias"]
    return case


def selection_bias(rng: np.random.Generator, num_experts: int) -> np.ndarray:
    """Large enough to change the selection of most tokens."""
    return (0.1 * rng.standard_normal(num_experts)).astype(np.float32)


def router_cases(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Returns every case with the sizes of the published models; only the hidden size is small."""
    cases = {}

    config = transformers.MixtralConfig(hidden_size=HIDDEN)
    assert (config.num_local_experts, config.num_experts_per_tok) == (8, 2)
    cases["mixtral"] = run_router(modeling_mixtral.MixtralTopKRouter(config), rng)

    for name, norm in (("qwen3_moe", True), ("qwen3_moe_unnormalized", False)):
        config = transformers.Qwen3MoeConfig(hidden_size=HIDDEN, norm_topk_prob=norm)
        assert (config.num_experts, config.num_experts_per_tok) == (128, 8)
        cases[name] = run_router(modeling_qwen3_moe.Qwen3MoeTopKRouter(config), rng)

    config = transformers.DeepseekV3Config(hidden_size=HIDDEN)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.routed_scaling_factor) == (256, 8, 2.5)
    assert (config.n_group, config.topk_group, config.norm_topk_prob) == (8, 4, True)
    cases["deepseek_v3"] = run_router(
        modeling_deepseek_v3.DeepseekV3TopkRouter(config), rng, e_score_correction_bias=selection_bias(rng, 256)
    )

    # Kimi K2 is published as a DeepseekV3 model with these numbers.
    config = transformers.DeepseekV3Config(
        hidden_size=HIDDEN, n_routed_experts=384, n_group=1, topk_group=1, routed_scaling_factor=2.827
    )
    cases["kimi_k2"] = run_router(
        modeling_deepseek_v3.DeepseekV3TopkRouter(config), rng, e_score_correction_bias=selection_bias(rng, 384)
    )

    config = transformers.GptOssConfig(hidden_size=HIDDEN)
    assert (config.num_local_experts, config.num_experts_per_tok) == (128, 4)
    bias = rng.standard_normal(128).astype(np.float32)
    cases["gpt_oss"] = run_router(modeling_gpt_oss.GptOssTopKRouter(config), rng, bias=bias)

    config = transformers.DeepseekV4Config(hidden_size=HIDDEN, vocab_size=64)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.routed_scaling_factor) == (256, 6, 1.5)
    cases["deepseek_v4"] = run_router(
        modeling_deepseek_v4.DeepseekV4TopKRouter(config), rng, e_score_correction_bias=selection_bias(rng, 256)
    )
    table = np.stack([rng.permutation(256)[:6] for _ in range(64)])
    tokens = torch.from_numpy(rng.integers(0, 64, TOKENS))
    cases["deepseek_v4_hash"] = run_router(
        modeling_deepseek_v4.DeepseekV4HashRouter(config), rng, tokens, tid2eid=table
    )
    return cases


def balance_case(rng: np.random.Generator) -> dict[str, Any]:
    """Returns transformers' load-balancing loss of one layer."""
    logits = rng.standard_normal((TOKENS, 8)).astype(np.float32)
    mask = rng.random((2, TOKENS // 2)) < 0.7
    layers = (torch.from_numpy(logits),)
    loss = modeling_mixtral.load_balancing_loss_func(layers, 8, 2)
    masked_loss = modeling_mixtral.load_balancing_loss_func(layers, 8, 2, torch.from_numpy(mask).long())
    return {"logits": logits, "mask": mask.reshape(-1), "loss": loss.numpy(), "masked_loss": masked_loss.numpy()}


def projections(rng: np.random.Generator, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns gate and up projections [rows, intermediate]; the first two rows lie exactly on limits and on zero."""
    gate, up = (limit * rng.standard_normal((2, 12, 16))).astype(np.float32)
    gate[0], up[0] = limit, -limit
    gate[1], up[1] = 0, limit
    return gate, up


def run_experts(experts: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Sends all tokens through the only expert with weight one."""
    with torch.no_grad():
        ids, weights = torch.zeros(len(tokens), 1, dtype=torch.long), torch.ones(len(tokens), 1)
        return experts(torch.from_numpy(tokens), ids, weights).numpy()


def activation_cases(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Isolates the activation: the projections are identity matrices, so that the tokens are gate and up themselves."""
    cases = {}

    config = transformers.GptOssConfig(hidden_size=32, intermediate_size=16, num_local_experts=1)
    assert (config.swiglu_alpha, config.swiglu_limit) == (1.702, 7.0)
    experts = modeling_gpt_oss.GptOssExperts(config)
    set_parameters(
        experts,
        gate_up_proj=np.eye(32)[None],
        gate_up_proj_bias=np.zeros((1, 32)),
        down_proj=np.eye(16, 32)[None],
        down_proj_bias=np.zeros((1, 32)),
    )
    gate, up = projections(rng, config.swiglu_limit)
    interleaved = np.stack([gate, up], axis=-1).reshape(len(gate), 32)
    cases["gpt_oss"] = {"gate": gate, "up": up, "output": run_experts(experts, interleaved)[:, :16]}

    config = transformers.DeepseekV4Config(hidden_size=32, moe_intermediate_size=16, n_routed_experts=1)
    assert config.swiglu_limit == 10.0
    experts = modeling_deepseek_v4.DeepseekV4Experts(config)
    set_parameters(experts, gate_up_proj=np.eye(32)[None], down_proj=np.eye(32, 16)[None])
    gate, up = projections(rng, config.swiglu_limit)
    concatenated = np.concatenate([gate, up], axis=-1)
    cases["deepseek_v4"] = {"gate": gate, "up": up, "output": run_experts(experts, concatenated)[:, :16]}
    return cases


def save(path: pathlib.Path, cases: dict[str, dict[str, Any]]) -> None:
    """Writes `case/array` entries and the versions they were made with."""
    metadata = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "made_by": pathlib.Path(__file__).name,
    }
    arrays = {f"{case}/{name}": np.asarray(array) for case, entries in cases.items() for name, array in entries.items()}
    np.savez_compressed(path, metadata=np.array(json.dumps(metadata)), **arrays)


def main(_: list[str]) -> None:
    """Makes both files."""
    out = pathlib.Path(_OUT.value)
    rng = np.random.default_rng(0)
    save(out / "routers.npz", router_cases(rng) | {"load_balancing_loss": balance_case(rng)})
    save(out / "activations.npz", activation_cases(rng))


if __name__ == "__main__":
    app.run(main)
