"""Times DeepGEMM's MoE kernel for Hopper, in 8 bits, on shapes of `python -m jaxmoe.bench layer --dtype=fp8-block`.

Usage: python tools/beside_deep_gemm.py --shape=8192,7168,2048,64,8 [--shape=...] [--gpus=2] [--blocks=5]

It needs PyTorch with CUDA, a release of the wheel `sgl-deep-gemm` that goes with it (by the names in its binary 0.1.5
and PyTorch 2.11), `apache-tvm-ffi`, and a compiler of CUDA (`CUDA_HOME`), for the kernel of each shape; nothing else of
this project does. A shape is
tokens per rank, hidden width, intermediate width, experts in all and experts per token. Routing is uniform, tokens and
weights are normal random numbers as in our benchmark, and a call is what a user of the layer calls: tokens in BF16 are
rounded and staged (one launch), then everything else (one launch). Times are taken as `jaxmoe/bench/timing.py` takes
ours: calls enqueued back to back, four sets of inputs in turn, the median over blocks of the slowest process. Before a
time is printed, sampled tokens are compared with float32 sums of the rounded tokens and weights; h is rounded to 8 bits
as well, which is most of the error.
"""

import argparse
import dataclasses
import math
import os
import statistics
import time

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
import torch.multiprocessing as processes  # pyright: ignore[reportMissingImports]

BLOCK = 128  # rows and columns of weights, columns of tokens that share a scale
LARGEST = 448.0
INPUT_SETS = 4
SAMPLED_TOKENS = 32  # of each rank
MOST_ERROR = 0.06


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a layer; `experts` of all ranks."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Matrices `[experts, out, in]` in 8 bits, and the scales of their blocks."""

    values: torch.Tensor
    scales: torch.Tensor

    def decode(self, expert: int) -> torch.Tensor:
        """Returns one of them in float32."""
        scales = self.scales[expert].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return self.values[expert].float() * scales


def random_matrices(experts: int, rows: int, columns: int) -> Rounded:
    """Returns normal random numbers of variance 1 / columns, rounded."""
    values = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(experts, rows // BLOCK, columns // BLOCK)
    for expert in range(experts):
        blocks = torch.randn(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK) / math.sqrt(columns)
        scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
        values[expert] = (blocks / scale).reshape(rows, columns).to(torch.float8_e4m3fn)
        scales[expert] = scale[:, 0, :, 0]
    return Rounded(values, scales)


def uniform_routing(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids of experts, and weights that sum up to one."""
    ids = torch.rand(shape.tokens, shape.experts).topk(shape.top_k).indices.to(torch.int32)
    return ids, torch.rand(shape.tokens, shape.top_k).softmax(-1)


def round_tokens(x: torch.Tensor) -> torch.Tensor:
    """Returns them in float32, as they are after rounding."""
    groups = x.float().reshape(x.shape[0], -1, BLOCK)
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).reshape(x.shape)


def expected(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Rounded, down: Rounded
) -> torch.Tensor:
    """Returns what the layer makes of a few tokens, by all ranks together: each adds up its own experts."""
    rank, local = dist.get_rank(), gate_up.values.shape[0]
    rounded = round_tokens(x)
    sums = torch.zeros_like(rounded)
    for expert in range(local):
        token, slot = (ids == rank * local + expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        gate, up = (rounded[token] @ gate_up.decode(expert).T).chunk(2, -1)
        answers = (torch.nn.functional.silu(gate) * up) @ down.decode(expert).T
        sums.index_add_(0, token, answers * weights[token, slot, None])
    dist.all_reduce(sums)
    return sums


def measure(shape: Shape, blocks: int, seconds: float) -> str:
    """Returns the line of a shape."""
    import deep_gemm  # pyright: ignore[reportMissingImports]

    ranks = dist.get_world_size()
    local = shape.experts // ranks
    group = dist.new_group(list(range(ranks)))
    gate_up = random_matrices(local, 2 * shape.intermediate, shape.hidden)
    down = random_matrices(local, shape.hidden, shape.intermediate)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        group, shape.experts, shape.tokens, shape.top_k, shape.hidden, shape.intermediate
    )
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90((gate_up.values, gate_up.scales), (down.values, down.scales))
    inputs = []
    for _ in range(INPUT_SETS):
        x = torch.randn(shape.tokens, shape.hidden).to(torch.bfloat16)
        inputs.append((x, *uniform_routing(shape)))

    def call(i: int) -> torch.Tensor:
        x, ids, weights = inputs[i % INPUT_SETS]
        deep_gemm.mega_moe_pre_dispatch_sm90(
            x, ids, weights, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights, num_tokens=shape.tokens
        )
        y = torch.empty_like(x)
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
        return y

    y = call(0)
    error = relative_error(y, inputs[0], gate_up, down)
    if not error < MOST_ERROR:
        return f"{text_of(shape)}  outputs differ: relative error {error:.1e}"

    def seconds_of(calls: int) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    one_call = over_ranks(torch.tensor([seconds_of(4) / 4])).max().item()
    calls = int(min(max(seconds / one_call, 4), 400))
    times = torch.tensor([seconds_of(calls) / calls * 1e6 for _ in range(blocks)])
    of_all = over_ranks(times).tolist()
    slowest = max(of_all, key=statistics.median)
    us = statistics.median(slowest)
    flops = 6 * shape.tokens * shape.top_k * shape.hidden * shape.intermediate
    return (
        f"{text_of(shape)}  check {error:.1e}  {us:8.1f} us ({min(slowest):.0f} to {max(slowest):.0f})  "
        f"{flops / us / 1e6:6.1f} TFLOP/s"
    )


def relative_error(
    y: torch.Tensor, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], gate_up: Rounded, down: Rounded
) -> float:
    """Returns that of sampled tokens of all ranks, each rank's in turn."""
    wrong = total = 0.0
    for owner in range(dist.get_world_size()):
        sampled = torch.linspace(0, y.shape[0] - 1, min(SAMPLED_TOKENS, y.shape[0])).long()
        rows = [each[sampled].contiguous() for each in (*inputs, y)]
        for each in rows:
            dist.broadcast(each, owner)
        x, ids, weights, outputs = rows
        correct = expected(x, ids, weights, gate_up, down)
        wrong += (outputs.float() - correct).square().sum().item()
        total += correct.square().sum().item()
    return math.sqrt(wrong / total)


def over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Returns `[ranks, ...]`: the values of all ranks, in all of them."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return torch.stack(gathered)


def text_of(shape: Shape) -> str:
    return ",".join(str(size) for size in dataclasses.astuple(shape)).ljust(26)


def run_rank(rank: int, ranks: int, shapes: list[Shape], blocks: int, seconds: float) -> None:
    """The process of a GPU."""
    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")
    torch.manual_seed(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    for shape in shapes:
        line = measure(shape, blocks, seconds)
        if rank == 0:
            print(line, flush=True)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--shape", action="append", required=True, help="tokens per rank,hidden,intermediate,experts,top_k"
    )
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.15)
    flags = parser.parse_args()
    shapes = [Shape(*map(int, text.split(","))) for text in flags.shape]
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29517")
    print(
        f"DeepGEMM, {torch.cuda.get_device_name(0)} x {flags.gpus}, PyTorch {torch.__version__}; per rank", flush=True
    )
    processes.spawn(run_rank, (flags.gpus, shapes, flags.blocks, flags.seconds), nprocs=flags.gpus)


if __name__ == "__main__":
    main()
