"""The examples run, in a short form, and their results show the claimed effect."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import re
import warnings

import jax
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_focal_loss_finds_more_of_a_rare_class():
    pytest.importorskip("sklearn")
    results = load("focal_loss_digits").compare(steps=200, seeds=3)
    focal, entropy = results["focal"], results["cross-entropy"]
    assert focal["recall"] > entropy["recall"]
    assert focal["F1"] > entropy["F1"]
    assert focal["average precision"] > 0.8


def test_tomography_finds_the_volume():
    pytest.importorskip("nibabel")
    tomography = load("grid_sample_tomography")
    truth, volume = tomography.reconstruct(steps=60)
    before = tomography.psnr(0 * truth, truth)
    assert tomography.psnr(volume, truth) > before + 8


def test_tomography_draws_its_slices(tmp_path):
    pytest.importorskip("nibabel")
    pytest.importorskip("matplotlib")
    tomography = load("grid_sample_tomography")
    truth = tomography.load_image()
    file = tmp_path / "slices.png"
    tomography.draw({"before": 0 * truth, "after": truth, "truth": truth}, str(file))
    assert file.stat().st_size > 10_000


def test_pictures_are_drawn(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(EXAMPLES)
    images, labels = np.random.default_rng(0).random((60, 8, 8, 1)), np.arange(60) % 10
    metrics = {"recall": 0.5, "F1": 0.4}
    for name, arguments in {
        "concatenate_unet": ({"clean": images, "noisy": images},),
        "conv2d_digits": (images, labels, labels // 2),
        "focal_loss_digits": ({"cross-entropy": metrics, "focal": metrics},),
        "short_conv_mixer": ([3.0, 2.0, 1.5],),
        "train_distributed": ({"one device": [3.0, 2.0], "data=2": [3.1, 2.2]},),
    }.items():
        file = tmp_path / f"{name}.png"
        importlib.import_module(name).draw(*arguments, str(file))
        assert file.stat().st_size > 5_000


def test_every_convolution_of_the_digits_is_ours():
    pytest.importorskip("sklearn")
    found = load("conv2d_digits").classify(steps=250)
    assert found["accuracy"] > 0.9
    assert found["difference"] < 1e-5


def test_mixer_of_packed_texts_decodes_what_it_trained():
    found = load("short_conv_mixer").compare(steps=30)
    before, after = found["bits"]
    assert after < before - 2
    assert found["packed"] < 1e-5
    # On a GPU XLA rounds products to TF32, and those of one step differently.
    assert found["decoded"] < (1e-5 if jax.default_backend() == "cpu" else 1e-3)


PAGES = [EXAMPLES.parent / "README.md", *sorted((EXAMPLES.parent / "docs").glob("*.md"))]
BLOCKS = {
    page.name: re.findall(
        r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?",
        page.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    for page in PAGES
}
# What a page's text says of the names in its blocks.
IMPORTS = (
    "import jax, jaxops, warnings; from jax import lax, numpy as jnp; from flax import linen as nn"
)
NAMES = {
    "conv2d.md": "x, kernel = jnp.ones((2, 5, 6, 3)), jnp.ones((4, 4, 3, 2))",
    "lightweight_conv.md": (
        "slots, K, dilation, C = 5, 4, 1, 6; x_t, weight = jnp.ones((3, C)), jnp.ones((C, K)); "
        "indices = jnp.arange(3)"
    ),
}


@pytest.mark.parametrize("page", [name for name, blocks in BLOCKS.items() if blocks])
def test_blocks_of_pages_run(page, monkeypatch, tmp_path, capsys):
    """One after another, with the names of the blocks before, in float32 as a reader has it.

    A block of text after one of Python is what that prints, on eight CPU devices.
    """
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page}
    with warnings.catch_warnings(), jax.enable_x64(False):
        for block in (IMPORTS, NAMES.get(page, "")):
            exec(block, names)
        for block, printed in BLOCKS[page]:
            capsys.readouterr()
            exec(compile(block, page, "exec", dont_inherit=True), names)
            if printed and jax.default_backend() == "cpu":
                assert capsys.readouterr().out == printed
