"""`python -m jaxops bench --models`: its models, what it measures, and its refusals."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import _cli
from jaxops._bench import training_steps
from jaxops._bench.models import MODELS, ours, plain
from jaxops._bench.training_steps import Outcome, Row
from jaxops.testing import measure


def on_cpu(*arguments):
    return _cli.main(["bench", "--models", "--platform", "cpu", "--quick", *arguments])


@pytest.mark.parametrize("name", MODELS)
def test_both_sets_of_operators_train_the_same_state(name):
    model = MODELS[name]
    batch = model.small.batch(np.random.default_rng(0))
    initial = training_steps.initial_state(model, model.small, batch[0])
    before = jax.eval_shape(initial)
    calls = []
    for operators in (ours(), plain()):
        step = functools.partial(training_steps.train_step, model, model.small, operators)
        jaxpr, (after, loss) = jax.make_jaxpr(step, return_shape=True)(before, batch)
        assert after == before
        assert (loss.shape, loss.dtype) == ((), jnp.float32)
        calls.append(str(jaxpr))
    assert calls[0] != calls[1]


@pytest.fixture(scope="module")
def script():
    """`scripts/time_scaling.py`."""
    file = pathlib.Path(__file__).parents[1] / "scripts" / "time_scaling.py"
    spec = importlib.util.spec_from_file_location("time_scaling", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_of_several_devices_have_the_losses_of_one(script):
    model = MODELS["retinanet-bf16"]
    losses = []
    for count in (1, 2):
        devices = jax.devices("cpu")[:count]
        run = script.Run(*script.prepare(model, model.small, ours(), devices))
        assert measure.collectives(run.compiled) == {"all-reduce": 1}
        losses.append(run.losses(2))
    assert losses[0][1] != losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_kernels_of_collectives_are_counted_for_a_step(script):
    names = ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)"] * 6
    names += ["ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)"] * 3 + ["ConvolveWgmma"]
    events = [types.SimpleNamespace(name=name, duration_ns=5e5) for name in names]
    assert script.by_collective(events, 3) == {
        "AllReduce": {"count": 2, "ms": pytest.approx(1)},
        "SendRecv": {"count": 1, "ms": pytest.approx(0.5)},
        "other": {"count": pytest.approx(1 / 3), "ms": pytest.approx(0.5 / 3)},
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The results file of two models that have every kind of operator but pooled ones."""
    file = tmp_path_factory.mktemp("models") / "r.json"
    assert on_cpu("retinanet-bf16", "nerf-volume-f32", "--json", str(file)) == 0
    return file


def test_models_are_measured(measured):
    found = training_steps.load(measured)
    assert [row.model for row in found.rows] == ["retinanet-bf16", "nerf-volume-f32"]
    assert found.command.endswith("retinanet-bf16 nerf-volume-f32 --platform cpu --models --quick")
    for row in found.rows:
        assert list(row.outcomes) == ["jaxops", "plain JAX"]
        assert row.agrees
        for outcome in row.outcomes.values():
            assert len(outcome.losses) == training_steps.QUICK_EFFORT.steps
            assert outcome.losses[-1] < outcome.losses[0]
            assert outcome.memory > 4 * row.parameters
            assert 0 < outcome.host_ms <= outcome.call_ms
            assert min(outcome.ms, outcome.trace_s, outcome.compile_s) > 0
            assert outcome.device_ms is None


def test_kept_results_fit_a_narrow_terminal(measured, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert _cli.main(["bench", "--models", "--from", str(measured)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    for words in ("steps/s", "retinanet-bf16", "plain JAX", "rounding", "yes"):
        assert words in printed
    assert _cli.main(["bench", "--models", "--from", str(measured), "--markdown", "-"]) == 0
    assert "| nerf-volume-f32 | jaxops |" in capsys.readouterr().out


def test_a_wrong_operator_is_noticed(monkeypatch, tmp_path, capsys):
    def wrong():
        right = ours()
        return dataclasses.replace(right, grid_sample=lambda v, p: 1.001 * right.grid_sample(v, p))

    monkeypatch.setattr(training_steps, "ours", wrong)
    file = tmp_path / "r.json"
    assert on_cpu("nerf-volume-f32", "--json", str(file)) == 1
    (row,) = training_steps.load(file).rows
    assert row.difference > training_steps.TOLERANCE * row.rounding
    assert json.loads(file.read_text())["unfinished"] == 0


def test_an_operator_that_fails_is_reported(monkeypatch, capsys):
    def broken():
        def grid_sample(volume, points):
            raise NotImplementedError("no [samples]")

        return dataclasses.replace(ours(), grid_sample=grid_sample)

    monkeypatch.setattr(training_steps, "ours", broken)
    monkeypatch.setattr(training_steps, "_time", lambda programs, *_: {})
    assert on_cpu("nerf-volume-f32") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "nerf-volume-f32, jaxops: NotImplementedError: no [samples]" in printed


@pytest.mark.parametrize(
    ("losses", "agrees"),
    [([2.0, 1.0], True), ([2.0, 1.2], False), ([2.0, float("nan")], False), ([], False)],
)
def test_losses_are_compared(losses, agrees):
    row = Row(
        "a",
        "",
        1,
        {"jaxops": Outcome(losses=losses), "plain JAX": Outcome(losses=[2.0, 1.0])},
        0.01,
    )
    assert row.agrees == agrees


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet18"], "there is no model 'resnet18'; there are resnet50-bf16"),
        (["--cases", "large"], "--models goes without cases"),
        (["--from", "r.json"], "--models --from goes without platform, quick"),
        (["--json", "none/r.json"], "none/r.json cannot be written"),
    ],
)
def test_refusals(arguments, message, capsys):
    assert on_cpu(*arguments) == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_run_keeps_its_models(measured, monkeypatch, tmp_path, capsys):
    rows = iter(training_steps.load(measured).rows[:1])

    def measure(*_, **__):
        for row in rows:
            return row
        raise KeyboardInterrupt

    monkeypatch.setattr(training_steps, "measure", measure)
    file = tmp_path / "r.json"
    assert on_cpu("retinanet-bf16", "unet-bf16", "--json", str(file)) == 1
    assert training_steps.load(file).unfinished == 1
    assert "Interrupted: 1 models were not measured." in capsys.readouterr().out
