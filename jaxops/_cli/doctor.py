"""Finds what keeps kernels from running on this machine, and says what to do about it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from jaxops._core import native

#: The first driver of each CUDA generation, by NVIDIA's table of compatibility, newest first.
OLDEST_DRIVERS = {13: 580, 12: 525}
_PREFIXES = ("CUDA_VISIBLE_DEVICES", "JAXOPS_", "JAX_", "XLA_")
_WSL = "/usr/lib/wsl/lib/nvidia-smi"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU that the driver has, such as one of compute capability "9.0"."""

    name: str
    capability: str
    driver: str

    @property
    def driver_generation(self) -> int:
        """The first number of the driver's version."""
        return int(self.driver.split(".")[0])


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fact; with `advice` it is a problem, and the advice says what to do."""

    fact: str
    advice: str | None = None


def gpus() -> list[Gpu]:
    """The GPUs that NVIDIA's driver has, whether JAX sees them or not."""
    command = shutil.which("nvidia-smi") or (_WSL if os.path.exists(_WSL) else None)
    if command is None:
        return []
    query = [command, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []  # as on a machine with the program and no driver
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [
        Gpu(*row)
        for row in rows
        if len(row) == 3 and re.fullmatch(r"\d+\.\d+", row[1]) and row[2][:1].isdigit()
    ]


def device_files() -> list[str]:
    """The files of GPUs, which a container may have without `nvidia-smi`."""
    return sorted(str(file) for file in pathlib.Path("/dev").glob("nvidia[0-9]*"))


def plugins() -> dict[str, str]:
    """JAX's CUDA plugins that are installed, and their versions."""
    found = {}
    for generation in OLDEST_DRIVERS:
        name = f"jax-cuda{generation}-plugin"
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    """The variables that are set and that steer JAX or jaxops."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def diagnose(found: dict[str, Any]) -> list[Finding]:
    """Judges the facts that `info.collect` found."""
    driver_gpus = [Gpu(**gpu) for gpu in found["gpus"]]
    sees_gpu = any(device["platform"] == "gpu" for device in found["devices"])
    handlers = {handler["platform"]: handler for handler in found["handlers"]}
    findings = [_no_device(found)] if found["devices_error"] else []
    findings.append(_kernels(handlers["cpu"]))
    if not (driver_gpus or sees_gpu or found["gpu_files"]):
        # For GPUs of other machines the module may be here or not: both are right.
        of_gpus = _kernels(handlers["cuda"])
        findings.append(Finding(of_gpus.fact))
        findings.append(Finding("there is no NVIDIA GPU here, and none is needed"))
        return findings
    if driver_gpus:
        findings += _driver(driver_gpus, handlers["cuda"])
    elif not sees_gpu:
        findings.append(
            Finding(
                f"{', '.join(found['gpu_files'])}: a GPU, but no driver answers nvidia-smi",
                "Install NVIDIA's driver; a container needs the NVIDIA container toolkit.",
            )
        )
    if sees_gpu:
        findings.append(Finding("JAX sees the GPU"))
    elif driver_gpus:
        findings.append(_hidden(found, driver_gpus[0]))
    findings += _plugins(found)
    findings.append(_kernels(handlers["cuda"]))
    if handlers["cuda"]["available"] and not handlers["cuda"]["reason"]:
        findings += _architectures(driver_gpus)
    return findings


def _no_device(found: dict[str, Any]) -> Finding:
    platforms = found["environment"].get("JAX_PLATFORMS")
    advice = "Install JAX again: pip install -U jax."
    if platforms:
        advice = f"Unset JAX_PLATFORMS, which is {platforms!r}, or set it to 'cpu'."
    return Finding(f"JAX has no device: {found['devices_error']}", advice)


def _kernels(handlers: dict[str, Any]) -> Finding:
    platform = handlers["platform"]
    if handlers["reason"] is None:
        count = len(handlers["targets"])
        return Finding(f"kernels for {platform}: {handlers['build']}, {count} handlers")
    fact, separator, advice = handlers["reason"].partition(" Rebuild ")
    if separator:
        return Finding(f"no kernels for {platform}: {fact}", f"Rebuild {advice}")
    return Finding(f"no kernels for {platform}: {fact}", "Operators run in plain JAX until then.")


def _driver(driver_gpus: Sequence[Gpu], handlers: dict[str, Any]) -> Iterator[Finding]:
    """The driver, and whether it is new enough for the CUDA that the module was built with."""
    gpu = driver_gpus[0]
    names = ", ".join(f"{g.name} ({g.capability})" for g in driver_gpus)
    fact = f"driver {gpu.driver}: {names}"
    built = re.match(r"CUDA (\d+)", handlers["build"] or "")
    oldest = OLDEST_DRIVERS.get(int(built[1])) if built else None
    if oldest and gpu.driver_generation < oldest:
        yield Finding(
            f"{fact}; the kernels were built with CUDA {built and built[1]}",
            f"Update the driver to {oldest} or later, or rebuild jaxops with an older nvcc.",
        )
    else:
        yield Finding(fact)


def _hidden(found: dict[str, Any], gpu: Gpu) -> Finding:
    """Why JAX does not see a GPU that the driver has."""
    fact = "JAX does not see the GPU"
    variables = found["environment"]
    platforms = variables.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return Finding(f"{fact}: JAX_PLATFORMS is {platforms!r}", "Unset JAX_PLATFORMS.")
    if variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding(f"{fact}: CUDA_VISIBLE_DEVICES hides it", "Unset CUDA_VISIBLE_DEVICES.")
    runs = [g for g, oldest in OLDEST_DRIVERS.items() if gpu.driver_generation >= oldest]
    if not runs:
        oldest = min(OLDEST_DRIVERS.values())
        return Finding(f"{fact}: its driver is too old", f"Update the driver to {oldest} or later.")
    install = f"pip install -U 'jax[cuda{runs[0]}]'"
    if not found["plugins"]:
        return Finding(f"{fact}: JAX's CUDA plugin is not installed", f"{install}.")
    if not any(f"jax-cuda{generation}-plugin" in found["plugins"] for generation in runs):
        return Finding(f"{fact}: driver {gpu.driver} is too old for the plugin", f"{install}.")
    return Finding(
        fact, "python -c \"import jax; print(jax.devices('cuda'))\" shows JAX's own error."
    )


def _plugins(found: dict[str, Any]) -> Iterator[Finding]:
    """Plugins of another version than jaxlib's, which JAX refuses or warns of."""
    jaxlib = found["versions"]["jaxlib"]
    for name, version in found["plugins"].items():
        if version == jaxlib:
            yield Finding(f"{name} {version} is of jaxlib's version")
        else:
            generation = re.findall(r"\d+", name)[0]
            yield Finding(
                f"{name} is {version}, and jaxlib {jaxlib}",
                f"pip install -U 'jax[cuda{generation}]=={found['versions']['jax']}'.",
            )


def _architectures(driver_gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Whether the CUDA module has code for each kind of GPU that the driver has."""
    built = ", ".join(native.cuda_architectures())
    for gpu in {gpu.name: gpu for gpu in driver_gpus}.values():
        if native.has_code(gpu.capability):
            yield Finding(f"{gpu.name} ({gpu.capability}) runs code for sm {built}")
        else:
            yield Finding(
                f"{gpu.name} ({gpu.capability}) runs no code for sm {built}",
                "Rebuild jaxops on this machine with `pip install .` in its source tree.",
            )
