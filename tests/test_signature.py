"""Signatures and the sharding plans that follow from them, by examples worked out by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxops._core import partition, signature

CONV = "time (heads depth), heads taps -> time (heads depth)"
CONV_NCT = "(heads depth) time, heads taps, (heads depth) -> (heads depth) time"
BACKWARD = "time (heads depth), heads taps, time (heads depth) -> time (heads depth), heads taps"
REPLICATED = ("time", "taps")


def call_of(text, shapes, *, known=None, summed=None, summed_outputs=()):
    parsed = signature.parse(text)
    rank = len(shapes[0]) - len(parsed.operands[0])
    summed = (False,) * rank if summed is None else summed
    return signature.apply(parsed, shapes, known or {}, summed, summed_outputs)


def mesh_of(**axes):
    count = int(np.prod(list(axes.values())))
    return Mesh(np.array(jax.devices("cpu")[:count]).reshape(*axes.values()), tuple(axes))


# --- parse ---------------------------------------------------------------------------------------


def test_parse():
    parsed = signature.parse(CONV)
    rows = (("time",), ("heads", "depth"))
    assert parsed.operands == (rows, (("heads",), ("taps",)))
    assert parsed.outputs == (rows,)
    assert parsed.factors() == ["time", "heads", "depth", "taps"]


def test_parse_several_outputs():
    parsed = signature.parse("a (b c d), e -> a, (c e) b, e")
    assert parsed.operands == ((("a",), ("b", "c", "d")), (("e",),))
    assert parsed.outputs == ((("a",),), (("c", "e"), ("b",)), (("e",),))


# --- apply ---------------------------------------------------------------------------------------


def test_sizes_and_output_shapes():
    call = call_of(CONV, [(2, 7, 12), (1, 3, 5)])
    assert call.sizes == {"batch0": 2, "time": 7, "heads": 3, "depth": 4, "taps": 5}
    assert call.signature.operands == (
        (("batch0",), ("time",), ("heads", "depth")),
        ((), ("heads",), ("taps",)),
    )
    assert [call.shape(t) for t in call.signature.operands] == [(2, 7, 12), (1, 3, 5)]
    assert [call.shape(t) for t in call.signature.outputs] == [(2, 7, 12)]
    assert call.reduced(call.signature.outputs[0]) == {"taps"}


def test_batch_dimensions_broadcast():
    call = call_of(CONV, [(1, 4, 7, 6), (5, 1, 2, 3)])
    assert call.signature.operands == (
        ((), ("batch1",), ("time",), ("heads", "depth")),
        (("batch0",), (), ("heads",), ("taps",)),
    )
    assert call.shape(call.signature.outputs[0]) == (5, 4, 7, 6)


def test_summed_batch_dimensions_are_reduced():
    call = call_of(
        BACKWARD,
        [(5, 4, 7, 6), (5, 1, 2, 3), (5, 4, 7, 6)],
        summed=(False, True),
        summed_outputs=(1,),
    )
    dx, dweight = call.signature.outputs
    assert call.shape(dx) == (5, 4, 7, 6)
    assert call.shape(dweight) == (5, 1, 2, 3)
    assert call.reduced(dweight) == {"batch1", "time", "depth"}
    assert call.reduced(dx) == {"taps"}


def test_known_sizes():
    text = "time (heads depth), time (heads depth) -> heads taps"
    call = call_of(text, [(7, 12), (7, 12)], known={"heads": 3, "taps": 9})
    assert call.sizes == {"time": 7, "heads": 3, "depth": 4, "taps": 9}
    assert call.shape(call.signature.outputs[0]) == (3, 9)


@pytest.mark.parametrize("channels", [0, 6])
def test_sizes_of_zero(channels):
    call = call_of(CONV, [(0, 0, channels), (1, 3, 2)])
    assert call.shape(call.signature.outputs[0]) == (0, 0, channels)


# --- the Shardy rule -----------------------------------------------------------------------------


def test_rule_of_whole_heads():
    call = call_of(CONV, [(4, 7, 48), (1, 16, 3)])
    text, sizes = partition.shardy_rule(call, 8, REPLICATED)
    assert text == ("batch0 time (heads depth), one1 heads taps -> batch0 time (heads depth)")
    assert sizes == {
        "need_replication_factors": ("time", "taps"),
        "reduction_factors": (),
        "depth": 3,
    }


def test_rule_of_heads_that_devices_split():
    """Four heads on eight devices: Shardy would split the factor by half a mesh axis."""
    call = call_of(CONV, [(4, 7, 48), (1, 4, 3)])
    text, sizes = partition.shardy_rule(call, 8, REPLICATED)
    assert text == "batch0 time heads_depth, one1 heads taps -> batch0 time heads_depth"
    assert sizes["need_replication_factors"] == ("time", "taps")


def test_rule_of_one_head():
    call = call_of(CONV, [(4, 7, 48), (1, 1, 3)])
    text, _ = partition.shardy_rule(call, 8, REPLICATED)
    assert text == "batch0 time heads_depth, one1 one2 taps -> batch0 time heads_depth"


def test_rule_of_a_sum():
    call = call_of(
        BACKWARD,
        [(4, 7, 48), (1, 16, 3), (4, 7, 48)],
        summed=(True,),
        summed_outputs=(1,),
    )
    text, sizes = partition.shardy_rule(call, 8, REPLICATED)
    rows = "batch0 time (heads depth)"
    assert text == f"{rows}, one1 heads taps, {rows} -> {rows}, one2 heads taps"
    assert sizes["reduction_factors"] == ()  # every factor is in one of the two results


# --- plans ---------------------------------------------------------------------------------------


def plan_of(call, mesh, *specs):
    terms = (*call.signature.operands, *call.signature.outputs)
    return partition.make_plan(call, mesh, list(zip(terms, specs, strict=False)), REPLICATED)


def shardings(plan):
    terms = (*plan.call.signature.operands, *plan.call.signature.outputs)
    return [plan.sharding(t).spec for t in terms]


def test_batch_and_heads():
    call = call_of(CONV, [(8, 7, 48), (1, 16, 3)])
    plan = plan_of(call, mesh_of(n=2, c=4), P("n", None, "c"), P())
    assert plan.axes == {"batch0": ("n",), "heads": ("c",)}
    assert plan.refined is None
    assert shardings(plan) == [P("n", None, "c"), P(None, "c", None), P("n", None, "c")]
    assert plan.local_sizes() == {"batch0": 4, "time": 7, "heads": 4, "depth": 3, "taps": 3}


def test_heads_times_depth():
    """Two axes over the channels, of which the first splits the heads to one each."""
    call = call_of(CONV, [(8, 7, 48), (1, 2, 3)])
    plan = plan_of(call, mesh_of(p=2, q=4), P(None, None, ("p", "q")))
    assert plan.axes == {"heads": ("p",), "depth": ("q",)}
    assert plan.local_sizes() == {"batch0": 8, "time": 7, "heads": 1, "depth": 6, "taps": 3}
    assert shardings(plan)[:2] == [P(None, None, ("p", "q")), P(None, "p", None)]


def test_four_heads_on_eight_devices():
    """Half a head each: computed as six heads of one channel, with the weight's rows repeated."""
    call = call_of(CONV, [(8, 7, 48), (1, 4, 3)])
    plan = plan_of(call, mesh_of(c=8), P(None, None, "c"), P())
    assert plan.refined == ("heads", "depth")
    assert plan.refined_axes == ("c",)
    assert plan.axes == {}
    assert plan.local_sizes() == {"batch0": 8, "time": 7, "heads": 6, "depth": 1, "taps": 3}
    assert shardings(plan) == [P(None, None, "c"), P(None, None, None), P(None, None, "c")]


