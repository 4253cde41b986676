"""Shows which CUDA kernels take a call of an operator and of its gradients, on GPUs of any kind."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.text import Text

import jaxops
from jaxops.testing import kernels
from jaxops.testing.measure import leaves, vjp_of

_ROOT = pathlib.Path(__file__).parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options that go with `python -m jaxops info --kernels`."""
    group = parser.add_argument_group("which kernels take a call")
    group.add_argument(
        "--kernels",
        nargs="+",
        metavar=("OPERATOR", "SHAPE"),
        help="show the CUDA kernels of an operator on arrays of these shapes, such as conv2d "
        "8,56,56,64 3,3,64,128; SHAPE:DTYPE has a dtype of its own. No GPU is needed",
    )
    group.add_argument("--dtype", default="bfloat16", help="of the arrays (default: %(default)s)")
    group.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument of the operator, such as strides=2",
    )
    group.add_argument(
        "--device",
        action="append",
        choices=kernels.DEVICES,
        help="the GPU (default: H200); again for more of them",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the calls and their launches, as tables or as JSON; returns 0, or 2 for bad input."""
    try:
        function, arguments = parse(args.kernels, args.dtype, args.option)
        found = {
            name: collect(function, arguments, name)
            for name in dict.fromkeys(args.device or ["H200"])
        }
    except (TypeError, ValueError, RuntimeError) as error:
        Console(stderr=True, highlight=False).print(Text(f"info --kernels: {error}"))
        return 2
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    return 0


def parse(words: list[str], dtype: str, options: list[str]) -> tuple[Any, list[Any]]:
    """The function and the arguments that a command line names."""
    operator, *shapes = words
    if operator not in jaxops.__all__ or not callable(getattr(jaxops, operator)):
        raise ValueError(f"{operator!r} is no operator of jaxops")
    named = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator:
            raise ValueError(f"--option must be NAME=VALUE, got {option!r}")
        try:
            named[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            named[name] = value  # a string without quotes
    arguments = []
    for text in shapes:
        sizes, _, own = text.partition(":")
        try:
            shape = tuple(int(size) for size in sizes.split(",") if size)
        except ValueError:
            raise ValueError(f"a shape must be integers with commas, got {text!r}") from None
        if jnp.dtype(own or dtype) == jnp.float64:
            jax.config.update("jax_enable_x64", True)
        arguments.append(jax.ShapeDtypeStruct(shape, jnp.dtype(own or dtype)))
    function = functools.partial(getattr(jaxops, operator), **named)
    if operator == "concatenate":
        return lambda *arrays: function(arrays), arguments
    return function, arguments


def programs(function: Any, arguments: list[Any]) -> Iterator[tuple[str, Any, list[Any]]]:
    """The value, the gradient with respect to each argument, and all of them: with their names."""
    results = leaves(jax.eval_shape(function, *arguments))
    yield "value", function, arguments
    floats = [i for i, a in enumerate(arguments) if jnp.issubdtype(a.dtype, jnp.floating)]
    for moved in [(i,) for i in floats] + [tuple(floats)] * (len(floats) > 1):
        name = f"gradient with respect to {' and '.join(f'argument {i}' for i in moved)}"
        cotangents = tuple(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in results)
        yield name, vjp_of(function, moved), [cotangents, *arguments]


def collect(function: Any, arguments: list[Any], device: str) -> list[dict[str, Any]]:
    """The calls of every program that no program before has, as JSON would have them."""
    rows = []
    for program, of_program, its_arguments in programs(function, arguments):
        found = kernels.kernels(of_program, *its_arguments, device=device)
        if not found:
            rows.append({"program": program, "call": "no kernel: XLA computes it", "launches": []})
        seen = {row["call"] for row in rows}
        rows += [
            {
                "program": program,
                "call": str(call),
                "launches": [
                    dataclasses.asdict(launch) | {"source": source(launch.kernel)}
                    for launch in launches
                ],
            }
            for call, launches in found.items()
            if str(call) not in seen
        ]
    return rows


@functools.cache
def source(kernel: str) -> str | None:
    """The file of a kernel, if this is a source tree: kernels have names of their own."""
    (name, *_) = re.findall(r"\w+", kernel)
    definition = re.compile(rf"__global__[^;{{}}]*?\b{name}\(")
    for file in sorted((_ROOT / "cuda").rglob("*.cu*")):
        if definition.search(file.read_text()):
            return str(file.relative_to(_ROOT))
    return None


def _show(found: dict[str, list[dict[str, Any]]]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for device, rows in found.items():
        console.print(f"On {device}", style="bold")
        program = None
        for row in rows:
            if row["program"] != program:
                program = row["program"]
                console.print(Text(f"{program}:"))
            console.print(Text(f"  {row['call']}"))
            for launch in row["launches"]:
                sizes = " ".join(
                    f"{key} {'x'.join(map(str, launch[key]))}" for key in ("grid", "threads")
                )
                shared = f"shared bytes {launch['shared_bytes']}"
                where = f"  {launch['source']}" if launch["source"] else ""
                console.print(Text(f"    {launch['kernel']}  {sizes} {shared}{where}"))
