"""Bytes of a forward pass: the formulas against counts by hand and against counts slot by slot."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmoe
from jaxmoe.bench import traffic
from jaxmoe.bench.traffic import GatherLinks, GatherMemory, MegakernelLinks, MegakernelMemory, Routing
from jaxmoe.formats import BF16, Format
from jaxmoe.plan import KernelPlan, Shape
from jaxmoe.precision import ROWS
from jaxmoe.testing import ROUTING_KINDS, make_ids
from tests.layer_calls import mesh_of

# Two ranks of two tokens. Rank 0 owns the experts 0 and 1, rank 1 owns 2 and 3, and nobody asks for expert 3.
SMALL = Shape(tokens=2, hidden=10, intermediate=7, num_experts=4, top_k=2, ranks=2)
IDS = np.array([[0, 2], [1, -1], [2, 2], [1, 2]], np.int32)
TOKEN, H, EXPERT = 10 * 2, 7 * 2, 3 * 10 * 7 * 2
IN_8_BITS = dataclasses.replace(BF16, tokens=ROWS, h=ROWS, weights=Format(jnp.float8_e4m3fn, 128, 128))


def test_the_memory_terms_of_the_megakernel_equal_a_count_by_hand():
    routing = Routing.of(IDS, ranks=2, num_experts=4)
    # Rank 0 has the rows of slots 0:0, 1:0 and 3:0, rank 1 those of 0:1, 2:0, 2:1 and 3:1. The tokens of rank 0 use
    # three slots, those of rank 1 four.
    assert MegakernelMemory.of_rank(routing, SMALL, 0, keep_tokens=False) == MegakernelMemory(
        weights=2 * EXPERT,
        weights_decoded=0,
        tokens_staged=2 * 2 * TOKEN,
        tokens_pulled=3 * TOKEN,
        tokens_kept=0,
        rows_written=3 * TOKEN,
        rows_read=3 * TOKEN,
        h_written=3 * H,
        hidden_read=3 * H,
        answers_written=3 * TOKEN,
        answers_read=3 * TOKEN,
        sums_written=0,
        sums_read=0,
        y_written=2 * TOKEN,
        routing_read=2 * 2 * 4 * 4,
        lists_written=3 * 8,
        lists_read=3 * 8,
    )
    assert MegakernelMemory.of_rank(routing, SMALL, 1, keep_tokens=False) == MegakernelMemory(
        weights=1 * EXPERT,  # expert 3 has no rows
        weights_decoded=0,
        tokens_staged=2 * 2 * TOKEN,
        tokens_pulled=4 * TOKEN,
        tokens_kept=0,
        rows_written=4 * TOKEN,
        rows_read=4 * TOKEN,
        h_written=4 * H,
        hidden_read=4 * H,
        answers_written=4 * TOKEN,
        answers_read=4 * TOKEN,
        sums_written=0,
        sums_read=0,
        y_written=2 * TOKEN,
        routing_read=2 * 2 * 4 * 4,
        lists_written=4 * 8,
        lists_read=4 * 8,
    )


def test_the_link_terms_of_the_megakernel_equal_a_count_by_hand():
    routing = Routing.of(IDS, ranks=2, num_experts=4)
    # Over the link go slot 0:1, of rank 0, and slot 3:0, of rank 1.
    both = MegakernelLinks(rows_received=TOKEN, answers_received=TOKEN, lists_received=4)
    assert [MegakernelLinks.of_rank(routing, SMALL, rank, keep_tokens=False) for rank in (0, 1)] == [both, both]


def test_the_terms_of_a_layer_that_gathers_all_tokens_equal_a_count_by_hand():
    routing = Routing.of(IDS, ranks=2, num_experts=4)
    tokens = 2 * TOKEN
    memory = GatherMemory(weights=EXPERT, tokens_gathered=3 * tokens, sums_sent=2 * tokens, y_written=tokens)
    assert GatherMemory.of_rank(routing, SMALL, 1) == memory
    links = GatherLinks(tokens_received=tokens, sums_received=tokens, routing_received=2 * 2 * 8)
    assert GatherLinks.of_rank(routing, SMALL, 1) == links


def test_a_layer_that_gathers_all_tokens_reads_those_of_its_rank_before_it_rounds_them():
    routing = Routing.of(IDS, ranks=2, num_experts=4)
    gathered = GatherMemory.of_rank(routing, dataclasses.replace(SMALL, formats=IN_8_BITS), 1)
    assert gathered.tokens_gathered == 2 * 10 * 2 + 2 * 2 * (10 + 4)
    assert (gathered.sums_sent, gathered.y_written) == (2 * 2 * 10 * 2, 2 * 10 * 2)
    assert gathered.weights == 3 * 10 * 7 + 3 * 4


def counted_slot_by_slot(ids: np.ndarray, shape: Shape, keep_tokens: bool) -> list[dict[str, Any]]:
    """What every rank moves for its tokens and rows, in a walk over the slots as the kernel sees them."""
    kept = set()
    token, answer, h = shape.token_bytes, shape.answer_bytes, shape.h_bytes
    ranks: list[dict[str, Any]] = [{"weights": set()} for _ in range(shape.ranks)]

    def add(rank: int, name: str, number: int) -> None:
        ranks[rank][name] = ranks[rank].get(name, 0) + number

    for number, chosen in enumerate(ids):
        home = number // shape.tokens
        if shape.ranks > 1 or token != answer:
            add(home, "tokens_staged", answer + token)
        add(home, "y_written", answer)
        for expert in chosen:
            add(home, "routing_read", 3 * 4 + 4)
            if expert < 0:
                continue
            owner = int(expert) // shape.local_experts
            ranks[owner]["weights"].add(int(expert))
            again = keep_tokens and (owner, number) in kept
            kept.add((owner, number))
            if keep_tokens and owner != home:
                add(owner, "tokens_kept", token)
            if owner == home or not again:
                add(home, "tokens_pulled", token)
            add(owner, "rows_written", token)
            add(owner, "rows_read", token)
            add(owner, "h_written", h)
            add(owner, "hidden_read", h)
            add(home, "answers_written", answer)
            add(home, "answers_read", answer)
            add(owner, "lists_written", 4 + 4)
            add(owner, "lists_read", 4 + 4)
            if owner != home:
                add(owner, "rows_received", 0 if again else token)
                add(owner, "lists_received", 4)
                add(home, "answers_received", answer)
    for counts in ranks:
        decoded = 2 * shape.wide.expert_bytes if shape.formats.decodes else 0
        counts["weights_decoded"] = len(counts["weights"]) * decoded
        counts["weights"] = len(counts["weights"]) * shape.expert_bytes
    return ranks


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.sampled_from([1, 2, 4, 8]),
    local_experts=st.integers(1, 4),
    tokens=st.integers(1, 12),
    top_k=st.integers(1, 4),
    kind=st.sampled_from(ROUTING_KINDS),
    keep_tokens=st.booleans(),
    formats=st.sampled_from([BF16, IN_8_BITS, IN_8_BITS.decoded]),
)
def test_the_terms_equal_a_count_slot_by_slot_for_every_routing(
    seed, ranks, local_experts, tokens, top_k, kind, keep_tokens, formats
):
    num_experts = ranks * local_experts
    top_k = min(top_k, num_experts)
    shape = Shape(tokens, 6, 5, num_experts, top_k, ranks=ranks, formats=formats)
    ids = make_ids(np.random.default_rng(seed), tokens * ranks, num_experts, top_k, kind)
    routing = Routing.of(ids, ranks, num_experts)
    for rank, counts in enumerate(counted_slot_by_slot(ids, shape, keep_tokens)):
        memory, links = (
            terms.of_rank(routing, shape, rank, keep_tokens).items() for terms in (MegakernelMemory, MegakernelLinks)
        )
        assert {name: size for name, size in (memory | links).items() if size} == {
            name: size for name, size in counts.items() if size
        }


def test_ids_outside_of_the_experts_are_no_rows():
    assert Routing.of(np.array([[-1, 4], [7, 0]]), ranks=1, num_experts=4).slots.tolist() == [[1, 0, 0, 0]]


def test_an_expert_without_rows_reads_no_weights():
    ids = make_ids(np.random.default_rng(0), 64, 8, 2, "one-hot")
    shape = Shape(tokens=16, hidden=6, intermediate=5, num_experts=8, top_k=2, ranks=4)
    weights = [traffic.weight_bytes(Routing.of(ids, 4, 8), shape, rank) for rank in range(4)]
    assert weights == [3 * 6 * 5 * 2, 0, 0, 0]


def test_one_rank_alone_stages_nothing_and_receives_nothing():
    shape = Shape(tokens=4, hidden=10, intermediate=7, num_experts=4, top_k=2)
    for count in (functools.partial(traffic.of_megakernel, keep_tokens=True), traffic.of_gathering):
        moved = count([Routing.of(IDS, ranks=1, num_experts=4)], shape)
        assert moved.links.terms.total == 0
        assert not {"tokens_staged", "tokens_gathered", "sums_sent"} & {
            name for name, size in moved.memory.terms.items().items() if size
        }


def test_one_rank_alone_stages_tokens_that_it_rounds():
    shape = Shape(tokens=4, hidden=10, intermediate=7, num_experts=4, top_k=2, formats=IN_8_BITS)
    moved = traffic.of_megakernel([Routing.of(IDS, ranks=1, num_experts=4)], shape, keep_tokens=False)
    assert moved.memory.terms.items()["tokens_staged"] == 4 * (10 * 2 + 10 + 4)
    assert moved.links.terms.total == 0


def test_the_busiest_rank_is_that_of_the_largest_mean_over_the_routings():
    shape = Shape(tokens=1, hidden=10, intermediate=7, num_experts=2, top_k=1, ranks=2)
    # Both tokens to rank 1, then both to rank 0, then both to rank 1 again: rank 1 has 4 / 3 rows in the mean.
    routings = [Routing.of(np.array([[expert], [expert]]), 2, 2) for expert in (1, 0, 1)]
    moved = traffic.of_megakernel(routings, shape, keep_tokens=False)
    assert moved.memory.rank == 1
    assert moved.memory.terms.items()["rows_read"] == pytest.approx(4 / 3 * 10 * 2)
    assert moved.memory.terms.items()["weights"] == pytest.approx(2 / 3 * 3 * 10 * 7 * 2)
    # One row comes in whichever rank has the rows, and one answer whichever has none.
    assert moved.links.terms.total == pytest.approx(20 + 4 * 2 / 3)


def test_sums_at_experts_bring_one_row_back_from_each_rank_that_a_token_wants():
    # Of the first token both experts are rank 1's; of the second one, at rank 1, there is one on each.
    shape = Shape(tokens=1, hidden=10, intermediate=7, num_experts=4, top_k=2, ranks=2)
    routing = Routing.of(np.array([[2, 3], [1, 2]]), 2, 4)
    row = 10 * 2
    links = lambda sums: [MegakernelLinks.of_rank(routing, shape, rank, False, sums) for rank in range(2)]  # noqa: E731
    assert [terms.answers_received for terms in links(False)] == [2 * row, row]
    assert [terms.answers_received for terms in links(True)] == [row, row]
    assert [terms.lists_received for terms in links(True)] == [4 * (2 * 1 + 1), 4 * (2 * 2 + 1)]
    memory = [MegakernelMemory.of_rank(routing, shape, rank, False, sum_at_experts=True) for rank in range(2)]
    assert [terms.answers_written for terms in memory] == [1 * row, 3 * row]
    assert [terms.sums_read for terms in memory] == [1 * row, 2 * row]
    moved = traffic.of_megakernel([routing], shape, keep_tokens=False, sum_at_experts=True)
    assert moved.links.terms.total == links(True)[1].total


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("implementation", ["megakernel", "xla"])
def test_a_balanced_routing_moves_the_bytes_that_explain_says(implementation, precision):
    ranks, tokens, top_k, num_experts = 8, 16, 4, 16
    slots = ranks * tokens * top_k
    ids = (np.arange(slots, dtype=np.int32) % num_experts).reshape(-1, top_k)
    x = jax.ShapeDtypeStruct((ranks * tokens, 128), jnp.bfloat16)
    experts = jax.eval_shape(lambda: jaxmoe.Experts.init(jax.random.key(0), num_experts, 128, 256, dtype=jnp.bfloat16))
    weights = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    options: Any = {"mesh": mesh_of("expert"), "implementation": implementation, "precision": precision}
    told = jaxmoe.explain(x, ids, weights, experts, **options)
    routings = [Routing.of(ids, ranks, num_experts)]
    if isinstance(told.call.plan, KernelPlan):
        moved = traffic.of_megakernel(routings, told.call.shape, told.call.plan.keep_tokens)
    else:
        moved = traffic.of_gathering(routings, told.call.shape)
    assert moved.links.terms.total == told.wire_bytes
    assert moved.complete == (implementation == "megakernel")
