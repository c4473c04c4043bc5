"""Experts on several hosts: who is of which host, what is chosen, and what that costs. The layers are in tests/host."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.bench import scaling
from jaxmoe.network import choice, cost, levels, message, send
from jaxmoe.network.levels import Levels
from jaxmoe.sharding import ExpertGroup, replica_groups
from jaxmoe.testing import make_inputs
from tests.layer_calls import layer, mesh_of

NetworkPlan, Shape = jaxmoe.NetworkPlan, jaxmoe.plan.Shape
MIXTRAL = Shape(tokens=8192, hidden=4096, intermediate=14336, num_experts=8, top_k=2, ranks=8)
DEEPSEEK = Shape(tokens=4096, hidden=7168, intermediate=2048, num_experts=256, top_k=8, ranks=64)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """As JAX shows the GPU of a process; `slice_index` is what it calls a host."""

    process_index: int
    slice_index: int
    platform: str = "gpu"


# --- who is of which host ---------------------------------------------------------------------------------------------


def test_a_host_is_the_last_axes_where_they_have_as_many_ranks():
    mesh = AbstractMesh((2, 2, 4), ("data", "host", "expert"))
    group = ExpertGroup(("host", "expert"), 8)
    assert levels.split(group, 4, mesh) == (ExpertGroup(("expert",), 4), ExpertGroup(("host",), 2))
    assert levels.split(group, 1, mesh) == (ExpertGroup(), group)


def test_hosts_are_parts_of_an_axis_where_it_spans_several():
    mesh = AbstractMesh((2, 6), ("data", "expert"))
    on_host, across = levels.split(ExpertGroup(("expert",), 6), 3, mesh)
    assert (on_host.parts, across.parts) == (((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5)))
    assert replica_groups(on_host, mesh).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert replica_groups(across, mesh).tolist() == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]


def test_every_rank_knows_its_place_on_its_host_and_its_host():
    mesh = mesh_of("expert")
    on_host, across = levels.split(ExpertGroup(("expert",), 8), 2, mesh)

    def places(_: jax.Array) -> jax.Array:
        return jnp.stack([on_host.part(), on_host.index(), across.part(), across.index()])[None]

    found = jax.shard_map(places, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))(jnp.zeros(8))
    assert found.tolist() == [[rank // 2, rank % 2, rank % 2, rank // 2] for rank in range(8)]


@pytest.mark.parametrize(
    ("hosts_of_groups", "ranks_per_host"),
    [
        ([[0, 0, 1, 1], [2, 2, 3, 3]], 2),
        ([[0, 1, 2, 3]], 1),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], 4),
        # No equal numbers of ranks that follow each other in every group: one level.
        ([[0, 1, 0, 1]], 4),
        ([[0, 0, 0, 1]], 4),
        ([[0, 0, 1, 1], [2, 2, 2, 2]], 4),
    ],
)
def test_ranks_of_a_host_follow_from_the_devices(hosts_of_groups, ranks_per_host, monkeypatch):
    numbers = iter(range(100))
    groups = np.array([[Gpu(next(numbers), host) for host in group] for group in hosts_of_groups], object)
    monkeypatch.setattr(levels, "devices_of_groups", lambda group, mesh: groups)
    assert levels.ranks_per_host(ExpertGroup(("expert",), 4), None, None) == ranks_per_host


def test_processes_of_cpus_count_as_one_host_unless_that_is_stated(monkeypatch):
    groups = np.array([[Gpu(0, -1, "cpu"), Gpu(1, -1, "cpu")]], object)
    monkeypatch.setattr(levels, "devices_of_groups", lambda group, mesh: groups)
    group = ExpertGroup(("expert",), 2)
    assert levels.ranks_per_host(group, None, None) == 2
    assert levels.ranks_per_host(group, None, 1) == 1


def test_a_stated_number_that_does_not_divide_the_ranks_is_refused_and_a_larger_one_is_one_host():
    group = ExpertGroup(("expert",), 8)
    with pytest.raises(ValueError, match=r"ranks_per_host=3, and the 8 ranks .* Use a divisor of 8"):
        levels.ranks_per_host(group, None, 3)
    assert levels.ranks_per_host(group, None, 16) == 8


def test_ids_of_a_host_are_those_of_its_experts():
    of_two = Levels(ExpertGroup(), ExpertGroup(("host",), 2), NetworkPlan())
    ids = jnp.array([[0, 3, 4], [7, -1, 5]])
    assert of_two.ids_on_host(ids, jnp.int32(0), 8).tolist() == [[0, 3, -1], [-1, -1, -1]]
    assert of_two.ids_on_host(ids, jnp.int32(1), 8).tolist() == [[-1, -1, 0], [3, -1, 1]]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"ranks_per_host": 0}, "ranks_per_host=0 must be an integer of at least 1"),
        ({"chunks": 1.5}, "chunks=1.5 must be an integer"),
        ({"round_tokens": True}, "round_tokens=True must be an integer"),
        ({"way": "broadcast"}, "way='broadcast' must be one of 'gather', 'send'"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields, told):
    with pytest.raises(ValueError, match=told):
        NetworkPlan(**fields)


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_network_that_is_no_plan_is_refused():
    arguments = make_inputs(0, tokens=8, hidden=8, intermediate=8, num_experts=8, top_k=2)
    with pytest.raises(TypeError, match=r"network is an int; it must be a jaxmoe\.NetworkPlan"):
        jaxmoe.moe_layer(*arguments[:4], axis_name=None, network=4)  # pyright: ignore[reportArgumentType]


# --- what is chosen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "hosts", "way"),
    [
        (MIXTRAL, 2, "gather"),  # 79 % of tokens
        (MIXTRAL, 8, "send"),  # 25 %
        (DEEPSEEK, 2, "gather"),
        (DEEPSEEK, 4, "gather"),  # 90 %
        (DEEPSEEK, 8, "send"),  # 66 %
        (dataclasses.replace(DEEPSEEK, tokens=8), 8, "gather"),  # a few messages
    ],
)
def test_tokens_go_to_all_hosts_where_most_of_them_need_it_or_bytes_are_few(shape, hosts, way):
    plan = choice.complete(None, shape, hosts)
    assert plan.way == way
    assert any(reason.startswith(f"way={way!r}: ") for reason in plan.reasons)


def test_every_choice_of_a_plan_has_its_reason_and_what_the_user_chose_has_none():
    plan = choice.complete(None, DEEPSEEK, 8)
    told = [reason.split("=")[0] for reason in plan.reasons]
    assert told == ["ranks_per_host", "way", "chunks", "round_tokens"]
    stated = choice.complete(NetworkPlan(8, "send", 2, 100), DEEPSEEK, 8)
    assert stated == NetworkPlan(8, "send", 2, 100)
    assert [reason.split("=")[0] for reason in stated.reasons] == ["ranks_per_host"]


def test_rounds_have_room_for_uniform_routing_and_tokens_that_go_to_fewer_hosts_take_fewer():
    plan = choice.complete(None, DEEPSEEK, 8)
    assert plan.round_tokens is not None
    needed = cost.share_of_host(DEEPSEEK, 8) * DEEPSEEK.tokens
    assert cost.launches(DEEPSEEK, 8, plan) == choice.ROUNDS
    assert choice.ROUNDS * plan.round_tokens >= choice.ROOM * needed
    # Group-limited routing: 4 of 8 hosts at most.
    assert -(-DEEPSEEK.tokens // 2 // plan.round_tokens) < choice.ROUNDS


def test_the_launch_of_a_host_has_the_rows_that_uniform_routing_sends_there():
    for plan in (NetworkPlan(8, "gather", 2), NetworkPlan(8, "send", 1, 1024)):
        of_host = choice.shape_on_host(DEEPSEEK, Levels(ExpertGroup(), ExpertGroup(("host",), 8), plan))
        launches = cost.launches(DEEPSEEK, 8, plan)
        assert (of_host.num_experts, of_host.ranks) == (32, 8)
        assert of_host.local_experts == DEEPSEEK.local_experts
        assert launches * of_host.balanced_rows == pytest.approx(DEEPSEEK.balanced_rows, rel=1e-3)


def test_tokens_that_go_to_fewer_hosts_are_sent_in_fewer_rounds():
    mesh = mesh_of("expert")
    on_host, across = levels.split(ExpertGroup(("expert",), 8), 1, mesh)
    static = send._Static(Levels(on_host, across, NetworkPlan(1, "send", 1, 8)), 64, 8)
    rng = np.random.default_rng(0)
    tokens, top_k = 8 * 64, 4
    anywhere = np.stack([rng.permutation(64)[:top_k] for _ in range(tokens)])
    # All experts of a token on one host, another one for each.
    on_one = 8 * (np.arange(tokens)[:, None] % 8) + np.stack([rng.permutation(8)[:top_k] for _ in range(tokens)])

    def rounds(ids: jax.Array) -> jax.Array:
        return send._routes(static, ids).rounds

    counted = jax.jit(jax.shard_map(rounds, mesh=mesh, in_specs=P("expert"), out_specs=P()))
    assert int(counted(on_one)) == cost.FEWEST_ROUNDS  # of which the second one is empty
    assert 3 <= int(counted(anywhere)) <= 5  # 41 % of 64 tokens to each host, 8 in a round, and what chance adds


# --- one message ------------------------------------------------------------------------------------------------------


def test_arrays_of_several_dtypes_arrive_with_their_bits_in_one_collective():
    mesh = mesh_of("expert")
    _, across = levels.split(ExpertGroup(("expert",), 8), 2, mesh)
    rng = np.random.default_rng(0)
    # Of each rank, one part for each of four hosts. Any bits: among them are NaNs with a payload.
    words = rng.integers(0, 2**16, (8 * 4, 3, 5), np.uint16)
    sent = (words.view(jnp.bfloat16), rng.integers(-(2**31), 2**31, (8 * 4, 3, 2), np.int32), rng.random((8 * 4, 3)))
    sent = (*sent[:2], sent[2].astype(np.float32))

    def on_rank(tree: Any) -> Any:
        arrived, computed = message.exchange_beside(across, tree, jnp.float32(2.0))
        return arrived, computed[None]

    run = jax.shard_map(on_rank, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    arrived, computed = jax.jit(run)(sent)
    assert str(jax.make_jaxpr(run)(sent)).count("all_to_all[") == 1
    assert computed.tolist() == [2.0] * 8
    for got, given in zip(arrived, sent, strict=True):
        # Rank = 2 * host + place: part `host` of each rank of that place, in the order of the hosts they come from.
        parts = np.asarray(given).reshape(4, 2, 4, *given.shape[1:])
        wanted = parts.transpose(2, 1, 0, *range(3, parts.ndim)).reshape(given.shape)
        assert np.asarray(got).tobytes() == wanted.tobytes()


# --- what it costs ----------------------------------------------------------------------------------------------------


def _explained(network: jaxmoe.NetworkPlan, **sizes: Any) -> jaxmoe.Explanation:
    shape: dict[str, Any] = {"tokens": 512, "hidden": 64, "intermediate": 32, "num_experts": 16, "top_k": 2} | sizes
    arguments = make_inputs(0, **shape)
    return jaxmoe.explain(*arguments[:4], mesh=mesh_of("expert"), implementation="xla", network=network)


def test_explain_says_levels_ways_and_bytes_of_both_networks():
    told = _explained(NetworkPlan(4, "gather", 2))
    assert told.call.levels is not None
    text = str(told)
    for part in (
        "8 ranks of expert, 2 hosts with 4 rank(s) each",
        "2 launch(es) on each host in a forward pass, each of up to 64 tokens per rank",
        "MiB received from other hosts per rank and forward pass",
        "network: tokens that arrived",
    ):
        assert part in text
    assert told.network_bytes == 64 * (2 * 64 * 4 + 8 * 2)
    one_level = _explained(NetworkPlan(8))
    assert one_level.call.levels is None
    assert one_level.network_bytes == 0
    assert told.flops == one_level.flops
    assert told.residual_bytes["recompute"] == 2 * 64 * 64 * 4  # all tokens that were gathered


def _received(jaxpr: Any, across: ExpertGroup) -> int:
    """Bytes that a rank receives from ranks of other hosts in the collectives of a jaxpr, open loops counted once."""
    total = 0
    for equation in jaxpr.eqns:
        names = equation.params.get("axis_name")
        groups = equation.params.get("axis_index_groups")
        if (
            equation.primitive.name in ("all_gather", "all_gather_invariant", "all_to_all")
            and tuple(names) == (across.axis_names)
            and tuple(map(tuple, groups or ())) == across.parts
        ):
            out = equation.outvars[0].aval
            total += out.size * out.dtype.itemsize * (across.size - 1) // across.size
        times = equation.params.get("length", 1)  # of a scan
        total += times * sum(
            _received(inner, across) for value in equation.params.values() for inner in _jaxprs_in(value)
        )
    return total


def _jaxprs_in(value: Any) -> list[Any]:
    """The programs in a parameter of an equation."""
    if isinstance(value, list | tuple):
        return [inner for each in value for inner in _jaxprs_in(each)]
    inner = getattr(value, "jaxpr", value)
    return [inner] if hasattr(inner, "eqns") else []


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4])
def test_a_program_moves_the_bytes_between_hosts_that_explain_says(ranks_per_host):
    network = NetworkPlan(ranks_per_host, "gather", 2)
    told = _explained(network)
    arguments = make_inputs(0, tokens=512, hidden=64, intermediate=32, num_experts=16, top_k=2)
    call = functools.partial(jaxmoe.moe_layer, mesh=mesh_of("expert"), implementation="xla", network=network)
    jaxpr = jax.make_jaxpr(call)(*arguments[:4]).jaxpr
    assert told.call.levels is not None
    assert _received(jaxpr, told.call.levels.across) == told.network_bytes


def test_a_round_moves_the_bytes_between_hosts_that_explain_says():
    network = NetworkPlan(2, "send", 1, 16)
    told = _explained(network)
    assert told.call.levels is not None
    hosts, plan, shape = told.call.levels.hosts, told.call.levels.plan, told.call.shape
    arguments = make_inputs(0, tokens=512, hidden=64, intermediate=32, num_experts=16, top_k=2)
    call = functools.partial(jaxmoe.moe_layer, mesh=mesh_of("expert"), implementation="xla", network=network)
    moved = _received(jax.make_jaxpr(call)(*arguments[:4]).jaxpr, told.call.levels.across)
    # Ahead of the loop the tokens of two rounds, behind it the answers of two, and in it both of one.
    assert moved == 3 * cost.network_bytes(shape, hosts, 16)
    assert told.network_bytes == cost.launches(shape, hosts, plan) * cost.network_bytes(shape, hosts, 16)
    assert told.network_memory_bytes["network: sums"] == shape.tokens * shape.hidden * 4


@pytest.mark.parametrize("implementation", ["megakernel", "xla"])
def test_arrays_of_the_network_are_told_apart_from_the_memory_of_a_launch(implementation):
    arguments = make_inputs(0, tokens=512, hidden=64, intermediate=32, num_experts=16, top_k=2)
    options: Any = {"mesh": mesh_of("expert"), "implementation": implementation}
    one_level = jaxmoe.explain(*arguments[:4], **options)
    assert one_level.network_memory_bytes == {}
    assert "crosses the network" not in str(one_level)
    told = jaxmoe.explain(*arguments[:4], **options, network=NetworkPlan(2, "send", 1, 16))
    assert not any(name.startswith("network") for name in told.memory_bytes)
    # Of four hosts 16 tokens each, in float32: those of two rounds, answers that come and go; and sums of 64 tokens.
    arrived = 4 * 16 * 64 * 4
    assert sum(told.network_memory_bytes.values()) == 4 * arrived + 64 * 64 * 4
    assert sum(told.memory_bytes.values()) <= told.worst_case_bytes
    beside = "temporary memory beside it, of what crosses the network, per rank, whatever the routing: 0.1 MiB"
    assert beside in str(told)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("round_tokens", [50, 150, 512])
@pytest.mark.parametrize("shape", [MIXTRAL, DEEPSEEK, dataclasses.replace(DEEPSEEK, tokens=300)])
def test_launches_of_a_host_have_as_many_slots_together_as_its_ranks(shape, round_tokens, chunks):
    for plan in (NetworkPlan(1, "send", chunks, round_tokens), NetworkPlan(1, "gather", chunks)):
        launch = choice.shape_on_host(shape, Levels(ExpertGroup(), ExpertGroup(("host",), 8), plan))
        number = cost.launches(shape, 8, plan)
        assert number * launch.tokens * launch.used_slots == pytest.approx(shape.tokens)


def test_ranks_of_a_host_receive_no_more_where_rounds_have_room_for_more():
    arguments = make_inputs(0, tokens=2048, hidden=64, intermediate=32, num_experts=64, top_k=2)
    options: Any = {"mesh": mesh_of("expert"), "implementation": "megakernel"}
    plans = (NetworkPlan(2, "gather", 1), *(NetworkPlan(2, "send", 1, round_tokens) for round_tokens in (64, 256)))
    bytes_ = [jaxmoe.explain(*arguments[:4], **options, network=plan).wire_bytes for plan in plans]
    assert bytes_ == pytest.approx([bytes_[0]] * 3, rel=0.01)


def test_a_layer_without_tokens_has_launches_without_slots():
    plan = choice.complete(NetworkPlan(way="send"), dataclasses.replace(DEEPSEEK, tokens=0), 8)
    for each in (plan, NetworkPlan(8, "gather", 1)):
        levels_ = Levels(ExpertGroup(), ExpertGroup(("host",), 8), each)
        assert choice.shape_on_host(dataclasses.replace(DEEPSEEK, tokens=0), levels_).used_slots == 0


def test_symbols_of_explicit_axes_take_levels_too():
    mesh = mesh_of("expert", kind=AxisType.Explicit)
    arguments = make_inputs(0, tokens=64, hidden=16, intermediate=16, num_experts=16, top_k=2)
    told = jaxmoe.explain(*arguments[:4], mesh=mesh, implementation="xla", network=NetworkPlan(2))
    assert told.call.levels is not None
    assert told.call.levels.hosts == 4


def test_the_document_on_scaling_holds_what_the_command_prints():
    assert scaling.table() in (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()


def test_more_hosts_need_more_of_the_network_and_sending_never_more_than_gathering_by_a_round():
    rows = list(scaling.rows())
    for row in rows:
        if row.hosts > 1:
            assert row.plan is not None
            assert row.send_bytes <= (1 + 1 / choice.ROUNDS) * row.gather_bytes
            cheaper = "send" if row.send_bytes < 0.8 * row.gather_bytes else "gather"
            # Chosen before a routing is known, for uniform routing.
            assert row.limited or row.plan.way == cheaper
    by_model = {
        (row.model, row.limited): [r for r in rows if (r.model, r.limited) == (row.model, row.limited)] for row in rows
    }
    for of_model in by_model.values():
        assert [row.network_seconds for row in of_model] == sorted(row.network_seconds for row in of_model)


@pytest.mark.parametrize("residuals", ["recompute", "save"])
def test_in_a_scan_what_was_gathered_is_not_gathered_again_for_the_backward_pass(residuals):
    arguments = make_inputs(0)
    run = layer("hosts 8 x 1", implementation="xla", residuals=residuals, network=NetworkPlan(way="gather"))
    stacked = jax.tree.map(lambda array: jnp.stack([array] * 3), arguments.experts)

    def loss(x: jax.Array, experts: jaxmoe.Experts) -> jax.Array:
        step = lambda x, own: (x + run(arguments._replace(x=x, experts=own)), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, experts)[0] ** 2)

    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(arguments.x, stacked).compile().as_text() or ""
    # Tokens, weights and ids in the forward pass, gradients of outputs in the backward pass.
    assert program.count(" all-gather(") == 4
