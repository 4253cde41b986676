"""The table of CONTRIBUTING.md for a new operator, followed for a toy in a copy of the tree.

`toy_operator/` has the new files of the operator `scaled_product` at their places in the tree, and
`EDITS` has its lines in lists of the tree. The copy has no C++ of other operators but im2col, so
that its CPU module is built in seconds.

An operator costs at most 18 files, and at most 60 lines of C++ without information. These lines
repeat names that are said already: preprocessor lines, namespaces and their ends, `using`, the
operator's name, declarations of functions, the struct of attributes, which Python passes under the
same names, the registration, and the lines that pass attributes and buffers to the kernels' struct.

`CHANGELOG.md`, where every change has a line, and `tests/kernel_table.txt`, which a command writes,
are not counted.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.any_jax

ROOT = pathlib.Path(__file__).parents[1]
TOY = ROOT / "tests" / "toy_operator"
NEW = sorted(str(f.relative_to(TOY)) for f in TOY.rglob("*.*") if f.suffix != ".pyc")

CASE = """\
    Case(
        "scaled_product",
        jaxops.scaled_product,
        lambda dtype: (_array(100_000, 64, dtype=dtype), _array(100_000, 64, dtype=dtype)),
        (0, 1),
    ),"""

EXERCISE = '''\
def exercise_product(device, dtype, width):
    """Like `exercise`, of the scaled product."""
    a, b = np.random.default_rng(width).normal(size=(2, 50, width)).astype(jnp.dtype(dtype))
    program = jax.jit(lambda a, b: {"value": jaxops.scaled_product(a, b, scale=2.0)})
    want = {"value": 2 * a.astype(np.float64) * b}
    return compared(f"{dtype}, N={width}", program(*jax.device_put((a, b), device)), want, dtype, 1)


'''

# The added lines by file, each before the line that begins with the other text, or at the end if
# that text is empty.
EDITS = {
    "jaxops/__init__.py": [
        ("from jaxops.scaled_product import scaled_product", "from jaxops.trilinear"),
        ('    "scaled_product",', '    "sigmoid_focal_loss"'),
    ],
    "tests/test_errors.py": [
        ('    "scaled_product": {"a": X, "b": X, "scale": 2.0},', '    "trilinear_interpolate"'),
    ],
    "tests/wrong_calls.py": [
        ("        (jaxops.scaled_product, image, image),", "        (hard, logits, labels)"),
        (
            "        (jax.grad(lambda a: jaxops.scaled_product(a, a).sum()), rows),",
            "        (hard,",
        ),
        ('    "scaled_product": "operand . size [012]",', '    "sigmoid_focal_loss": '),
    ],
    "tests/dry_run/cases.py": [(CASE, '    _trilinear("1 feature"')],
    "scripts/exercise_kernels.py": [
        (EXERCISE, "# --- patches ---"),
        (
            '    "scaled_product": (exercise_product, (("float32", 1), ("float64", 300))),',
            '    "tri',
        ),
    ],
    "README.md": [("[`jaxops.scaled_product`](docs/scaled_product.md)", "")],
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The copy, with the toy and without modules."""
    copy = tmp_path_factory.mktemp("recipe") / "jaxops"
    others = shutil.ignore_patterns(".*", "build", "*.so", "__pycache__", "results", "toy_operator")
    shutil.copytree(ROOT, copy, ignore=others)
    for source in (*copy.glob("cpu/*.cc"), *copy.glob("ffi/*.cc")):
        if not source.name.startswith(("im2col", "module_")):
            source.unlink()
    for name in NEW:
        (copy / name).parent.mkdir(exist_ok=True)
        assert not (copy / name).exists(), name
        shutil.copy(TOY / name, copy / name)
    for name, edits in EDITS.items():
        lines = (copy / name).read_text().splitlines()
        for line, before in edits:
            starts = [i for i, text in enumerate(lines) if text.startswith(before)]
            assert starts, f"{name}: no line begins with {before!r}"
            lines.insert(starts[0] if before else len(lines), line)
        (copy / name).write_text("\n".join(lines) + "\n")
    return copy


