"""`python -m jaxops`: the front door, `info`, and `demo` with the model it trains."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops import _cli
from jaxops._cli import char_lm, corpus, demo, doctor, info
from jaxops._core import native

TINY = char_lm.Config(
    features=16,
    heads=4,
    kernel_sizes=(3, 5),
    window=16,
    batch=4,
    train_characters=5_000,
    held_out_characters=320,
    sample_characters=30,
)


def run_module(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "jaxops", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


# --- the front door ------------------------------------------------------------------------------


def test_no_command_prints_help(capsys):
    assert _cli.main([]) == 2
    printed = capsys.readouterr().out
    for name in _cli.COMMANDS:
        assert name in printed
    assert demo.__doc__ in " ".join(printed.split())


def test_unknown_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        _cli.main(["bogus"])
    assert "invalid choice: 'bogus'" in capsys.readouterr().err


def test_only_the_command_asked_for_is_imported(monkeypatch, capsys):
    monkeypatch.setattr(_cli, "COMMANDS", ("info", "not_there"))
    assert _cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        _cli.main(["not_there"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "must be at least 1, got 0"),
        (["--steps", "many"], "invalid integer value: 'many'"),
        (["--seed", "-1"], "must be at least 0, got -1"),
        (["--platform", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_demo_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        _cli.main(["demo", *arguments])
    assert message in capsys.readouterr().err


def test_exit_code_reaches_the_shell():
    done = run_module("demo", "--steps", "0")
    assert done.returncode == 2
    assert "must be at least 1, got 0" in done.stderr


# --- info ----------------------------------------------------------------------------------------


def test_info_json_is_one_document():
    done = run_module("info", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["jax"] == jax.__version__
    assert {d["platform"] for d in found["devices"]} == {jax.default_backend()}
    assert found["devices_error"] is None
    for handlers in found["handlers"]:
        assert handlers["available"] == (handlers["reason"] is None)
        assert handlers["available"] == bool(handlers["targets"])


def test_info_tables(capsys):
    assert _cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for word in ("Versions", jax.__version__, "Devices", "Handlers"):
        assert word in printed


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        _cli.main(["--version"])
    assert capsys.readouterr().out == f"jaxops {jaxops.__version__}\n"


def test_info_names_handlers_only_if_asked(capsys):
    assert _cli.main(["info"]) == 0
    brief = capsys.readouterr().out
    assert max(map(len, brief.splitlines())) <= 80
    assert "jaxops_im2col" not in brief
    assert _cli.main(["info", "--verbose"]) == 0
    assert "jaxops_im2col" in capsys.readouterr().out


H100 = {"name": "NVIDIA H100", "capability": "9.0", "driver": "580.65.06"}
V100 = {"name": "NVIDIA V100", "capability": "7.0", "driver": "570.10"}
CUDA = {"platform": "cuda", "available": True, "build": "CUDA 13.0 for sm 90a", "reason": None}
NOT_BUILT = "it was not built. Rebuild jaxops with `pip install .`."
ON_GPU = [{"id": 0, "platform": "gpu", "kind": "NVIDIA H100", "compute_capability": "9.0"}]
PLUGIN = {"jax-cuda13-plugin": "0.10.2"}


def facts(**changed):
    """A machine with an H100 on which everything is right, or what is changed of it."""
    handlers = {**CUDA, "targets": ["a"], **changed.pop("cuda", {})}
    cpu = {"platform": "cpu", "available": True, "build": "C++", "reason": None, "targets": ["a"]}
    machine = {
        "versions": {"jax": "0.10.2", "jaxlib": "0.10.2"},
        "devices": ON_GPU,
        "devices_error": None,
        "handlers": [cpu, handlers],
        "gpus": [H100],
        "gpu_files": [],
        "plugins": PLUGIN,
        "environment": {},
    }
    return machine | changed


OLD = {"devices": [], "gpus": [H100 | {"driver": "550.1"}]}


@pytest.mark.parametrize(
    ("changed", "fact", "advice"),
    [
        ({"gpus": [], "gpu_files": ["/dev/nvidia0"], "devices": []}, "nvidia-smi", "Install NVID"),
        ({"devices": [], "environment": {"JAX_PLATFORMS": "cpu"}}, "is 'cpu'", "Unset JAX_PLAT"),
        ({"devices": [], "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "hides it", "Unset CUDA_V"),
        ({"devices": [], "plugins": {}}, "plugin is not installed", "-U 'jax[cuda13]'"),
        ({**OLD, "plugins": {}}, "plugin is not installed", "-U 'jax[cuda12]'"),
        (OLD, "550.1 is too old for the plugin", "-U 'jax[cuda12]'"),
        (OLD, "built with CUDA 13", "Update the driver to 580 or later"),
        ({"devices": [], "gpus": [H100 | {"driver": "470.1"}]}, "driver is too old", "to 525"),
        ({"devices": []}, "JAX does not see the GPU", "jax.devices('cuda')"),
        (
            {"plugins": {"jax-cuda13-plugin": "0.9"}},
            "is 0.9, and jaxlib 0.10.2",
            "[cuda13]==0.10.2",
        ),
        ({"cuda": {"available": False, "reason": NOT_BUILT}}, "it was not built", "Rebuild jaxops"),
        ({"gpus": [H100, V100]}, "NVIDIA V100 (7.0) runs no code for sm 90a", "Rebuild jaxops on"),
        (
            {"devices": [], "devices_error": "none", "environment": {"JAX_PLATFORMS": "tpu"}},
            "JAX has no device: none",
            "Unset JAX_PLATFORMS, which is 'tpu'",
        ),
    ],
)
def test_the_doctor_says_what_to_do(changed, fact, advice, monkeypatch):
    monkeypatch.setattr(native, "cuda_architectures", lambda: ("90a",))
    problems = [f for f in doctor.diagnose(facts(**changed)) if f.advice]
    assert any(fact in p.fact and advice in p.advice for p in problems), problems


def test_the_doctor_finds_nothing_on_a_healthy_machine(monkeypatch):
    monkeypatch.setattr(native, "cuda_architectures", lambda: ("90a",))
    without_gpu = {"gpus": [], "devices": [], "plugins": {}, "cuda": {"reason": NOT_BUILT}}
    for machine in (facts(), facts(**without_gpu)):
        found = doctor.diagnose(machine)
        assert found
        assert not [f for f in found if f.advice]


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("NVIDIA H100 80GB HBM3, 9.0, 580.65.06", [("NVIDIA H100 80GB HBM3", "9.0", "580.65.06")]),
        ("No devices were found", []),
        ("Tesla K20, [N/A], 340.1", []),
    ],
)
def test_gpus_of_the_driver(printed, found, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{printed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [dataclasses.astuple(gpu) for gpu in doctor.gpus()] == found
    program.write_text("#!/bin/sh\nexit 9\n")
    assert doctor.gpus() == []


def test_info_reports_that_there_is_no_device(monkeypatch, capsys):
    def devices(*_):
        raise RuntimeError("nothing to run on")

    monkeypatch.setattr(jax, "devices", devices)
    assert info.collect()["devices_error"] == "RuntimeError: nothing to run on"
    assert _cli.main(["info"]) == 0
    assert "nothing to run on" in capsys.readouterr().out


# --- the text and the counting models ------------------------------------------------------------


def test_encode_and_decode():
    assert len(corpus.ALPHABET) == 96
    assert corpus.decode(corpus.encode(corpus.ALPHABET.encode())) == corpus.ALPHABET
    assert corpus.decode(corpus.encode("a\tb\r\né~".encode())) == "a       b\n~"


def test_every_tenth_file_is_held_out(tmp_path):
    for i in range(20):
        (tmp_path / f"m{i:02}.py").write_text(chr(ord("a") + i))
    (tmp_path / "_sysconfigdata_x.py").write_text("never")
    train, held_out = corpus.standard_library(tmp_path)
    assert corpus.decode(train) == "abcdefghiklmnopqrs"
    assert corpus.decode(held_out) == "jt"


def test_too_few_files(tmp_path):
    (tmp_path / "one.py").write_text("pass")
    with pytest.raises(FileNotFoundError, match="has 1"):
        corpus.standard_library(tmp_path)


def test_windows_reach_both_ends():
    windows = corpus.spaced_windows(np.arange(11), count=3, length=3)
    np.testing.assert_array_equal(windows, [[0, 1, 2], [4, 5, 6], [8, 9, 10]])


def test_counting_models_by_hand():
    # The text is 0 0 1 0: n(0) = 3, n(1) = 1; pairs 00, 01 and 10, once each. With one added to
    # each: p(1) = 2/6, p(1 | 0) = 2/4, p(1 | 1) = 1/3. The window predicts 1 after 0, then 1 after
    # 1.
    text, windows = np.array([0, 0, 1, 0]), np.array([[0, 1, 1]])
    assert corpus.unigram_bits(text, windows, symbols=2) == pytest.approx(math.log2(3))
    assert corpus.bigram_bits(text, windows, symbols=2) == pytest.approx((1 + math.log2(3)) / 2)


# --- the model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_params():
    return jax.jit(char_lm.CharLM(TINY).init)(jax.random.key(0), jnp.zeros((1, 16), jnp.uint8))


def test_model_sees_its_receptive_field_and_no_future(tiny_params):
    text = jax.random.randint(jax.random.key(1), (40,), 0, len(corpus.ALPHABET) - 1)

    @jax.jit
    def logits(text):
        return char_lm.CharLM(TINY).apply(tiny_params, text[None])[0]

    position, field = 20, TINY.receptive_field
    seen = [
        bool((logits(text)[position] != logits(text.at[i].add(1))[position]).any())
        for i in range(40)
    ]
    assert seen == [position - field < i <= position for i in range(40)]
    # `generate` relies on this: a window of the receptive field is as good as the whole text.
    np.testing.assert_allclose(logits(text)[-1], logits(text[-field:])[-1], rtol=1e-4, atol=1e-5)


def test_evaluation_is_the_mean_over_windows(tiny_params):
    # 10 windows do not fill batches of 4.
    windows = np.random.default_rng(0).integers(0, 96, (10, 17), np.uint8)
    one_by_one = [float(char_lm.mean_bits(TINY, tiny_params, w[None])) for w in windows]
    assert char_lm.evaluate(TINY, tiny_params, windows) == pytest.approx(np.mean(one_by_one))


def test_the_cache_samples_as_the_window_does(tiny_params):
    cached, cached_speed = char_lm.generate(TINY, tiny_params, 0)
    plain, plain_speed = char_lm.generate(TINY, tiny_params, 0, cached=False)
    if jax.default_backend() == "cpu":  # GPUs round products of one row and of many differently.
        assert cached == plain
    assert len(cached) == TINY.sample_characters
    assert min(cached_speed, plain_speed) > 0


def test_training_learns():
    bits = {}
    figures = char_lm.run(TINY, 25, 0, lambda done, last, speed: bits.update({done: last}))
    assert list(bits) == [10, 20, 25]
    assert bits[25] < bits[10]
    assert figures.model_bits < math.log2(len(corpus.ALPHABET))
    assert figures.unigram_bits > figures.bigram_bits > 0
    assert figures.trained_characters == 5_000
    assert figures.held_out_characters == 320
    assert figures.sample.startswith("\ndef ")
    assert len(figures.sample) == len("\ndef ") + 30


def test_a_seed_decides_everything():
    config = dataclasses.replace(TINY, kernel_sizes=(3,))

    def run(seed):
        return char_lm.run(config, 2, seed, lambda *_: None)

    first, second = run(0), run(0)
    # Each run is compiled again, and on GPUs XLA picks its matrix products by timing them.
    assert second.model_bits == pytest.approx(first.model_bits, rel=1e-5)
    if jax.default_backend() == "cpu":
        assert second == first
    assert run(1).model_bits != pytest.approx(first.model_bits, rel=1e-4)


# --- demo ----------------------------------------------------------------------------------------


def arguments(**options):
    defaults = {"steps": 3, "seed": 0, "platform": None}
    return argparse.Namespace(**{**defaults, **options})


@pytest.fixture
def tiny_demo(monkeypatch):
    """The demo with the tiny model instead of the default one."""
    tiny = functools.partial(dataclasses.replace, TINY)
    monkeypatch.setattr(char_lm, "Config", tiny)


def test_demo_says_where_it_runs_and_what_it_measured(tiny_demo, capsys):
    assert demo.run(arguments()) == 0
    printed = capsys.readouterr().out
    first = printed.splitlines()[0]
    assert jax.devices()[0].platform in first
    assert jax.__version__ in first
    words_of_all = ("handlers for cpu", "handlers for cuda", "unigram", "bigram", "conv-attention")
    for words in (*words_of_all, "characters/s with the cache of inputs"):
        assert words in printed
    assert f"Not yet below the bigram model: {demo.DEFAULT_STEPS} steps" in printed


@pytest.mark.parametrize(("bits", "code"), [(2.0, 0), (3.0, 1), (math.nan, 1)])
def test_demo_fails_when_no_better_than_bigram(bits, code, monkeypatch, capsys):
    figures = char_lm.Figures(bits, 4.0, 3.0, 1, 1, "x[0]", cached_speed=9.0, uncached_speed=2.0)
    monkeypatch.setattr(char_lm, "run", lambda *_: figures)
    assert demo.run(arguments(steps=demo.DEFAULT_STEPS)) == code
    printed = capsys.readouterr()
    assert "x[0]" in printed.out
    assert ("no better than a bigram model" in printed.err) == (code == 1)


@pytest.mark.parametrize("package", ["flax", "optax", "rich"])
def test_demo_without_an_extra(package, monkeypatch, capsys):
    for name in list(sys.modules):
        if name in ("rich", "jaxops._cli.char_lm") or name.startswith(("rich.", "jaxops.flax")):
            monkeypatch.delitem(sys.modules, name)
    # `from package import module` takes the attribute where there is one.
    monkeypatch.delattr(_cli, "char_lm")
    monkeypatch.setitem(sys.modules, package, None)
    assert demo.run(arguments()) == 2
    assert f"{package} is not installed: pip install jaxops[flax]" in capsys.readouterr().err


def test_demo_without_a_text(tiny_demo, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert demo.run(arguments()) == 2
    assert "too few to train on" in capsys.readouterr().err


def test_demo_on_an_absent_platform():
    done = run_module("demo", "--platform", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "no cuda device here" in done.stderr
