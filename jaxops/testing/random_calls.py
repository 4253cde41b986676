"""One call of an operator, compared with its definition in all that JAX makes of it."""

from __future__ import annotations

import jax

from jaxops.testing.capabilities import Batched
from jaxops.testing.measure import (
    assert_close,
    compile_without_loops,
    cotangents_for,
    custom_calls,
    hasty_options,
    host,
    jvp_of,
    on_reference,
    vjp_of,
)
from jaxops.testing.platforms import Platform
from jaxops.testing.spec import OperatorSpec


def check_call(
    spec: OperatorSpec, platform: Platform, dtype: str, axes: tuple[int | None, ...]
) -> None:
    """Raises AssertionError unless the call is right, alone and under `jax.vmap`.

    Value, gradients and JVP with respect to all differentiable arguments come from one program, and
    from another one for the call that is batched over `axes`, those of the cotangents and of the
    arguments. On CPUs both programs call the same handlers about as often, because XLA merges equal
    calls, but not always in both; on GPUs the size of a call may decide.
    """
    arguments = spec.case(dtype)
    inputs = (cotangents_for(spec, arguments), *arguments)

    def everything_of(function):
        def everything(cotangents, *arguments):
            # Exact in every dtype, so that both programs have the same ones, and of another scale
            # for each argument, so that one cannot stand for another.
            tangents = [arguments[i] / -(2 << n) for n, i in enumerate(spec.differentiable)]
            return (
                vjp_of(function, spec.differentiable)(cotangents, *arguments),
                jvp_of(function, spec.differentiable)(tangents, *arguments)[1],
            )

        return everything

    ours, reference = map(everything_of, (spec.function, spec.reference))
    batch = Batched(spec, arguments, [axes])
    cases = {
        "the call": (ours, inputs, on_reference(reference, *inputs)),
        f"vmap over in_axes {axes}, cotangents first": (
            batch.nest(ours),
            batch.inputs,
            batch.loop(lambda *entry: on_reference(reference, *entry)),
        ),
    }
    # A tangent is a sum of one for each argument, and these are rounded.
    roundings = spec.vjp_roundings + len(spec.differentiable)
    terms = spec.vjp_terms(*arguments)
    counts = {}
    for what, (function, given, want) in cases.items():
        placed = jax.device_put(given, platform.device)
        program = compile_without_loops(function, *placed, options=hasty_options(platform))
        counts[what] = custom_calls(program)
        got = host(program(*placed))
        assert_close(got, want, what, dtype=dtype, terms=terms, roundings=roundings)
    alone, batched = counts.values()
    similar = alone.keys() == batched.keys() and all(batched[n] < 2 * alone[n] for n in alone)
    assert similar or platform.name == "cuda", (
        f"the call runs the handlers {alone}, under vmap {batched}"
    )
