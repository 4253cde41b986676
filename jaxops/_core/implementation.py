"""Which implementation calls run: the kernels of this library, or plain JAX.

The choice is made when a call is traced. "xla" then writes the definition of an operator into the
program, in `jax.numpy`, and no primitive of this library. Otherwise the program has the operator's
primitive, and "native" stands in it as the parameter `needs_kernels`, with which its derivatives
are made and its lowering refuses to do without kernels. A traced program therefore keeps what it
was traced with.

The setting is a user context of JAX: it belongs to a thread, and every cache of JAX has it in its
key, so that a jitted function is traced again under another setting.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax

from jaxops._core import checks

#: The environment variable with the implementation of the whole process.
VARIABLE = "JAXOPS_IMPLEMENTATION"

NAMES = (None, "native", "xla")


class _Setting(NamedTuple):
    """An implementation, and under "native" the public function that insists on kernels."""

    name: str | None
    function: str | None = None


def _from_environment() -> _Setting:
    value = os.environ.get(VARIABLE) or None
    name = value and value.lower()
    if name not in NAMES:
        raise ValueError(f"{VARIABLE} must be 'native' or 'xla', or not be set, got {value!r}")
    return _Setting(name)


_setting = jax.make_user_context(_from_environment())


@contextlib.contextmanager
def use_implementation(implementation: str | None) -> Generator[None]:
    """Chooses the implementation of all calls in this context, in this thread.

    Programs that are traced in it keep it, and `jax.jit` traces a function again for each setting.
    It also serves as a decorator. An argument ``implementation=`` of a call comes before it, and it
    before the environment variable JAXOPS_IMPLEMENTATION, which is read by ``import jaxops``.

    Args:
      implementation: "xla" for plain `jax.numpy` and `jax.lax`, without any custom call, on every
        platform; "native" for kernels, with a NotImplementedError where there are none; None for
        kernels where there are some, and plain `jax.numpy` elsewhere.

    Raises:
      ValueError: the implementation is none of these.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> x, weight = jnp.ones((1, 4, 2)), jnp.ones((2, 3))
      >>> with jaxops.use_implementation("xla"):
      ...     y = jaxops.lightweight_conv(x, weight)
      >>> bool(jnp.allclose(y, jaxops.lightweight_conv(x, weight)))
      True
    """
    name = checks.choice("use_implementation", "implementation", implementation, NAMES)
    with _setting(_Setting(name)):
        yield


def of_call(function: str, implementation: Any) -> contextlib.AbstractContextManager[None] | None:
    """The context of a call of a public function, None where it is that of its surroundings."""
    around = _setting.value
    if implementation is None:
        # A function that another one calls, such as that of a whole sequence that a step calls,
        # fails in its name.
        if around.name != "native" or around.function is not None:
            return None
        implementation = around.name
    name = checks.choice(function, "implementation", implementation, NAMES)
    return _setting(_Setting(name, function))


def is_xla() -> bool:
    """Whether calls are written as plain JAX."""
    return _setting.value.name == "xla"


def needs_kernels(operator: str) -> str | None:
    """The public function that insists on kernels; the operator's name outside of any."""
    name, function = _setting.value
    return (function or operator) if name == "native" else None


def insists() -> bool:
    """Whether kernels are insisted on."""
    return _setting.value.name == "native"


def as_bound(needs_kernels: str | None) -> contextlib.AbstractContextManager[None]:
    """The context in which a call was bound that has this parameter."""
    bound = _Setting(None) if needs_kernels is None else _Setting("native", needs_kernels)
    return contextlib.nullcontext() if _setting.value == bound else _setting(bound)


def applied(needs_kernels: str | None, function: Callable) -> Callable:
    """`function`, which runs as a call was bound, in whichever thread."""

    def run(*arguments: Any) -> Any:
        with as_bound(needs_kernels):
            return function(*arguments)

    return run