def test_replicated_factors_are_not_sharded():
    call = call_of(CONV, [(8, 8, 48), (1, 4, 8)])
    plan = plan_of(call, mesh_of(t=8), P(None, "t", None), P(None, None, "t"))
    assert plan.axes == {}
    assert set(shardings(plan)) == {P(None, None, None)}


def test_the_first_array_decides():
    call = call_of(CONV, [(8, 7, 48), (1, 8, 3)])
    plan = plan_of(call, mesh_of(a=8), P("a"), P(None, "a", None))
    assert plan.axes == {"batch0": ("a",)}
    assert shardings(plan)[1] == P(None, None, None)


def test_a_size_that_devices_do_not_divide_stays_whole():
    call = call_of(CONV, [(6, 7, 48), (1, 16, 3)])
    plan = plan_of(call, mesh_of(n=8), P("n"))
    assert plan.axes == {}


# --- what one device computes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shapes", "spec"),
    [
        (CONV, [(2, 3, 16), (1, 4, 2)], P(None, None, "c")),
        (CONV_NCT, [(2, 16, 3), (1, 4, 2), (1, 16)], P(None, "c", None)),
    ],
)
def test_half_heads_get_the_right_rows(text, shapes, spec):
    """Four heads of four channels on eight devices: device d has channels 2d, 2d+1 of head d//2."""
    call = call_of(text, shapes)
    mesh = mesh_of(c=8)
    plan = plan_of(call, mesh, spec)
    seen = []

    def compute(*shards, sizes):
        seen.append(sizes)
        weight = shards[1]
        assert weight.shape == (1, 2, 2)
        # The first tap of each channel's filter, where the channel is in the result.
        rows = weight[:, :, :1]
        rows = rows.swapaxes(1, 2) if text == CONV else rows
        return [jax.numpy.broadcast_to(rows, shards[0].shape)], None

    run = jax.shard_map(
        partition.run_locally(plan, compute),
        mesh=mesh,
        in_specs=tuple(plan.sharding(t).spec for t in call.signature.operands),
        out_specs=[plan.sharding(t).spec for t in call.signature.outputs],
        check_vma=False,
    )
    weight = np.arange(8.0).reshape(1, 4, 2)
    (result,) = jax.jit(run)(np.zeros(shapes[0]), weight, *map(np.zeros, shapes[2:]))
    by_channel = np.asarray(result)[0, 0] if text == CONV else np.asarray(result)[0, :, 0]
    np.testing.assert_array_equal(by_channel, np.repeat([0.0, 2.0, 4.0, 6.0], 4))
    assert all(s["heads"] == 2 and s["depth"] == 1 for s in seen)


def test_half_heads_are_summed_from_their_channels():
    text = "time (heads depth), time (heads depth) -> heads taps"
    call = call_of(text, [(3, 16), (3, 16)], known={"heads": 4, "taps": 1})
    mesh = mesh_of(c=8)
    plan = plan_of(call, mesh, P(None, "c"))

    def compute(x, g, *, sizes):
        assert sizes["heads"] == 2
        return [(x * g).sum(0)[:, None]], None

    run = jax.shard_map(
        partition.run_locally(plan, compute),
        mesh=mesh,
        in_specs=(P(None, "c"), P(None, "c")),
        out_specs=[P()],
        check_vma=False,
    )
    x = np.arange(48.0).reshape(3, 16)
    (result,) = jax.jit(run)(x, np.ones((3, 16)))
    np.testing.assert_array_equal(result, x.sum(0).reshape(4, 4).sum(1)[:, None])
