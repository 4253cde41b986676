"""Every name that JAX does not promise to keep, and the version differences between them.

Nothing else in jaxops imports from `jax._src`, `jax.interpreters`, `jax.extend` or
`jax.experimental`: when a JAX release moves something, this is the file to mend.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

#: The oldest and the newest JAX that CI runs the tests with.
TESTED_JAX = ("0.10.2", "0.12.0.1")

try:
    from jax._src.ad_checkpoint import name_p as _name_p
    from jax._src.core import Literal as _Literal
    from jax._src.core import ShapedArray
    from jax._src.core import is_constant_shape as _is_constant_shape
    from jax._src.custom_partitioning import (
        _ShardingCallbackInfo,  # pyright: ignore[reportPrivateUsage]: JAX has no public name for it
    )
    from jax._src.dispatch import prim_requires_devices_during_lowering as _needs_devices
    from jax._src.dispatch import simple_impl as _simple_impl
    from jax._src.interpreters.mlir import lower_with_sharding_in_types as _lower_with_sharding
    from jax._src.mesh import thread_resources as _thread_resources
    from jax.experimental import jet
    from jax.experimental.custom_partitioning import custom_partitioning
    from jax.experimental.xla_metadata import set_xla_metadata
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir
    from jax.interpreters import partial_eval as pe
    from jax.interpreters.ad import Zero, is_undefined_primal
except ImportError as error:
    raise ImportError(
        f"jaxops uses names that JAX does not promise to keep, and jax {jax.__version__} lacks "
        f"one: {error}. jaxops is tested with jax {TESTED_JAX[0]} to {TESTED_JAX[1]}: upgrade "
        f"jaxops, or pip install 'jax>={TESTED_JAX[0]},<={TESTED_JAX[1]}'."
    ) from error

# `checkpoint_name`, in which results are wrapped, is linear, but JAX (0.10 to 0.12) has no rule for
# its transpose: without one `jax.linear_transpose` and linear solvers would stop at it. Neither has
# it one for Taylor series, which pass through it.
ad.primitive_transposes.setdefault(_name_p, lambda ct, x, *, name: [ct])
jet.jet_rules.setdefault(_name_p, lambda x, series, *, name: (x[0], series[0]))

__all__ = [
    "TESTED_JAX",
    "Primitive",
    "Settings",
    "ShapedArray",
    "Zero",
    "ad",
    "batching",
    "custom_partitioning",
    "def_dead_code",
    "def_jet",
    "exporting",
    "gpu_capabilities",
    "has_explicit_axes",
    "has_symbolic_shape",
    "is_manual",
    "is_undefined_primal",
    "let_pickle",
    "literal",
    "lower_as_on_one_device",
    "make_varying",
    "mesh_shapes",
    "mlir",
    "needs_devices_to_lower",
    "partitions",
    "platforms",
    "reshard_like",
    "run_eagerly",
    "shard_like_last",
    "varying_axes",
    "with_metadata",
    "with_output_sharding",
    "without_mesh",
]


def run_eagerly(primitive: Primitive) -> None:
    """Lets `primitive` be called outside `jit`: it is compiled on its own and cached."""
    _simple_impl(primitive)


def needs_devices_to_lower(primitive: Primitive) -> None:
    """Custom partitioning asks for the device assignment while it lowers."""
    _needs_devices.add(primitive)


def def_dead_code(primitive: Primitive, rule) -> None:
    """Registers rule(used_outputs, equation) -> (used_inputs, equation or None).

    From jax 0.12 on JAX also passes which inputs are live, between the two.
    """
    pe.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])


def def_jet(primitive: Primitive, rule) -> None:
    """Registers rule(primals, series, **params) of `jax.experimental.jet`.

    A series has the Taylor coefficients of an operand, from the first order on.
    """
    jet.jet_rules[primitive] = rule


class _KeptAlive:
    """An object that XLA's callbacks refer to during compilation; pickled, it is nothing.

    JAX pickles whatever it keeps alive with an executable where that is serialised, and partition
    functions hold MLIR's context, which has no pickle. A compiled program needs them no more.
    """

    def __init__(self, kept=None):
        self.kept = kept

    def __reduce__(self):
        return _KeptAlive, ()


def let_pickle(ctx) -> None:
    """Lets executables of what is being lowered be serialised in spite of partition functions."""
    kept = ctx.module_context.keepalives
    kept[:] = [_KeptAlive(k) if isinstance(k, _ShardingCallbackInfo) else k for k in kept]


def reshard_like(array: jax.Array, like: ShapedArray) -> jax.Array:
    """On explicit meshes, moves `array` to the sharding that the type `like` promises."""
    if like.sharding.mesh.empty or jax.typeof(array).sharding == like.sharding:
        return array
    if not any(t == jax.sharding.AxisType.Explicit for t in like.sharding.mesh.axis_types):
        return array
    return jax.sharding.reshard(array, like.sharding)


def has_explicit_axes(array: jax.Array) -> bool:
    """Whether an array is on a mesh of which axes are explicit."""
    return jax.sharding.AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types


def has_symbolic_shape(value) -> bool:
    """Whether a dimension of an array or its type is an expression of `jax.export`."""
    return not _is_constant_shape(getattr(value, "shape", ()))


def literal(value):
    """The number that a traced scalar is known to be while it is traced, else None."""
    found = getattr(value, "val", None)
    if isinstance(found, _Literal):
        return found.val
    # On explicit meshes it is given the sharding of what it is a cotangent of.
    made_by = getattr(value, "parent", None)
    if made_by is None or made_by.primitive.name != "reshard":
        return None
    return literal(made_by.in_tracers[0])


def shard_like_last(vector, like: jax.Array):
    """On explicit meshes, `vector` sharded like the last dimension of `like`."""
    sharding = jax.typeof(like).sharding
    if not any(t == jax.sharding.AxisType.Explicit for t in sharding.mesh.axis_types):
        return vector
    last = jax.sharding.PartitionSpec(sharding.spec[-1])
    return jax.sharding.reshard(vector, jax.sharding.NamedSharding(sharding.mesh, last))


def with_metadata(function, **entries: str):
    """`function`, whose operations carry these entries as attributes when they are lowered."""

    def run(*arrays):
        with set_xla_metadata(**entries):
            return function(*arrays)

    return run


def setting(name: str) -> Any:
    """A setting of `jax.config`, whose attributes are made when JAX is imported."""
    return getattr(jax.config, name)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The user's settings that decide what a function is traced to.

    They belong to a thread, and XLA calls the function that partitions in a thread of its own.
    """

    x64: bool
    matmul_precision: str | None

    @classmethod
    def current(cls) -> Settings:
        """The settings of this thread."""
        return cls(setting("jax_enable_x64"), setting("jax_default_matmul_precision"))

    def applied(self, function):
        """`function`, which runs under these settings."""

        def run(*arguments):
            with jax.enable_x64(self.x64), jax.default_matmul_precision(self.matmul_precision):
                return function(*arguments)

        return run


