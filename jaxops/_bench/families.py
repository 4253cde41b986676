"""The kernel families of an operator as peers of the one that its dispatch chooses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jaxops._bench.contenders import Call, JaxContender
from jaxops._bench.spec import Benchmark, Case, Direction, Peer
from jaxops.testing import kernels

#: The tables of families that an operator's calls may meet, where they are not called like it.
_TABLES = {
    "col2im": ("col2im", "im2col"),
    "conv2d": ("conv",),
    "im2col": ("im2col", "col2im"),
    "lightweight_conv": ("lightweight_conv", "lightweight_conv_part"),
    "split": ("concatenate",),
}


def with_families(benchmark: Benchmark) -> Benchmark:
    """The benchmark with every kernel family that its operator has in place of its peers."""
    known = kernels.families()
    peers = []
    for table in _TABLES.get(benchmark.operator, (benchmark.operator,)):
        names = dict.fromkeys(name for names in known[table].values() for name in names)
        for name in names:
            peer = Peer(
                f"{table}: {name}",
                benchmark.function,
                declines=functools.partial(_why_not, benchmark, (table, name)),
                family=(table, name),
            )
            peers.append(peer)
    return dataclasses.replace(benchmark, peers=tuple(peers))


def _why_not(
    benchmark: Benchmark,
    family: tuple[str, str],
    case: Case,
    direction: Direction,
    platform: str,
) -> str | None:
    """Why a family is not timed: it cannot run a call of this program, or is in none of them."""
    del platform
    device = _device()
    arguments = jax.eval_shape(functools.partial(benchmark.arguments, case), _key())
    function = benchmark.function(case)
    if direction.wrt:
        value = jax.eval_shape(function, *arguments)
        arguments = (value, *arguments)
    calls = kernels.record(direction.of(function), *arguments, capability=device.compute_capability)
    chosen = [kernels.run(call, device) for call in calls]
    with kernels.forcing(*family):
        forced = [kernels.run(call, device) for call in calls]
    if any(outcome.error for outcome in forced):
        return "cannot run it"
    return "is what dispatch chooses, or in no call" if forced == chosen else None


def _key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))


def _device() -> kernels.Device:
    """The GPU that is here, as it is described."""
    kind = jax.devices("cuda")[0].device_kind
    for device in kernels.DEVICES.values():
        if device.name in kind:
            return device
    raise ValueError(f"jaxops.testing.kernels.DEVICES does not describe {kind}")


class ForcedContender(JaxContender):
    """A compiled function whose calls are run by one kernel family."""

    def __init__(self, function, structs, family: tuple[str, str]) -> None:
        super().__init__(function, structs)
        self._family = family

    def calls(self, argument_sets):
        """See `Contender`."""
        return [functools.partial(self._forced, call) for call in super().calls(argument_sets)]

    def _forced(self, call: Call) -> Any:
        # The handlers run before the family is let go; waiting costs no time of the device.
        with kernels.forcing(*self._family):
            return jax.block_until_ready(call())
