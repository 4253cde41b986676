"""Concatenation and splitting: any number of arrays in one launch, with padding where wanted.

The family has two primitives, each the other's transpose:

    concatenate   arrays -> whole, made of segments: the beginning of an array, or zeros
    split         whole -> parts, each cut out of the whole and followed by zeros

An array whose tangent is zero becomes a segment of zeros, and a part whose cotangent is zero a gap,
so that neither is ever made in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike

from jaxops._core import checks, compat, native, rules
from jaxops._core.primitive import Operator
from jaxops._core.public import public_function

_MAX_SIZE = np.iinfo(np.int64).max


@public_function
def concatenate(
    arrays: Sequence[ArrayLike],
    axis: int | None = 0,
    dtype: DTypeLike | None = None,
    *,
    sizes: Sequence[int] | None = None,
    padded_size: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Joins arrays along an axis: `jax.numpy.concatenate` in one launch, with padded channels.

    The result is, bit for bit,
    ``jnp.concatenate([a[:s] for a, s in zip(arrays, sizes)], axis, dtype)``, the slices taken along
    the axis, followed by zeros up to `padded_size`. Inference engines keep the channels of NHWC
    arrays at multiples of 8 or 16 in this way. Gradients are the matching `split`, zero in padding.

    Args:
      arrays: one or more arrays of any one rank >= 1 and of any dtypes, which promote as in
        jax.numpy; equal in shape but along the axis.
      axis: the axis to join along; None flattens the arrays first.
      dtype: that of the result, to which the arrays are converted first; the promoted one of the
        arrays by default.
      sizes: how many entries of each array along the axis are valid; all of them by default. The
        others are never read.
      padded_size: the result's extent along the axis; the sum of the sizes by default.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      An array of the dtype given, or the promoted one.

    Raises:
      TypeError: something is not an array, or a size not a static integer.
      ValueError: no arrays, or shapes, sizes or the axis do not fit each other.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> jaxops.concatenate([jnp.arange(3), jnp.ones(2)], dtype=jnp.float16)
      Array([0., 1., 2., 1., 1.], dtype=float16)
      >>> skip, up = jnp.ones((2, 8, 8, 12)), jnp.ones((2, 8, 8, 16))  # NHWC
      >>> jaxops.concatenate([skip, up], axis=-1, padded_size=32).shape
      (2, 8, 8, 32)
    """
    name = "concatenate"
    if checks.is_array(arrays):
        if getattr(axis, "ndim", 0):
            raise TypeError(
                f"{name}: axis must be a static integer, got {checks.describe(axis)}; did you "
                "forget the list around the arrays?"
            )
        arrays = list(_array(name, "arrays", arrays))
    if not isinstance(arrays, Sequence):
        raise TypeError(f"{name}: arrays must be a sequence of arrays, got {type(arrays).__name__}")
    if not len(arrays):
        raise ValueError(
            f"{name}: arrays must be one or more arrays, got {checks.describe(arrays)}"
        )
    arrays = [_array(name, f"arrays[{i}]", a) for i, a in enumerate(arrays)]
    if axis is None:
        arrays, axis = [a.ravel() for a in arrays], 0
    rank = arrays[0].ndim
    axis = _axis(name, axis, rank)
    around = _without(arrays[0].shape, axis)
    for i, array in enumerate(arrays):
        if array.ndim != rank or _without(array.shape, axis) != around:
            raise ValueError(
                f"{name}: arrays[{i}] must have the shape of arrays[0] except along axis {axis}, "
                f"{arrays[0].shape}, got {array.shape}"
            )
    extents = [a.shape[axis] for a in arrays]
    sizes = extents if sizes is None else _sizes(name, "sizes", sizes, of="arrays", most=extents)
    total = sum(sizes)
    if padded_size is not None:
        padded_size = checks.integer(name, "padded_size", padded_size, total)
        if padded_size > _MAX_SIZE:
            raise ValueError(
                f"{name}: padded_size must be at most {_MAX_SIZE}, got "
                f"{checks.describe(padded_size)}"
            )
    if dtype is not None:
        joined = checks.dtype(name, "dtype", dtype)
    else:
        joined = arrays[0].dtype
        if any(a.dtype != joined for a in arrays):
            joined = _promoted(name, arrays)
    arrays = [a if a.dtype == joined else _convert(name, a, joined) for a in arrays]
    pieces: list[tuple[jax.Array | None, int]] = list(zip(arrays, sizes, strict=True))
    if padded_size is not None and padded_size > total:
        pieces.append((None, padded_size - total))
    storage = _Storage(arrays[0])
    pieces = [(None if a is None else storage.store(a), size) for a, size in pieces]
    inner = rank - 1 - axis
    whole = _join(pieces, inner + storage.extra_dims, rank + storage.extra_dims)
    return checkpoint_name(storage.restore(whole), name)