def run(*command, cwd, **environment):
    # The copy has no CUDA module, whatever the tests around this one require.
    own = (k for k in os.environ if not k.startswith(("PYTEST_", "JAXOPS_REQUIRE_PLATFORMS")))
    environment = {k: os.environ[k] for k in own} | environment
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_an_operator_is_built_and_tested_by_the_recipe(tree, tmp_path):
    pytest.importorskip("nanobind")
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    cmake = shutil.which("cmake", path=places)
    if None in (cmake, shutil.which("make"), shutil.which("c++")):
        pytest.skip("there is no CMake, no make or no C++ compiler")
    build = tmp_path / "build"
    this = f"-DPython_EXECUTABLE={sys.executable}"
    run(cmake, "-S", tree, "-B", build, this, cwd=tree, JAXOPS_CUDA="off")
    run(cmake, "--build", build, "--parallel", "2", cwd=tree)
    (module,) = build.glob("_cpu*.so")
    shutil.copy(module, tree / "jaxops")

    def run_python(*arguments):
        environment = {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
        return run(sys.executable, *arguments, cwd=tree, **environment)

    program = "import jaxops; print(jaxops.__file__, *jaxops._native.status()[0].targets)"
    imported, *targets = run_python("-c", program).split()
    assert pathlib.Path(imported).parents[1] == tree
    assert targets == ["jaxops_col2im", "jaxops_im2col", "jaxops_scaled_product"]
    # The tests of the toy and of every operator's capabilities, and those of complete lists.
    files = ("scaled_product", "capabilities", "errors", "bench", "readme", "imports")
    tests = [f"tests/test_{name}.py" for name in files]
    chosen = "scaled_product or declared or complete or looked_at"
    report = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *tests)
    assert int(re.search(r"(\d+) passed", report).group(1)) > 30
    faults = run_python("tests/wrong_calls.py", "scaled_product")
    assert int(faults.split()[0]) > 300
    program = (
        "from tests.dry_run.cases import CASES;"
        "print(sum(len([*c.programs('float32')]) for c in CASES if c.name == 'scaled_product'))"
    )
    assert run_python("-c", program).split() == ["4"]
    program = "scripts/exercise_kernels.py"
    assert "2 of 2 results" in run_python(program, "scaled_product", "--platform", "cpu")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("name", ["cuda/scaled_product/dispatch.cu", "ffi/scaled_product.cc"])
def test_its_sources_compile_for_cuda(name, tree, tmp_path):
    import jaxlib

    headers = pathlib.Path(jaxlib.__file__).parent / "include"
    options = ["-std=c++20", "-arch=sm_90a", "-DJAXOPS_PLATFORM_CUDA", "-I", tree]
    target = tmp_path / "object.o"
    run("nvcc", *options, "-isystem", headers, "-c", tree / name, "-o", target, cwd=tree)
    assert target.exists()


REPEATS = re.compile(
    r"#.*|namespace .*|}  // namespace.*|using .*|constexpr char kName.*|struct \w+Attributes {"
    r"|JAXOPS_ATTRIBUTES\(.*|(?!return)\w+ \w+\([^()]*\);|const Registration .*"
    r"|call\.\w+ = (attributes\.\w+|\w+(\.|->)untyped_data\(\));"
)


def test_an_operator_costs_few_files_and_few_lines_without_information():
    assert len([*NEW, *EDITS]) <= 18
    recipe = (ROOT / "CONTRIBUTING.md").read_text()
    for name in (*NEW, *EDITS):
        assert f"`{name.replace('scaled_product', '<name>')}`" in recipe
    found = []
    for name in NEW:
        if name.endswith((".h", ".cc", ".cu")):
            text = re.sub(r"//(?! namespace).*", "", (TOY / name).read_text())
            inside = False
            for line in map(str.strip, text.splitlines()):
                inside |= line.startswith("struct") and line.endswith("Attributes {")
                if inside or REPEATS.fullmatch(line):
                    found.append(f"{name}: {line}")
                inside &= line != "};"
    assert 30 < len(found) <= 60, "\n".join(found)
