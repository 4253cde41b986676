"""Flax layers over the operators of jaxops: `jaxops.flax.linen` and `jaxops.flax.nnx`."""

try:
    import flax as _  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError(
        "jaxops.flax needs Flax, which is not installed: pip install jaxops[flax]", name="flax"
    ) from error

from jaxops.flax import linen, nnx

__all__ = ["linen", "nnx"]