@public_function
def split(
    array: ArrayLike,
    sizes: Sequence[int],
    axis: int = 0,
    *,
    padded_sizes: Sequence[int] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Cuts an array into neighbouring parts along an axis, in one launch: undoes `concatenate`.

    Part i is ``array[sum(sizes[:i]) : sum(sizes[: i + 1])]`` along the axis, bit for bit, followed
    by zeros up to ``padded_sizes[i]``.

    Args:
      array: any rank >= 1, any dtype.
      sizes: the extents of the parts along the axis; they sum to the array's.
      axis: the axis to cut.
      padded_sizes: the extents of the results, not less than `sizes`, which are the default.
      implementation: None, "native" or "xla", see `jaxops.use_implementation`.

    Returns:
      A tuple with one array a size.

    Raises:
      TypeError: something is not an array, or a size not a static integer.
      ValueError: the sizes do not sum to the array's extent, or do not fit the padded ones.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxops
      >>> jaxops.split(jnp.arange(5.0), [2, 3])
      (Array([0., 1.], dtype=float32), Array([2., 3., 4.], dtype=float32))
    """
    name = "split"
    array = _array(name, "array", array)
    axis = _axis(name, axis, array.ndim)
    sizes = _sizes(name, "sizes", sizes)
    if sum(sizes) != array.shape[axis]:
        raise ValueError(
            f"{name}: sizes must sum to {array.shape[axis]}, the extent of array {array.shape} "
            f"along axis {axis}, got {checks.describe(tuple(sizes))}, whose sum is "
            f"{checks.describe(sum(sizes))}"
        )
    extents = sizes
    if padded_sizes is not None:
        extents = _sizes(name, "padded_sizes", padded_sizes, of="sizes", least=sizes)
    starts = itertools.accumulate(sizes[:-1], initial=0)
    parts = tuple(zip(starts, sizes, extents, strict=True)) if sizes else ()
    storage = _Storage(array)
    rank = array.ndim + storage.extra_dims
    results = _cut(storage.store(array), parts, rank - 1 - axis, rank)
    return tuple(checkpoint_name(storage.restore(r), name) for r in results)


def _array(function: str, argument: str, value: Any) -> jax.Array:
    if not checks.is_array(value):
        raise TypeError(f"{function}: {argument} must be an array, got {type(value).__name__}")
    array = checks.as_array(function, argument, value)
    if array.ndim == 0:
        raise ValueError(f"{function}: {argument} must have one dimension or more, got a scalar")
    return array


def _convert(function: str, array: jax.Array, dtype: Any) -> jax.Array:
    try:
        return array.astype(dtype)
    except (TypeError, ValueError, NotImplementedError) as error:  # such as of random keys
        raise TypeError(
            f"{function}: arrays of dtype {array.dtype} cannot be converted to dtype {dtype}"
        ) from error


def _promoted(function: str, arrays: Sequence[jax.Array]) -> Any:
    try:
        return jnp.result_type(*arrays)
    except (TypeError, ValueError) as error:
        dtypes = ", ".join(dict.fromkeys(str(a.dtype) for a in arrays))
        raise TypeError(
            f"{function}: arrays must have dtypes that promote to one as in jax.numpy, got {dtypes}"
        ) from error


def _axis(function: str, axis: Any, rank: int) -> int:
    return checks.integer(function, "axis", axis, -rank, rank - 1) % rank


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _sizes(
    function: str,
    name: str,
    sizes: Any,
    *,
    of: str = "",
    least: Sequence[int] | None = None,
    most: Sequence[int] | None = None,
) -> list[int]:
    """Static sizes; with bounds, one for each entry of the argument `of`."""
    if not (checks.is_sequence(sizes) or (isinstance(sizes, jax.Array) and sizes.ndim == 1)):
        raise TypeError(
            f"{function}: {name} must be a sequence of integers, got {checks.describe(sizes)}"
        )
    lows = [0] * len(sizes if most is None else most) if least is None else least
    highs = [None] * len(lows) if most is None else most
    if len(sizes) != len(lows):
        raise ValueError(
            f"{function}: {name} must have one entry for each of the {len(lows)} {of}, got "
            f"{len(sizes)}"
        )
    return [
        checks.integer(function, f"{name}[{i}]", size, low, high)
        for i, (size, low, high) in enumerate(zip(sizes, lows, highs, strict=True))
    ]


class _Storage:
    """The dtype as which arrays like `array` are moved: kernels move whole bytes."""

    def __init__(self, array: jax.Array):
        self._dtype = dtype = array.dtype
        self._key_impl = None
        self._bytes = None  # a dtype of whole bytes that holds every value
        self.extra_dims = 0
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            # The words of a key are dimensions after its own.
            self._key_impl = jax.random.key_impl(array)
            self.extra_dims = jax.eval_shape(jax.random.key_data, array).ndim - array.ndim
        elif jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
            signed = jnp.issubdtype(dtype, jnp.signedinteger)
            self._bytes = jnp.int8 if signed else jnp.uint8
        elif jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
            self._bytes = jnp.float8_e4m3fn

    def store(self, array: jax.Array) -> jax.Array:
        if self._key_impl is not None:
            return jax.random.key_data(array)
        return array if self._bytes is None else array.astype(self._bytes)

    def restore(self, array: jax.Array) -> jax.Array:
        if self._key_impl is not None:
            return jax.random.wrap_key_data(array, impl=self._key_impl)
        return array if self._bytes is None else array.astype(self._dtype)


# --- concatenate: arrays -> whole ----------------------------------------------------------------

# A segment of the whole: an array, of which the first entries along the axis are taken, or None for
# zeros; and how many entries.
_Piece = tuple[jax.Array | None, int]


def _join(pieces: Sequence[_Piece], inner: int, rank: int) -> jax.Array:
    """The whole of `rank` dimensions that segments make; `inner` of them follow the axis."""
    most = native.limits("concatenate").max_pieces
    if len(pieces) > most:
        groups = [pieces[i : i + most] for i in range(0, len(pieces), most)]
        return _join([_as_piece(group, inner, rank) for group in groups], inner, rank)
    arrays = [array for array, _ in pieces if array is not None]
    numbers = itertools.count()
    (whole,) = _concatenate_operator(
        *arrays,
        rank=rank,
        inner=inner,
        sizes=tuple(size for _, size in pieces),
        sources=tuple(-1 if array is None else next(numbers) for array, _ in pieces),
    )
    return whole


def _as_piece(pieces: Sequence[_Piece], inner: int, rank: int) -> _Piece:
    if len(pieces) == 1:
        return pieces[0]
    total = sum(size for _, size in pieces)
    return (None if all(a is None for a, _ in pieces) else _join(pieces, inner, rank), total)


def _dims(rank: int, inner: int, along: str) -> str:
    """The dimensions of an array, `along` being the one to join or cut."""
    names = [f"dim{i}" for i in range(rank)]
    names[rank - 1 - inner] = along
    return " ".join(names)


def _concatenate_signature(*, rank, inner, sizes, sources):
    arrays = ", ".join(_dims(rank, inner, f"part{i}") for i in range(max(sources) + 1))
    return f"{arrays} -> {_dims(rank, inner, f'whole={sum(sizes)}')}"


def _concatenate_reference(*arrays, inner, sizes, sources, **_):
    axis = -1 - inner
    batch = lax.broadcast_shapes(*(_without(a.shape, a.ndim + axis) for a in arrays))

    def piece(source, size):
        first = arrays[0] if source < 0 else arrays[source]
        shape = list(batch)
        shape.insert(first.ndim + axis, size)
        if source < 0:
            return jnp.zeros(shape, first.dtype)
        return jnp.broadcast_to(jax.lax.slice_in_dim(first, 0, size, axis=axis), shape)

    return [jnp.concatenate(list(map(piece, sources, sizes)), axis)]


_concatenate_operator = Operator(
    "concatenate",
    signature=_concatenate_signature,
    reference=_concatenate_reference,
    dtypes=lambda first, *_, **__: [first.dtype],
    attributes=lambda *, inner, sizes, sources, **_: {
        "inner": np.int64(inner),
        "sizes": np.array(sizes, np.int64),
        "sources": np.array(sources, np.int64),
    },
    replicated=("part", "whole"),
)


@_concatenate_operator.def_jvp
def _concatenate_jvp(primals, tangents, *, rank, inner, sizes, sources):
    (whole,) = _concatenate_operator(*primals, rank=rank, inner=inner, sizes=sizes, sources=sources)
    tangents = rules.nonzero(tangents, len(primals))
    pieces = [
        (None if source < 0 else tangents[source], size)
        for source, size in zip(sources, sizes, strict=True)
    ]
    # Arrays without tangent may be all that varies along a batch dimension.
    return [whole], [rules.match_type(_join(pieces, inner, rank), jax.typeof(whole), rank)]


@_concatenate_operator.def_transpose
def _concatenate_transpose(cotangents, *arrays, rank, inner, sizes, sources):
    (whole,) = cotangents
    if isinstance(whole, compat.Zero):
        return rules.zeros(arrays)
    starts = itertools.accumulate(sizes, initial=0)
    extents = [a.aval.shape[a.aval.ndim - 1 - inner] for a in arrays]
    parts = [
        (start, size, extents[source])
        for start, size, source in zip(starts, sizes, sources, strict=False)
        if source >= 0
    ]
    return [
        rules.match_type(part, array.aval, rank)
        for part, array in zip(_cut(whole, parts, inner, rank), arrays, strict=True)
    ]


# --- split: whole -> parts -----------------------------------------------------------------------

# A part of the whole: where it starts along the axis, how many entries it takes, and the extent up
# to which zeros follow them. Parts are in order and do not overlap.
_Part = tuple[int, int, int]


def _cut(whole: jax.Array, parts: Sequence[_Part], inner: int, rank: int) -> list[jax.Array]:
    """The parts of a whole of `rank` dimensions, of which `inner` follow the axis."""
    most = native.limits("concatenate").max_parts
    return [
        result
        for i in range(0, len(parts), most)
        for result in _split_operator(
            whole, rank=rank, inner=inner, parts=tuple(parts[i : i + most])
        )
    ]


def _split_signature(*, rank, inner, parts):
    results = ", ".join(
        _dims(rank, inner, f"part{i}={extent}") for i, (*_, extent) in enumerate(parts)
    )
    return f"{_dims(rank, inner, 'whole')} -> {results}"


def _split_reference(whole, *, inner, parts, **_):
    axis = whole.ndim - 1 - inner

    def part(start, size, extent):
        widths = [(0, 0)] * whole.ndim
        widths[axis] = (0, extent - size)
        return jnp.pad(jax.lax.slice_in_dim(whole, start, start + size, axis=axis), widths)

    return list(itertools.starmap(part, parts))


_split_operator = Operator(
    "split",
    signature=_split_signature,
    reference=_split_reference,
    dtypes=lambda whole, *, parts, **_: [whole.dtype] * len(parts),
    attributes=lambda *, inner, parts, **_: {
        "inner": np.int64(inner),
        "starts": np.array([start for start, *_ in parts], np.int64),
        "sizes": np.array([size for _, size, _ in parts], np.int64),
    },
    replicated=("part", "whole"),
)


@_split_operator.def_jvp
def _split_jvp(primals, tangents, **params):
    return _split_operator(*primals, **params), _split_operator(*tangents, **params)


@_split_operator.def_transpose
def _split_transpose(cotangents, whole, *, rank, inner, parts):
    found = rules.nonzero(cotangents, len(parts))
    pieces: list[_Piece] = []
    end = 0
    for (start, size, _), cotangent in zip(parts, found, strict=True):
        if cotangent is None:
            continue
        if start > end:
            pieces.append((None, start - end))
        pieces.append((cotangent, size))
        end = start + size
    if not pieces:
        return rules.zeros((whole,))
    extent = whole.aval.shape[whole.aval.ndim - 1 - inner]
    if extent > end:
        pieces.append((None, extent - end))
    return [rules.match_type(_join(pieces, inner, rank), whole.aval, rank)]


@_split_operator.def_dead_code
def _split_dead_code(used, whole, *, rank, inner, parts):
    kept = tuple(itertools.compress(parts, used))
    return _split_operator, (0,), {"rank": rank, "inner": inner, "parts": kept}
