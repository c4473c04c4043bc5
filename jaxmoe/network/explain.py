"""What a call over several hosts costs: that of its launches, and what travels between hosts."""

import dataclasses

from jaxmoe.implementations.base import Call
from jaxmoe.implementations.explanation import Explanation
from jaxmoe.network.choice import call_on_host, chunk_tokens
from jaxmoe.network.cost import launches, network_bytes, sent_tokens


def explain(call: Call, of_launch: Explanation) -> Explanation:
    """Returns the explanation of a call, given that of one launch of it: the same where there is one host."""
    if call.levels is None:
        return of_launch
    levels, shape, launch = call.levels, call.shape, call_on_host(call).shape
    plan, hosts = levels.plan, levels.hosts
    assert plan.way is not None
    assert plan.chunks is not None
    number = launches(shape, hosts, plan)
    sent = sent_tokens(shape, hosts, plan)
    kept = {}
    if plan.way == "gather" and of_launch.residual_bytes:
        # Of every chunk, beside what the implementation keeps of it.
        gathered = hosts * plan.chunks * chunk_tokens(shape, plan.chunks) * shape.answer_bytes
        kept = {name: plan.chunks * size + gathered for name, size in of_launch.residual_bytes.items()}
    elif of_launch.residual_bytes:
        kept = {"recompute": 0}
    arrived = launch.tokens * shape.answer_bytes
    memory = {"network: tokens that arrived": 2 * arrived if number > 1 else arrived, "network: answers": 2 * arrived}
    if plan.way == "send":
        # In float32, while rounds add to them.
        memory["network: sums"] = chunk_tokens(shape, plan.chunks) * shape.hidden * 4
    return dataclasses.replace(
        of_launch,
        call=call,
        reasons=(
            of_launch.reasons[0],
            *plan.reasons,
            f"{number} launch(es) on each host in a forward pass, each of up to {launch.tokens} tokens per rank",
            *of_launch.reasons[1:],
        ),
        network_memory_bytes=memory,
        residual_bytes=kept,
        wire_bytes=number * of_launch.wire_bytes,
        network_bytes=network_bytes(shape, hosts, sent),
        flops=shape.flops,
    )
