"""`python -m jaxops bench`: its counts and derived figures, its clocks, and its refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import re
import sys
import types
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxops import _cli
from jaxops._bench import (
    ceilings,
    clock,
    contenders,
    families,
    figures,
    overview,
    registry,
    report,
    results,
    runner,
    spec,
)
from jaxops._bench.results import Document, Outcome, ResultsError, Row
from jaxops._cli import bench
from jaxops._core import native
from jaxops.testing import kernels

ROOT = pathlib.Path(__file__).parents[1]
CEILINGS = {
    "copy": 2e9,
    "fma float32": 1e10,
    "fma float64": 5e9,
    "special float32": 1e8,
    "matmul float32": 1e12,
    "dispatch": 1e-5,
}


def row(case="a", ours=None, peers=None, **changed):
    """A row of 40 kB and 100 kFLOP, which by CEILINGS takes at least 20 µs."""
    outcomes = {"jaxops": ours or timed(25.0), **(peers or {})}
    fields = {
        "operator": "twice",
        "case": case,
        "group": "typical",
        "target": True,
        "near_limit": True,
        "direction": "forward",
        "bytes": 40_000,
        "flops": 100_000,
        "unit": "fma float32",
        "special": 0,
        "outcomes": outcomes,
    }
    return Row(**{**fields, **changed})


def timed(us, spread=0.0, **others):
    return Outcome(us=us, spread=spread, rounds=5, **others)


def document(*rows, platform="cuda", **changed):
    fields = {
        "command": "python -m jaxops bench",
        "date": "2026-11-21T16:00:00+00:00",
        "platform": platform,
        "device": "A device",
        "threads": 2,
        "versions": {"jax": "0.10.2", "jaxops": "0.1.0"},
        "ceilings": CEILINGS,
        "absent": {},
        "shapes": {"twice": "N"},
        "unfinished": 0,
    }
    return Document(**{**fields, **changed}, rows=list(rows))


# --- cases ---------------------------------------------------------------------------------------


def test_a_line_makes_a_case_of_every_combination():
    made = spec.cases("odd", (2, 3), ["float32", "bfloat16"], layout=["A", "B"], stride=2)
    assert [c.name for c in made] == [
        "(2,3) f32 A stride 2",
        "(2,3) f32 B stride 2",
        "(2,3) bf16 A stride 2",
        "(2,3) bf16 B stride 2",
    ]
    with pytest.raises(ValueError, match="group must be one of"):
        spec.cases("huge", (1,), "float32")


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("odd*bf16", True),
        ("(2,3)", True),
        (spec.TARGET_TAG, True),
        ("large", False),
        ("f64", False),
    ],
)
def test_patterns(pattern, matches):
    (case,) = spec.cases("odd", (2, 3), "bfloat16", target=True)
    assert case.matches(pattern) == matches
    assert not dataclasses.replace(case, target=False).matches("PERFORMANCE")


@pytest.mark.parametrize("operator", registry.operators())
def test_operators_have_their_cases(operator):
    benchmark = registry.load(operator)
    assert benchmark.operator == operator
    kinds = {case.group for case in benchmark.cases}
    assert kinds == set(spec.GROUPS)
    targets = {(c.shape, c.dtype) for c in benchmark.cases if c.target}
    others = {(c.shape, c.dtype) for c in benchmark.cases} - targets
    assert len(others) >= max(1, 2 * len(targets))
    work = [benchmark.cost(c, benchmark.directions[0]).bytes for c in _scaling(benchmark)]
    assert work == sorted(work)
    assert work[-1] >= 1000 * work[0]


def _scaling(benchmark):
    return [case for case in benchmark.cases if case.group == "scaling"]


def test_costs_of_lightweight_conv():
    benchmark = registry.load("lightweight_conv")
    (case,) = (c for c in benchmark.cases if c.name == "(2,64,65,8,5) f32 NCT causal")
    forward, backward, both = (benchmark.cost(case, d) for d in benchmark.directions)
    # x and y are 2 * 64 * 65 = 8320 entries each, the filter 8 * 5 = 40.
    assert forward.bytes == 4 * (2 * 8320 + 40)
    assert forward.flops == 2 * 8320 * 5
    assert backward.bytes == 4 * (3 * 8320 + 2 * 40)
    assert backward.flops == 2 * forward.flops
    assert both.bytes == 4 * (4 * 8320 + 2 * 40)
    assert both.flops == 3 * forward.flops
    # An entry of y sums 5 taps; an entry of the filter's gradient 2 * 65 steps of 64 / 8 channels.
    assert [benchmark.terms(case, d) for d in benchmark.directions] == [5, 1040, 1040]


def test_costs_of_concatenate_and_split():
    joined, cut = registry.load("concatenate"), registry.load("split")
    by_name = {case.name: case for case in joined.cases}
    padded = by_name["(64,512,512,3) f16 1x3 axis 3 padded 8"]
    forward, backward = (joined.cost(padded, d) for d in joined.directions)
    # The forward pass reads three of the eight channels, the gradient writes three.
    pixels = 64 * 512 * 512
    assert forward.bytes == 2 * (3 + 8) * pixels
    assert backward.bytes == 2 * (3 + 3) * pixels
    assert padded not in cut.cases
    odd = by_name["(16,128,128,128) bf16 63+65 axis 3"]
    assert {joined.cost(odd, d).bytes for d in joined.directions} == {2 * 2 * 16 * 128**3}
    assert {cut.cost(odd, d).bytes for d in cut.directions} == {2 * 2 * 16 * 128**3}


def test_integers_have_no_gradient_and_no_rounding():
    joined = registry.load("concatenate")
    (case,) = spec.cases("odd", (2, 4), "uint8", parts="3+1", axis=1)
    assert [d.name for d in joined.directions_of(case)] == ["forward"]
    assert contenders.tolerance("uint8", 9) == 0


# --- figures -------------------------------------------------------------------------------------


def test_limit_is_the_longest_of_what_must_be_done():
    assert figures.limit(document(), row()) == (pytest.approx(20.0), "copy")
    computing = row(flops=1e6)
    assert figures.limit(document(), computing) == (pytest.approx(100.0), "fma float32")
    special = row(special=3e3)
    assert figures.limit(document(), special) == (pytest.approx(30.0), "special float32")


def test_speeds():
    measured = row(ours=timed(25.0))
    assert figures.gigabytes_per_second(measured, measured.ours) == pytest.approx(1.6)
    assert figures.teraflops(measured, measured.ours) == pytest.approx(0.004)


def test_speedups_and_their_mean():
    rows = [
        row("a", timed(10.0), {"XLA": timed(20.0), "torch": timed(5.0, torch=True)}),
        row("b", timed(10.0), {"XLA": timed(80.0), "torch": Outcome(error="wrong", torch=True)}),
        row("c", timed(10.0), {"XLA": timed(990.0)}, group="scaling"),
        row("d", Outcome(error="wrong"), {"XLA": timed(990.0)}),
    ]
    assert figures.speedups(rows, "XLA") == [2.0, 8.0]
    assert figures.geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert figures.speedups(rows, "torch") == [0.5]
    assert figures.best_peer(rows[0], torch=True) == "torch"
    assert figures.best_peer(rows[1], torch=True) is None
    assert figures.peers(rows) == ["XLA", "torch"]


@pytest.mark.parametrize(
    ("measured", "where", "expected"),
    [
        # The limit is 20 µs; it binds above 40 µs.
        (row(ours=timed(39.0)), "cuda", []),
        (row(ours=timed(41.0)), "cuda", ["2.05 x the limit (copy)"]),
        (row(ours=timed(41.0)), "cpu", []),
        (row(ours=timed(41.0), near_limit=False), "cuda", []),
        (row(ours=timed(45.0), bytes=80_000), "cuda", []),  # 1.125 times 40 µs
        (row(ours=timed(20.0), peers={"XLA": timed(16.0)}), "cuda", ["1.25 x the time of XLA"]),
        (row(ours=timed(20.0, 2.0), peers={"XLA": timed(16.0, 2.5)}), "cuda", []),
        (row(ours=timed(20.0), peers={"t": timed(16.0, torch=True)}), "cpu", []),
        (
            row(ours=timed(9.0), peers={"t": timed(6.0, torch=True)}),
            "cuda",
            ["1.50 x the time of t"],
        ),
        (row(ours=Outcome(error="lost")), "cpu", ["not timed: lost"]),
    ],
)
def test_targets(measured, where, expected):
    assert figures.misses(document(platform=where), measured) == expected


def test_compare_counts_what_is_beyond_both_spreads():
    old = document(
        row("slower", timed(10.0, 0.5)),
        row("faster", timed(10.0, 0.5)),
        row("noise", timed(10.0, 0.5)),
        row("gone", timed(10.0)),
        row("was lost", Outcome(error="lost")),
    )
    new = document(
        row("slower", timed(11.5, 0.9)),
        row("faster", timed(8.5, 0.9)),
        row("noise", timed(11.3, 0.9)),
        row("was lost", timed(10.0)),
        row("new", timed(10.0)),
    )
    changes = figures.compare(old, new)
    assert [(c.row.case, c.verdict) for c in changes] == [
        ("slower", "slower"),
        ("faster", "faster"),
        ("noise", "same"),
    ]
    assert changes[0].ratio == pytest.approx(1.15)
    *_, summary = report.comparison(old, new)
    assert "1 rows faster, 1 slower, 1 the same within the spread; 2 rows have no" in summary


# --- the clocks ----------------------------------------------------------------------------------


def test_busy_time_counts_overlaps_once_and_neighbours_not_at_all():
    ms = 1e6
    events = [
        (0, 1),
        (10 * ms, 12 * ms),
        (11 * ms, 13 * ms),
        (11 * ms, 12 * ms),
        (20 * ms, 21 * ms),
    ]
    assert clock.busy(events, (10 * ms, 13 * ms)) == pytest.approx(3 * ms)
    assert clock.busy(events, (10 * ms, 20 * ms)) == pytest.approx(4 * ms)
    with pytest.raises(clock.ProfileError, match="nothing that the device did"):
        clock.busy(events, (15 * ms, 16 * ms))
    with pytest.raises(clock.ProfileError, match="only 0 events"):
        clock.busy([], (15 * ms, 16 * ms))


def profile(*planes):
    """A fake `jax.profiler.ProfileData` of planes (name, {line: [(event, start, length)]})."""
    make = types.SimpleNamespace
    return make(
        planes=[
            make(
                name=name,
                lines=[
                    make(
                        name=line,
                        events=[
                            make(name=event, start_ns=start, duration_ns=duration)
                            for event, start, duration in events
                        ],
                    )
                    for line, events in lines.items()
                ],
            )
            for name, lines in planes
        ]
    )


def test_a_profile_is_read_by_its_streams_and_windows():
    windows, events = clock.read_profile(
        profile(
            ("/host:CPU", {"python": [("jaxops-bench-batch-1", 50, 9), ("other", 0, 99)]}),
            (
                "/device:GPU:0",
                {"Stream #7": [("b", 55, 2), ("a", 52, 1)], "XLA Ops": [("c", 52, 3)]},
            ),
        )
    )
    assert windows == {1: (50, 59)}
    assert events == [(52, 53), (55, 57)]


class Slept:
    """A contender whose calls note that they ran."""

    def __init__(self):
        self.ran = []

    def block(self, result):
        self.ran.append(result)


def test_a_profile_without_a_gpu_says_so():
    # The annotations are there; the device's events are not.
    contender = Slept()
    batches = [clock.Batch(contender, [lambda i=i: i]) for i in range(2)]
    readings = clock.device_seconds(batches)
    assert contender.ran == [0, 0, 1, 1]  # each once before it is timed
    assert len(readings) == 2
    for reading in readings:
        assert isinstance(reading, clock.ProfileError)
        assert "only 0 events" in str(reading)
    assert "does not show when" in str(clock._seconds([(0, 1)], None))
    assert clock._seconds([(0, 2)], (0, 5)) == 2e-9


def test_wall_clock_waits_for_each_call():
    contender = Slept()
    (seconds,) = clock.wall_seconds([clock.Batch(contender, [lambda: 1, lambda: 2])])
    assert contender.ran == [2, 1, 2]  # the first call is not timed
    assert 0 < seconds < 1


def test_ceilings_are_those_of_the_longest():
    assert ceilings.limit(CEILINGS, 2e9, 1e10, "fma float64", 0) == (2.0, "fma float64")


# --- values --------------------------------------------------------------------------------------


def test_error_and_tolerance_by_hand():
    # ||(3, 4) - (3, 4.5)|| / ||(3, 4)|| = 0.5 / 5
    assert contenders.error([jnp.array([3.0, 4.5])], [jnp.array([3.0, 4.0])]) == pytest.approx(0.1)
    assert math.isnan(contenders.error([jnp.array([math.nan])], [jnp.array([1.0])]))
    with pytest.raises(ValueError, match="results of shapes"):
        contenders.error([jnp.zeros(2)], [jnp.zeros(3)])
    eps = 2.0**-23
    assert contenders.tolerance("float32", 25) == pytest.approx(4 * eps + 4 * eps * 5)
    assert contenders.tolerance("bfloat16", 25) == pytest.approx(4 * 2.0**-7 + 4 * eps * 5)


@pytest.mark.parametrize("direction", spec.directions(0, 1), ids=lambda d: d.name)
def test_torch_agrees_with_jax(direction):
    pytest.importorskip("torch")
    g, x, w, v = (jax.random.normal(jax.random.key(i), (3, 4), jnp.float32) for i in range(4))

    def function(x, ws):
        return x * ws[0] + x * x * ws[1]

    inputs = (g, x, [w, v]) if direction.wrt else (x, [w, v])
    contender = contenders.TorchContender(function, direction)
    (call,) = contender.calls([inputs])
    for _ in range(2):  # a backward pass can be repeated
        got = contender.arrays(call())
    assert contenders.error(got, jax.tree.leaves(direction.of(function)(*inputs))) < 1e-6


@pytest.mark.parametrize("layout", ["NCT", "NTC"])
def test_exact_lightweight_conv_is_shift_and_add(layout):
    benchmark = registry.load("lightweight_conv")
    (case,) = spec.cases(
        "odd", (2, 6, 11, 3, 4), "float64", layout=layout, padding="causal", dilation=2
    )
    peer = next(p for p in benchmark.peers if p.name == "XLA shift-and-add")
    random = np.random.default_rng(0)
    x, cotangent = random.standard_normal((2, 2, *((6, 11) if layout == "NCT" else (11, 6))))
    weight = random.standard_normal((3, 4))
    direction = benchmark.directions[-1]
    functions = (benchmark.reference, peer.function)
    with jax.enable_x64(True):
        got, want = (jax.jit(direction.of(f(case)))(cotangent, x, weight) for f in functions)
        assert contenders.error(got, want) < 1e-15


# --- the runner ----------------------------------------------------------------------------------


def _twice(case):
    return lambda x: x + x


def _thrice(case):
    return lambda x: x * 3


def _fails(case):
    raise RuntimeError("does not compile [here]\nand more")


PEERS = (
    spec.Peer("XLA product", lambda case: lambda x: 2 * x),
    spec.Peer("wrong", _thrice),
    spec.Peer("broken", _fails),
    spec.Peer("declines", _twice, declines=lambda case, direction, platform: f"not on {platform}"),
    spec.Peer("slow to compile", _twice, costly=True),
)
TWICE = spec.Benchmark(
    operator="twice",
    shape="N",
    cases=[
        *spec.cases("small", (100,), "float32"),
        *spec.cases("typical", (50,), "float64", target=True),
        *(c for n in (8, 80) for c in spec.cases("scaling", (n,), "float32")),
    ],
    directions=spec.directions(0),
    arguments=lambda case, key: (spec.normal(key, case.shape, case.dtype),),
    function=_twice,
    reference=_twice,
    peers=PEERS,
    cost=lambda case, direction: spec.Cost(2 * case.shape[0], case.shape[0]),
    terms=lambda case, direction: 2,
)
MACHINE_EFFORT = runner.Effort(rounds=2, batch_seconds=1e-3, contender_seconds=1, rotated_bytes=1e3)


@pytest.fixture
def machine():
    return runner.Machine("cpu", jax.devices("cpu")[0], MACHINE_EFFORT, runner.Stopwatch())


def test_operators_may_have_peers_of_the_same_name():
    mine, other = (
        dataclasses.replace(TWICE, operator=name, peers=(spec.Peer("XLA", function),))
        for name, function in (("mine", _twice), ("other", _thrice))
    )
    asked = types.SimpleNamespace(peers=None, cases=["small"], without=None, quick=False)
    works, absent = bench._works([mine, other], asked, "cpu")
    assert [work.peers for work in works] == [mine.peers, other.peers]
    assert not absent


def test_rows(machine):
    said = []
    works = [runner.Work(TWICE, case, PEERS) for case in TWICE.cases]
    rows = list(runner.run(works, machine, said.append))
    names = ["forward", "backward", "value_and_grad"]
    assert [(r.case, r.direction) for r in rows] == [
        *((case, d) for case in ("(100) f32", "(50) f64") for d in names),
        ("(8) f32", "forward"),
        ("(80) f32", "forward"),
    ]
    assert len(said) == 2 * len(rows)
    for found in rows:
        for name in ("jaxops", "XLA product", "slow to compile"):
            outcome = found.outcomes[name]
            assert outcome.error is None
            assert outcome.us > 0
            assert (outcome.rounds, outcome.call_us) == (2, None)
            assert outcome.memory > 0
        errors = {name: o.error for name, o in found.outcomes.items() if o.us is None}
        assert errors == {
            "wrong": errors["wrong"],
            "broken": "RuntimeError: does not compile [here]",
            "declines": "not on cpu",
        }
        assert re.match("wrong values: relative error 0.5, allowed", errors["wrong"])
    # Two vectors of 100 float32, in and out.
    assert rows[0].ours.memory == 800


def test_rows_of_a_gpu(machine, monkeypatch):
    # The CPU takes the GPU's place, under a clock that works there: all but the profile.
    gpu = dataclasses.replace(machine, platform="cuda")
    monkeypatch.setattr(runner, "device_seconds", clock.wall_seconds)
    (found,) = runner.run([runner.Work(TWICE, TWICE.cases[-1], PEERS[:2])], gpu, print)
    assert found.ours.call_us > 0
    ordinary = dataclasses.replace(found, group="small")
    titles = [b.title for b in report.blocks(document(ordinary)) if isinstance(b, report.Grid)]
    assert (
        "twice: MB of arguments, results and temporaries + µs that a single call takes beyond its "
        "time on the device" in titles
    )
    monkeypatch.undo()
    # The clock of a GPU finds no time for one call, and says so; a time that it finds is kept.
    seen = [clock.ProfileError("unseen"), 1.0] * 2
    monkeypatch.setattr(runner, "device_seconds", lambda batches: seen)
    (half,) = runner.run([runner.Work(TWICE, TWICE.cases[-1], PEERS[:1])], gpu, print)
    assert half.ours.error == "unseen"
    assert half.outcomes["XLA product"].us > 0
    monkeypatch.undo()
    (lost,) = runner.run([runner.Work(TWICE, TWICE.cases[-1], ())], gpu, print)
    assert lost.ours.us is None
    assert "the profile shows nothing that the device did" in lost.ours.error


@pytest.mark.skipif("90a" not in native.cuda_architectures(), reason="no CUDA module for 90a")
def test_families_are_peers_of_what_dispatch_chooses(monkeypatch):
    monkeypatch.setattr(families, "_device", lambda: kernels.DEVICES["H200"])
    found = families.with_families(registry.load("conv2d"))
    case = next(c for c in found.cases if c.dtype == "bfloat16" and "groups" not in c.options)
    forward = found.directions[0]
    declined = {peer.name: peer.declines(case, forward, "cuda") for peer in found.peers}
    assert declined["conv: mma"] is None
    assert declined["conv: wgmma"] == "is what dispatch chooses, or in no call"
    assert declined["conv: direct"] == "cannot run it"
    assert {peer.family for peer in found.peers} >= {("conv", "mma"), ("conv", "depthwise")}


def test_calls_of_a_family_are_forced(machine, monkeypatch):
    forced, events = [], []

    @contextlib.contextmanager
    def forcing(*family):
        forced.append(family)
        yield
        forced.pop()

    def function(x):
        jax.debug.callback(lambda: events.append(tuple(forced)))
        return x + x

    monkeypatch.setattr(kernels, "forcing", forcing)
    peer = spec.Peer("twice: fast", lambda case: function, family=("twice", "fast"))
    (found,) = runner.run([runner.Work(TWICE, TWICE.cases[-1], (peer,))], machine, print)
    assert found.outcomes["twice: fast"].us > 0
    assert set(events) == {(("twice", "fast"),)}


def test_no_reference_no_times(machine):
    broken = dataclasses.replace(TWICE, reference=_fails)
    (found,) = runner.run([runner.Work(broken, TWICE.cases[-1], PEERS[:1])], machine, print)
    for outcome in found.outcomes.values():
        assert outcome.us is None
        assert "nothing to compare with: RuntimeError: does not compile" in outcome.error


def test_no_inputs_no_times(machine):
    broken = dataclasses.replace(TWICE, arguments=lambda case, key: _fails(case))
    rows = list(runner.run([runner.Work(broken, TWICE.cases[0], PEERS)], machine, print))
    assert [r.direction for r in rows] == ["forward", "backward", "value_and_grad"]
    assert {r.ours.error for r in rows} == {"no inputs: RuntimeError: does not compile [here]"}


def test_inputs_are_made_until_they_fill_the_cache():
    make = contenders.JaxContender(
        lambda key: jax.random.normal(key, 10, jnp.float32), [runner._KEY]
    )
    effort = dataclasses.replace(MACHINE_EFFORT, rotated_bytes=125)
    sets = runner._input_sets(make, effort)
    assert [s.nbytes for s in sets] == [40, 40, 40]
    assert len({float(s[0]) for s in sets}) == 3


def test_one_reference_for_all_directions():
    directions = (
        spec.Direction("forward", True, ()),
        spec.Direction("second", False, (1,)),
        spec.Direction("first and value", True, (0,)),
    )
    of_two = dataclasses.replace(TWICE, directions=directions)
    results_of = runner._everything(
        runner.Work(of_two, TWICE.cases[0], ()), lambda x, y: 2 * x + 5 * y
    )
    # The cotangent, x and y.
    found = results_of(jnp.float32(10), jnp.float32(1), jnp.float32(100))
    assert jax.tree.map(float, found) == {
        "forward": [502.0],
        "second": [50.0],
        "first and value": [502.0, 20.0],
    }
    only_forward = runner.Work(of_two, TWICE.cases[-1], ())
    assert runner._everything(only_forward, lambda x: 3 * x)(2.0) == {"forward": [6.0]}


def test_phases_are_timed(machine):
    list(runner.run([runner.Work(TWICE, TWICE.cases[-1], PEERS[:1])], machine, print))
    phases = ["compile", "inputs", "check reference", "check jaxops", "check XLA product"]
    assert list(machine.stopwatch.seconds) == [*phases, "single calls", "rounds"]
    assert all(seconds > 0 for seconds in machine.stopwatch.seconds.values())
    shown = document(row(), seconds={"compile": 12.04, "rounds": 2.96})
    assert "Seconds of 15: compile 12.0, rounds 3.0." in report.blocks(shown)


# --- results files -------------------------------------------------------------------------------


def test_results_survive_a_file(tmp_path):
    kept = document(row("a", peers={"XLA": timed(1.0)}), row("b", Outcome(error="lost")))
    results.save(kept, tmp_path / "r.json")
    assert results.load(tmp_path / "r.json") == kept
    assert json.loads((tmp_path / "r.json").read_text())["format"] == results.FORMAT


def test_files_of_one_device_are_shown_as_one(tmp_path, capsys):
    a = document(row("a"), row("b"))
    c = row("c", operator="thrice")
    b = dataclasses.replace(document(c), date="2099-01-01", command="it", shapes={"thrice": "N"})
    files = [str(tmp_path / name) for name in "ab"]
    for kept, file in zip((a, b), files, strict=True):
        results.save(kept, pathlib.Path(file))
    both = tmp_path / "both.json"
    assert _cli.main(["bench", "--from", *files, "--json", str(both)]) == 0
    found = results.load(both)
    assert [r.case for r in found.rows] == ["a", "b", "c"]
    assert (found.command, found.date) == (f"{a.command}; it", a.date)
    assert _cli.main(["bench", "--from", files[0], files[0]]) == 2
    assert "2 of the files have rows of twice" in capsys.readouterr().err
    results.save(dataclasses.replace(b, device="another"), pathlib.Path(files[1]))
    assert _cli.main(["bench", "--from", *files]) == 2
    assert "another" in capsys.readouterr().err
    assert _cli.main(["bench", "--models", "--from", *files]) == 2
    assert "takes one file, got 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a results file"),
        ('{"rows": []}', "of format unknown, and this jaxops reads format 2"),
        ('{"format": 1, "rows": []}', "of format 1, and this jaxops reads format 2"),
        ('{"format": 2, "rows": []}', "is not a results file of format 2"),
        ('{"format": 2, "rows": [{"outcomes": {}}]}', "is not a results file of format 2"),
        (None, "cannot be read: No such file"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path, capsys):
    file = tmp_path / "r.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ResultsError, match=message):
        results.load(file)
    assert _cli.main(["bench", "--from", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_readme_shows_the_newest_runs_of_its_commands():
    """The picture and the table that it links to are of the same files, and of the newest runs."""
    text = bench.RESULTS_PAGE.read_text()
    start, end = map(re.escape, report.MARKERS)
    (shown,) = re.findall(f"{start}\n(.*?){end}", text, re.DOTALL)
    (commands,) = re.findall("`(python -m jaxops bench .*?)`", shown)
    kept = [results.load(file) for file in (ROOT / "benchmarks" / "results").glob("*.json")]
    newest = {d.command: d for d in sorted(kept, key=lambda d: d.date)}
    source = results.merge([newest[command] for command in commands.split("; ")])
    assert report.results_section(source) == shown
    assert bench.PICTURE.read_text() == overview.svg(source)
    readme = (ROOT / "README.md").read_text()
    for file in (bench.RESULTS_PAGE, bench.PICTURE):
        assert f"({file.relative_to(ROOT)})" in readme


def test_the_picture_shows_each_row_over_its_fastest_peer():
    kept = document(
        row("a", timed(10.0), {"XLA": timed(40.0), "torch": timed(20.0, torch=True)}),
        row("b", timed(10.0), {"XLA": timed(5.0), "lost": Outcome(error="lost")}),
        row("c", timed(10.0), {"XLA": timed(80.0)}, operator="thrice & more"),
        row("d", timed(10.0), {"XLA": timed(90.0)}, operator="thrice & more", group="scaling"),
        row("e", timed(10.0), {"lost": Outcome(error="lost")}, operator="alone"),
    )
    assert overview.speedups(kept) == {"twice": [2.0, 0.5], "thrice & more": [8.0]}
    drawn = ElementTree.fromstring(overview.svg(kept))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    # The axis, then an operator and its geometric mean.
    assert texts[2:-2] == [
        *(f"{tick}\N{MULTIPLICATION SIGN}" for tick in ("0.5", "1", "2", "4", "8")),
        *("twice", "1.00\N{MULTIPLICATION SIGN}"),
        *("thrice & more", "8.00\N{MULTIPLICATION SIGN}"),
    ]
    circles = drawn.iter("{http://www.w3.org/2000/svg}circle")
    b, c = (float(circle.get("cx")) for circle in list(circles)[1:])
    assert (b, c) == (190, 690)  # the ends of the axis


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _platforms_restored():
    chosen = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", chosen)


def on_cpu(*arguments):
    return _cli.main(["bench", "--platform", "cpu", *arguments])


@pytest.fixture
def only_twice(monkeypatch):
    """The tiny operator takes the place of all others, on ceilings that need no measuring."""
    monkeypatch.setattr(registry, "operators", lambda: ("twice",))
    monkeypatch.setattr(registry, "load", lambda name: TWICE)
    monkeypatch.setattr(ceilings, "measure", lambda *_: CEILINGS)
    efforts = dict.fromkeys(("cpu", "cuda"), MACHINE_EFFORT)
    monkeypatch.setattr(runner, "EFFORTS", efforts)
    monkeypatch.setattr(runner, "QUICK_EFFORTS", efforts)


def test_everything_that_is_made(only_twice, tmp_path, capsys):
    kept, page, plots = tmp_path / "r.json", tmp_path / "r.md", tmp_path / "plots"
    made = ["--json", str(kept), "--markdown", str(page), "--plot", str(plots)]
    assert on_cpu("twice", "--rounds", "1", *made) == 0
    printed = capsys.readouterr().out
    for text in (printed, page.read_text()):
        assert "twice (N): times, and speed-up over each peer" in text
        assert "Not timed: broken: RuntimeError: does not compile [here]" in text
        assert "twice: cost as the work grows, forward" in text
    found = results.load(kept)
    assert found.command == "python -m jaxops bench twice --platform cpu --rounds 1"
    assert found.threads >= 1
    assert found.versions["jax"] == jax.__version__
    assert {o.rounds for r in found.rows for o in r.outcomes.values() if o.us} == {1}
    assert all("slow to compile" in r.outcomes for r in found.rows)
    assert sorted(f.name for f in plots.iterdir()) == sorted(
        f"twice-{name}.{kind}"
        for name in ("roofline", "scaling", "speedup")
        for kind in ("png", "svg")
    )
    again = ["bench", "--from", str(kept), "--compare", str(kept), "--markdown", "-"]
    assert _cli.main(again) == 0
    assert "0 rows faster, 0 slower" in capsys.readouterr().out


def test_cases_are_chosen_and_left_out(only_twice, tmp_path):
    kept = tmp_path / "r.json"
    asked = ["--cases", "small", "--cases", "scaling", "--without", "(8)", "--rounds", "1"]
    assert on_cpu(*asked, "--json", str(kept)) == 0
    found = results.load(kept)
    assert {row.group for row in found.rows} == {"small", "scaling"}
    assert {row.case for row in found.rows} == {"(100) f32", "(80) f32"}
    assert "--cases small --cases scaling --without '(8)'" in found.command


def test_a_grid_replaces_the_cases(only_twice, tmp_path, capsys, monkeypatch):
    assert on_cpu("--grid") == 2
    assert "--grid: there is no grid of twice" in capsys.readouterr().err
    grid = spec.cases(spec.GRID, (6,), "float32")
    gridded = dataclasses.replace(registry.load("twice"), grid=grid)
    monkeypatch.setattr(registry, "load", lambda name: gridded)
    kept = tmp_path / "r.json"
    assert on_cpu("--grid", "--rounds", "1", "--json", str(kept)) == 0
    found = results.load(kept)
    assert [(row.group, row.case) for row in found.rows[:1]] == [(spec.GRID, "(6) f32")]
    assert "--grid" in found.command


def test_grids_cover_sizes():
    grid = registry.load("lightweight_conv").grid
    assert {case.shape[-1] for case in grid} == {3, 4, 7, 31, 127, 1023}
    assert {case.shape[2] for case in grid} == {1, 8, 64, 512, 4096, 65536}
    found = {(case.dtype, case.options["layout"]) for case in grid}
    assert len(found) == 6


def test_quick_leaves_out_what_is_slow_to_compile(only_twice, tmp_path):
    kept = tmp_path / "r.json"
    for asked, there in (([], False), (["--peers", "slow*"], True)):
        assert on_cpu("--quick", *asked, "--json", str(kept)) == 0
        assert ("slow to compile" in results.load(kept).rows[0].outcomes) == there


def test_a_problem_of_ones_own(only_twice, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "r.json"
    asked = ["twice", "--shape", "7", "--dtype", "float64"]
    assert on_cpu(*asked, "--peers", "XLA*", "--json", str(file)) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    (title,) = (line.strip() for line in printed.splitlines() if line.startswith("twice (7)"))
    assert title == "twice (7) f64, shapes are N"
    for name in ("jaxops", "XLA product", "limit"):
        assert sum(line.lstrip().startswith(name) for line in printed.splitlines()) >= 1
    assert "of limit" not in printed
    found = results.load(file)
    assert {(r.case, r.group) for r in found.rows} == {("(7) f64", "own")}
    assert f"bench {' '.join(['twice', '--platform cpu', *asked[1:]])}" in found.command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lightweight_conv", "--shape", "3,4"], "must be 5 sizes, B,C,T,H,K, such as 2,64,65,8,5"),
        (["split", "--shape", "2,x"], "got '2,x'"),
        (["split", "--shape", "0,1,1,1"], "got '0,1,1,1'"),
        (["conv2d", "--shape", "1,2,3,4,5,6", "--dtype", "real"], "got 'real'"),
        (["im2col", "--shape", "1,2,3,4,5", "--option", "x=1"], "a name out of layout, strides"),
        (["lightweight_conv", "--shape", "8,64,128,5,7"], "the H = 5 rows of weight must divide"),
        (["--shape", "3"], "--shape goes with one operator"),
        (["im2col", "--shape", "1,2,3,4,5", "--grid"], "without --cases, --without and --grid"),
        (["conv2d", "--dtype", "float32"], "--dtype and --option go with --shape"),
    ],
)
def test_problems_that_are_none(arguments, message, capsys):
    assert on_cpu(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_wide_tables_become_several(capsys):
    names = [f"peer {letter}" for letter in "abcdefghijkl"]
    grid = report.Grid("a title", ("case", "direction", *names), [["a", "forward", *names]])
    report.show([grid], Console(width=60))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert sum("a title" in line for line in lines) == 1
    assert sum("forward" in line for line in lines) > 1
    for name in names:
        assert sum(name in line for line in lines) == 1


def test_slower_is_an_exit_code(tmp_path):
    results.save(document(row(ours=timed(10.0))), tmp_path / "old.json")
    results.save(document(row(ours=timed(11.0))), tmp_path / "new.json")
    old, new = (str(tmp_path / name) for name in ("old.json", "new.json"))
    assert _cli.main(["bench", "--from", new, "--compare", old]) == 1
    assert _cli.main(["bench", "--from", old, "--compare", new]) == 0


def test_an_interrupted_run_keeps_its_rows(only_twice, monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        yield row()
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    assert on_cpu("--json", str(tmp_path / "r.json")) == 1
    # Two cases in three directions, and two of scaling in one.
    assert "Interrupted: 7 rows were not measured." in capsys.readouterr().out
    assert results.load(tmp_path / "r.json").rows == [row()]


def test_our_own_failure_is_an_exit_code(only_twice, monkeypatch, capsys):
    wrong = dataclasses.replace(TWICE, function=_thrice)
    monkeypatch.setattr(registry, "load", lambda name: wrong)
    assert on_cpu("--quick") == 1
    assert "Not timed: jaxops: wrong values" in capsys.readouterr().out


def test_results_are_written_between_their_markers(tmp_path):
    file = tmp_path / "results.md"
    file.write_text("before\n{}\nstale\n{}\nafter\n".format(*report.MARKERS))
    kept = document(row("a", timed(10.0), {"XLA sum": timed(25.0)}), row("b", target=False))
    report.update_results(kept, file)
    before, start, *shown, end, after = file.read_text().splitlines()
    assert (before, start, end, after) == ("before", *report.MARKERS, "after")
    assert "| `twice` (N) | a | forward | 20.0 | 10.0 | 25.0 (XLA sum) | \N{EN DASH} |" in shown
    assert shown[-1] == (
        "`twice`, geomean of the speed-ups over each peer (least to most): XLA sum 2.50x (2.50x to "
        "2.50x, 1 rows). 2 of 2 rows meet the targets."
    )
    assert not any("| b |" in line for line in shown)
    file.write_text("no markers")
    with pytest.raises(ResultsError, match="lacks the lines"):
        report.update_results(kept, file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["thrice"], "there is no benchmark of 'thrice'; there are twice"),
        (["--cases", "huge"], "no case of twice matches 'huge'"),
        (["--without", "*"], "no case of twice matches '*' and not '*'"),
        (["--from", "r.json", "--without", "odd"], "--from measures nothing, so it goes without"),
        (["--peers", "nobody"], "no peer is called 'nobody'; there are XLA product, wrong"),
        (["--from", "r.json", "--quick"], "--from measures nothing, so it goes without quick"),
        (["--platform", "cpu", "--kernels"], "--kernels times the kernel families of GPUs"),
        (["--compare", "none.json"], "none.json cannot be read"),
        (["--json", "none/r.json"], "none/r.json cannot be written"),
        (["--markdown", "none/r.md"], "none/r.md cannot be written"),
    ],
)
def test_refusals(arguments, message, only_twice, capsys):
    assert _cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "must be at least 1, got 0"),
        (["--rounds", "many"], "invalid integer value: 'many'"),
        (["--platform", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_arguments_that_are_none(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        _cli.main(["bench", *arguments])
    assert message in capsys.readouterr().err


def test_an_absent_platform(only_twice, monkeypatch, capsys):
    def devices(platform=None):
        raise RuntimeError("nothing to run on")

    monkeypatch.setattr(jax, "devices", devices)
    assert _cli.main(["bench"]) == 2
    assert "no usable device here. nothing to run on" in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU's profile shows them")
def test_a_ceiling_that_a_profile_does_not_show():
    ones = jnp.ones(3, jnp.float32)
    program = contenders.JaxContender(jnp.negative, [ones])
    with pytest.raises(clock.ProfileError, match="only 0 events"):
        ceilings._seconds(clock.device_seconds, program, [ones])


def test_a_ceiling_needs_one_function_that_compiles():
    probe = ceilings._Probe("copy", [_fails, jnp.copy], [(3,)], "float32", 1)
    assert len(probe.compiled()) == 1
    with pytest.raises(RuntimeError, match="does not compile"):
        dataclasses.replace(probe, functions=[_fails]).compiled()


def test_no_ceilings(only_twice, monkeypatch, capsys):
    def unseen(*_):
        raise clock.ProfileError("nothing seen")

    monkeypatch.setattr(ceilings, "measure", unseen)
    assert on_cpu("--quick") == 2
    assert "jaxops bench: nothing seen" in capsys.readouterr().err


def test_a_peer_that_is_not_installed(only_twice, monkeypatch, capsys):
    with_torch = dataclasses.replace(TWICE, peers=(spec.Peer("torch sum", _twice, torch=True),))
    monkeypatch.setattr(registry, "load", lambda name: with_torch)
    monkeypatch.setattr(contenders, "torch_absence", lambda platform: "torch is not installed")
    assert on_cpu("--peers", "torch*") == 2
    assert "torch sum: torch is not installed" in capsys.readouterr().err
    assert on_cpu("--quick") == 0
    assert "Not there: torch sum: torch is not installed" in capsys.readouterr().out


def test_plots_without_matplotlib(only_twice, monkeypatch, tmp_path, capsys):
    monkeypatch.delitem(sys.modules, "jaxops._bench.plots", raising=False)
    monkeypatch.delattr(sys.modules["jaxops._bench"], "plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _cli.main(["bench", "--plot", str(tmp_path)]) == 2
    assert (
        "matplotlib, which is not installed: pip install jaxops[bench]" in capsys.readouterr().err
    )


def test_no_readme_to_write(only_twice, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "RESULTS_PAGE", tmp_path / "results.md")
    assert _cli.main(["bench", "--update-readme"]) == 2
    assert "works in a clone of jaxops" in capsys.readouterr().err


def test_results_of_another_device(tmp_path, capsys):
    results.save(document(row()), tmp_path / "old.json")
    results.save(document(row(), device="Another"), tmp_path / "new.json")
    old, new = (str(tmp_path / name) for name in ("old.json", "new.json"))
    assert _cli.main(["bench", "--from", new, "--compare", old]) == 2
    assert "another device: A device (cuda), not Another (cuda)" in capsys.readouterr().err


# --- documents -----------------------------------------------------------------------------------


def test_the_installed_package_has_the_benchmarks():
    installed = {str(file) for file in importlib.metadata.files("jaxops")}
    for file in (ROOT / "benchmarks").glob("*.py"):
        assert f"jaxops/benchmarks/{file.name}" in installed
    assert not any("results" in name for name in installed if name.startswith("jaxops/benchmarks"))


def test_the_installed_package_says_that_it_has_types():
    assert "jaxops/py.typed" in {str(file) for file in importlib.metadata.files("jaxops")}


def test_quick_run_of_the_real_thing(tmp_path, capsys):
    file = tmp_path / "r.json"
    arguments = ["--quick", "--rounds", "1", "--peers", "XLA shift-and-add"]
    assert on_cpu("lightweight_conv", *arguments, "--json", str(file)) == 0
    found = results.load(file)
    assert {r.direction for r in found.rows} == {"forward", "backward", "value_and_grad"}
    assert set(found.ceilings) > {"copy", "fma float32", "matmul bfloat16", "dispatch"}
    assert len(found.ceilings) == ceilings.PROBES
    assert all(math.isfinite(c) and c > 0 for c in found.ceilings.values())
    assert np.isfinite([figures.limit(found, r)[0] for r in found.rows]).all()