def mesh_shapes(ctx) -> tuple:
    """The axes of the meshes that a partitioned call may refer to, with their sizes."""
    context = ctx.module_context.axis_context
    meshes = [getattr(context, "abstract_mesh", None), getattr(context, "mesh", None)]
    meshes.append(_thread_resources.env.physical_mesh)
    return tuple(None if mesh is None else tuple(mesh.shape.items()) for mesh in meshes)


def gpu_capabilities() -> set[str]:
    """The compute capabilities of the NVIDIA GPUs here, such as "9.0"."""
    try:
        return {device.compute_capability for device in jax.devices("cuda")}
    except (RuntimeError, AssertionError):  # there are none; some releases assert that there are
        return set()


def exporting(ctx) -> bool:
    """Whether a lowering is for `jax.export`."""
    return ctx.module_context.lowering_parameters.for_export


def platforms(ctx) -> tuple[str, ...]:
    """The platforms that a lowering is for."""
    return tuple(ctx.module_context.platforms)


def partitions(ctx) -> bool:
    """Whether XLA partitions what is being lowered: not on one device, nor within `shard_map`.

    Within a `shard_map` over some axes of a mesh it partitions over the others.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        return context.mesh.size > 1 and set(context.manual_axes) != set(context.mesh.axis_names)
    return isinstance(context, mlir.ShardingContext) and context.num_devices > 1


def is_manual(aval: ShapedArray) -> bool:
    """Whether it is a shard of a `shard_map`, over all axes of a mesh or some."""
    return jax.sharding.AxisType.Manual in aval.sharding.mesh.axis_types


def varying_axes(aval: ShapedArray) -> frozenset:
    """The manual mesh axes of a `shard_map` over which a value differs between devices."""
    return aval.manual_axis_type.varying


def make_varying(operands: list) -> list:
    """Casts operands so that all vary over the same manual axes, as `check_vma` wants.

    The transpose of the cast sums the cotangent over the axes that were added, which is where the
    gradient of a replicated weight gets its all-reduce.
    """
    axes = [varying_axes(jax.typeof(x)) for x in operands]
    union = frozenset().union(*axes)
    return [
        jax.lax.pcast(x, tuple(sorted(union - own, key=str)), to="varying") if union - own else x
        for x, own in zip(operands, axes, strict=True)
    ]


_without_mesh = Primitive("without_mesh")
_without_mesh.multiple_results = True


def without_mesh(function):
    """`function` of arrays, traced and lowered as if no explicit mesh were set.

    The computation of one device on its shards knows nothing of the user's mesh, yet JAX traces it,
    and the reducer of every `psum` in it, inside the user's mesh context.
    """
    return lambda *shards: _without_mesh.bind(*shards, function=function)


_NO_MESH = jax.sharding.AbstractMesh((), ())


@_without_mesh.def_abstract_eval
def _without_mesh_abstract_eval(*shards, function):
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        results = jax.eval_shape(
            function, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shards)
        )
    return [ShapedArray(r.shape, r.dtype) for r in results]


def _without_mesh_lowering(ctx, *values, function):
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return mlir.lower_fun(function, multiple_results=True)(ctx, *values)


mlir.register_lowering(_without_mesh, _without_mesh_lowering)


def lower_as_on_one_device(function):
    """The lowering of `function` for values of a `shard_map` as if there were none around it.

    Its values would vary over a mesh or not, and JAX sums what its derivatives give to those that
    do not vary. The operator that is being lowered has its own rules for that.
    """

    def lower(ctx, *values, **params):
        types = [ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            return mlir.lower_fun(function, multiple_results=True)(
                ctx.replace(avals_in=types), *values, **params
            )

    return lower


def with_output_sharding(ctx, values):
    """Pins lowered results to the shardings that their types promise on explicit meshes."""
    return [
        _lower_with_sharding(ctx, v, aval) for v, aval in zip(values, ctx.avals_out, strict=True)
    ]
