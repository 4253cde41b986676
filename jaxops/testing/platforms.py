"""The platforms with handlers, and which of them this machine can run."""

from __future__ import annotations

import dataclasses
import os

import jax

from jaxops._core import compat, native

NAMES = tuple(native.PLATFORMS)
_HOST_DEVICES = "--xla_force_host_platform_device_count"


def prepare() -> None:
    """Float64, and eight virtual CPU devices unless the environment says how many.

    To be called before JAX makes its backends, which is when it reads the environment.
    """
    jax.config.update("jax_enable_x64", True)
    flags = os.environ.get("XLA_FLAGS", "")
    if _HOST_DEVICES not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_HOST_DEVICES}=8".strip()
    chosen = compat.setting("jax_platforms")
    if chosen and "cpu" not in chosen.split(","):
        # The references run there.
        jax.config.update("jax_platforms", f"{chosen},cpu")


@dataclasses.dataclass(frozen=True)
class Platform:
    """A platform that operators run on natively here, and its devices."""

    name: str
    devices: tuple[jax.Device, ...]

    @property
    def device(self) -> jax.Device:
        """The device of everything that needs only one."""
        return self.devices[0]

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Absent:
    """A platform that cannot be checked here."""

    name: str
    reason: str


def find(name: str) -> Platform | Absent:
    """The platform called `name`, or why it is not to be had."""
    try:
        devices = tuple(jax.devices(name))
    except (RuntimeError, AssertionError) as error:
        # JAX asserts that there is a device where it was told to look for NVIDIA GPUs only.
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        return Absent(name, f"JAX has no {name} device here: {first_line}")
    reason = native.missing_kernels(name)
    return Platform(name, devices) if reason is None else Absent(name, reason)
