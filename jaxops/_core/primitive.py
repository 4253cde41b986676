"""From a declaration to a JAX primitive.

An operator family declares each of its primitives once: a signature, the plain `jax.numpy`
reference, the attributes of its native handlers. `Operator` gives the primitive its shapes, its
eager and compiled execution, native batching, sharding, `shard_map` and explicit-mesh typing.
Derivative rules, which tie the members of a family to each other, are added by the family's own
file through `def_jvp` and `def_transpose`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxops._core import (
    batch,
    cache_key,
    compat,
    implementation,
    native,
    partition,
    rules,
    signature,
)
from jaxops._core.compat import ad, batching, mlir

Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Static:
    """Facts about a call that are known before it is partitioned, in another thread."""

    params: tuple[tuple[str, Any], ...]
    is_manual: bool
    settings: compat.Settings
    needs_kernels: str | None


def _spec_of(sharding, is_manual: bool) -> P:
    """The spec of an array, which is gathered if that names no axes of a mesh.

    Under a shard_map over some axes what the others shard has no names that XLA would know, and
    outside of one no array that is whole.
    """
    return sharding.spec if isinstance(sharding, NamedSharding) and not is_manual else P()


def _taylor(primitive, primals, series, **params):
    return rules.taylor(functools.partial(primitive.bind, **params), primals, series)


def _promoting(function: Callable) -> Callable:
    """The function, which promotes dtypes as it always does: the setting is for its callers."""

    @functools.wraps(function)
    def run(*operands, **params):
        with jax.numpy_dtype_promotion("standard"):
            return function(*operands, **params)

    return run


def _as_bound(rule: Callable) -> Callable:
    """A rule of a primitive, which runs under the implementation that its call was bound under.

    `needs_kernels` is a parameter of every primitive, and no rule has to know it.
    """

    @functools.wraps(rule)
    def run(*arguments, needs_kernels, **params):
        with implementation.as_bound(needs_kernels):
            return rule(*arguments, **params)

    return run


@contextlib.contextmanager
def _refusing_symbolic(name: str, operands: Sequence[Any]) -> Generator[None]:
    """Says which operator it was, where symbolic shapes reach what must know its sizes."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:
        if not any(map(compat.has_symbolic_shape, operands)):
            raise
        shapes = ", ".join(f"({', '.join(map(str, x.shape))})" for x in operands)
        raise NotImplementedError(
            f"{name}: operands of symbolic shapes {shapes} are not supported here. Export it with "
            "sizes that are numbers."
        ) from error


def _lower_fun(function: Callable) -> Callable:
    """The lowering of what returns several results."""
    return mlir.lower_fun(_promoting(function), True)


class Operator:
    """A primitive whose every operand and result may carry leading batch dimensions.

    Attributes:
      name: the primitive's name and, with "jaxops_" before it, its handlers' target name.
      signature: einsum-like text of a call with the given parameters (see `signature`).
      dtypes: the results' dtypes, called as dtypes(*operands, **params).
      reference: the operator in jax.numpy, called as reference(*operands, **params); it returns
        one array a result, with numpy broadcasting over the batch dimensions. With `local` it is
        only for the implementation "xla", under which there are no batch dimensions.
      attributes: what the native handlers are passed, as numpy scalars.
      composition: instead of handlers and a reference, the operator in terms of other operators:
        for what needs derivative rules of its own but no kernel.
      local: instead of handlers, what one device computes of its shards: for what is made of
        `on_one_device` of other operators, yet is sharded as a whole; without a reference it is
        that, too. Called as
        local(*operands, platform=..., **params), the platform being None where there are no
        handlers.
      platforms: those that have handlers of it, or a function of the params that returns them;
        others run the reference.
      work_space: whether CUDA calls may have one, as an extra result. The handler tells its size.
      replicated: factors that each device needs whole; "part" stands for part0, part1, ... as well.
      summed_outputs: the results that are summed over the batch dimensions flagged in the
        parameter `summed`, which has one entry a batch dimension.
      epilogue: of a call that ends in more than sums, what makes it of sums that devices have parts
        of: called with the operands and params, it returns the operands and params of those sums
        and a function of them, or None where there is nothing more.
      across: by factor, what one device computes of its part of that, where results are no sums of
        what devices compute alone: called as across[factor](*shards, axes=..., **params) with the
        mesh axes of the parts, it returns results that are whole over these.
      neighbours: what a device's results depend on beyond its own shards: called as
        neighbours(*shards, plan=..., **params) with the `Plan` of the call, it returns the operands
        and params of the call that a device makes, and a function of its results that completes
        these, or None where they are complete.
      aliases: by operand, the result that may have its memory.
      is_new_on_gpu: whether no GPU has run the kernels of calls with these params, so that they are
        chosen under `native.NEW_KERNELS_VARIABLE` alone.
      asks_on_gpu: whether the handler of calls with these params is asked if a GPU is to run its
        kernels, or XLA the reference because that is faster.
      instead_on_gpu: a call that GPUs compute faster than this one: called as
        instead_on_gpu(*operands, **params), it returns the operands and params of that call and a
        function of its results that makes those of this one, or None.
      cpu_layout: the order in memory of the dimensions of operands and results in calls on CPUs,
        slowest first: called as cpu_layout(term, **params) with an array's dimensions in the
        signature; None is their own order. The attribute `permuted` tells a handler that there are
        such orders.
    """

    def __init__(
        self,
        name: str,
        *,
        signature: Callable[..., str],
        dtypes: Callable[..., Sequence[Any]],
        reference: Callable[..., Sequence[jax.Array]] | None = None,
        attributes: Callable[..., Mapping[str, Any]] | None = None,
        composition: Callable[..., Sequence[jax.Array]] | None = None,
        local: Callable[..., Sequence[jax.Array]] | None = None,
        platforms: Sequence[str] | Callable[..., Sequence[str]] = tuple(native.PLATFORMS),
        work_space: bool = False,
        replicated: Sequence[str] = (),
        summed_outputs: Sequence[int] = (),
        epilogue: Callable[..., tuple | None] = lambda *_, **__: None,
        across: Mapping[str, Callable[..., Sequence[jax.Array]]] | None = None,
        neighbours: Callable[..., tuple] = lambda *shards, plan, **params: (shards, params, None),
        aliases: Mapping[int, int] | None = None,
        is_new_on_gpu: bool | Callable[..., bool] = False,
        asks_on_gpu: Callable[..., bool] = lambda **_: False,
        instead_on_gpu: Callable[..., tuple | None] = lambda *_, **__: None,
        cpu_layout: Callable[..., Sequence[int] | None] | None = None,
    ):
        self.name = name
        self.target = f"jaxops_{name}"
        self._signature = signature
        self._reference = reference
        self._dtypes = dtypes
        self._attributes = attributes
        self._work_space = work_space
        self._replicated = tuple(replicated)
        self._summed_outputs = tuple(summed_outputs)
        self._epilogue = epilogue
        self._across = across or {}
        self._neighbours = neighbours
        self._aliases = aliases or {}
        self._is_new_on_gpu = is_new_on_gpu
        self._asks_on_gpu = asks_on_gpu
        self._instead_on_gpu = instead_on_gpu
        self._cpu_layout = cpu_layout
        self._platforms = platforms
        # The outer primitive is what JAX transforms see; the inner one is the call on one device.
        self.primitive = self._new_primitive(name)
        batching.primitive_batchers[self.primitive] = _as_bound(self._batch)
        compat.needs_devices_to_lower(self.primitive)
        self._scope = jax.named_scope(f"jaxops.{name}")
        self._plain = reference or composition
        if self._plain is None and local is not None:
            self._plain = functools.partial(local, platform=None)
        if composition is not None:
            lower = _as_bound(_lower_fun(self._scope(composition)))
            mlir.register_lowering(self.primitive, lower)
            return
        mlir.register_lowering(self.primitive, _as_bound(self._lower))
        self._partitioned = self._custom_partitioning()
        self._local = self._new_primitive(f"{name}_local")
        if local is not None:
            for platform in (None, *native.PLATFORMS):
                lower = functools.partial(self._lower_composed, local=local, platform=platform)
                mlir.register_lowering(self._local, _as_bound(lower), platform=platform)
            return
        native.TARGETS.append(self.target)
        mlir.register_lowering(self._local, _as_bound(self._lower_elsewhere))
        for platform in native.PLATFORMS:
            lower = functools.partial(self._lower_native, platform=platform)
            mlir.register_lowering(self._local, _as_bound(lower), platform=platform)

    def _new_primitive(self, name):
        primitive = compat.Primitive(name)
        primitive.multiple_results = True
        primitive.def_abstract_eval(_as_bound(self._abstract_eval))
        compat.run_eagerly(primitive)
        compat.def_jet(primitive, functools.partial(_taylor, primitive))
        return primitive

    def __call__(self, *operands: jax.Array | np.ndarray, **params: Any) -> list[jax.Array]:
        varying = compat.make_varying(list(operands))
        if implementation.is_xla():
            return self._compute_plainly(*varying, **params)
        needs_kernels = implementation.needs_kernels(self.name)
        return self.primitive.bind(*varying, **params, needs_kernels=needs_kernels)

    def on_one_device(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        """The call on what one device has, for the `local` of other operators."""
        needs_kernels = implementation.needs_kernels(self.name)
        return self._local.bind(*operands, **params, needs_kernels=needs_kernels)

    def _compute_plainly(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        """The definition of the primitive, written into the program in its place."""
        assert self._plain is not None  # every operator has one of the three
        function = _promoting(self._scope(functools.partial(self._plain, **params)))
        with _refusing_symbolic(self.name, operands):
            if not compat.has_explicit_axes(operands[0]):
                return list(function(*operands))
            # The definition is sharded as XLA finds it best, but for what the types promise.
            types = self._types(*map(jax.typeof, operands), **params)
            shardings = [t.sharding for t in types]
            call: Any = jax.sharding.auto_axes(
                lambda *shards: list(function(*shards)), out_sharding=shardings
            )
            return call(*operands)

    def def_jvp(self, rule: Callable) -> Callable:
        """Registers rule(primals, tangents, **params); tangents may be symbolic zeros."""
        ad.primitive_jvps[self.primitive] = _as_bound(rule)
        return rule

    def def_transpose(self, rule: Callable) -> Callable:
        """Registers rule(cotangents, *operands, **params) for the operands that are linear."""
        ad.primitive_transposes[self.primitive] = _as_bound(rule)
        return rule

    def def_dead_code(self, rule: Callable) -> Callable:
        """Registers rule(used, *operands, **params), asked when some results are unused.

        It returns None to leave the call as it is, or (operator, operand numbers, params) of a
        cheaper call that makes just the results flagged in `used`.
        """

        bound = _as_bound(rule)

        def dce(used, equation):
            keep = [True] * len(equation.invars)
            if not any(used):
                return [False] * len(keep), None
            cheaper = (
                None
                if all(used)
                else bound(used, *(v.aval for v in equation.invars), **equation.params)
            )
            if cheaper is None:
                return keep, equation
            operator, numbers, params = cheaper
            params = {**params, "needs_kernels": equation.params["needs_kernels"]}
            return [i in numbers for i in range(len(keep))], equation.replace(
                primitive=operator.primitive,
                invars=[equation.invars[i] for i in numbers],
                outvars=[v for v, u in zip(equation.outvars, used, strict=True) if u],
                params=params,
            )

        compat.def_dead_code(self.primitive, dce)
        return rule

    def _call(self, shapes: Sequence[Sequence[int]], params: Params) -> signature.Call:
        parsed = signature.parse(self._signature(**params))
        rank = len(shapes[0]) - len(parsed.operands[0])
        summed = params.get("summed", (False,) * rank)
        return signature.apply(parsed, shapes, params, summed, self._summed_outputs)

    def _is_whole(self, factor):
        return factor.rstrip("0123456789") in self._replicated

    def _whole_factors(self, call):
        return [f for f in call.signature.factors() if self._is_whole(f)]

    def _shared(self, dim):
        """The factors of a dimension of which devices may have parts, if there are any."""
        return tuple(f for f in dim if not self._is_whole(f)) or dim

    def _abstract_eval(self, *operands, **params):
        with _refusing_symbolic(self.name, operands):
            return self._types(*operands, **params)

    def _types(self, *operands, **params):
        call = self._call([x.shape for x in operands], params)
        dtypes = self._dtypes(*operands, **params)
        varying = {compat.varying_axes(x) for x in operands}
        if len(varying) > 1:
            raise ValueError(
                f"{self.name}: operands vary over different shard_map axes: {varying}; bind it "
                "through its Operator, which casts them"
            )
        mesh = operands[0].sharding.mesh
        axes: dict[tuple[str, ...], Any] = {}

        def names(entry):
            return (entry,) if isinstance(entry, str) else entry or ()

        def parts(entry):
            return math.prod(mesh.shape[a] for a in names(entry))

        for x, term in zip(operands, call.signature.operands, strict=True):
            for dim, entry in zip(term, x.sharding.spec, strict=False):
                if entry is not None and dim:
                    shared = self._shared(dim)
                    axes.setdefault(shared, entry)
                    # Contiguous parts of (heads depth) are whole heads where they divide these.
                    if call.sizes[shared[0]] % parts(entry) == 0:
                        axes.setdefault(shared[:1], entry)

        def spec(term):
            # Two operands may be sharded over the same axes, a result over each only once.
            found, used = [], set()
            for dim, size in zip(term, call.shape(term), strict=True):
                entry = axes.get(self._shared(dim))
                is_free = size % parts(entry) == 0 and not used & set(names(entry))
                found.append(entry if is_free else None)
                used |= set(names(entry)) if is_free else set()
            return P(*found)

        return [
            operands[0].update(
                shape=call.shape(term),
                dtype=np.dtype(dtype),
                weak_type=False,
                sharding=NamedSharding(mesh, spec(term)),
            )
            for term, dtype in zip(call.signature.outputs, dtypes, strict=True)
        ]

    def _batch(self, operands, dims, **params):
        """One more batch dimension, in place where the largest batched operand has it."""
        parsed = signature.parse(self._signature(**params))
        ranks = [len(term) for term in parsed.operands]
        rank = next(
            x.ndim - (d is not None) - r for x, d, r in zip(operands, dims, ranks, strict=True)
        )
        _, at = max((x.size, d) for x, d in zip(operands, dims, strict=True) if d is not None)
        at = at if at <= rank else 0
        moved = [
            jnp.expand_dims(x, at) if d is None else jnp.moveaxis(x, d, at)
            for x, d in zip(operands, dims, strict=True)
        ]
        if self._summed_outputs:
            summed = params["summed"]
            params = {**params, "summed": (*summed[:at], False, *summed[at:])}
        results = self(*moved, **params)
        return results, [at] * len(results)

    def _custom_partitioning(self):
        def run(static, *operands):
            with implementation.as_bound(static.needs_kernels):
                return self.on_one_device(*operands, **dict(static.params))

        def rule(static, mesh, operand_types, result_types):
            del result_types
            call = self._call([tuple(t.shape) for t in operand_types], dict(static.params))
            return partition.shardy_rule(call, max(1, mesh.size), self._whole_factors(call))

        def partition_call(static, mesh, operands, results):
            params = dict(static.params)
            call = self._call([x.shape for x in operands], params)
            terms = (*call.signature.operands, *call.signature.outputs)
            arrays = (*operands, *results)
            # The largest array decides first: moving it between devices costs the most.
            order = sorted(range(len(arrays)), key=lambda i: -arrays[i].size)
            specs = [(terms[i], _spec_of(arrays[i].sharding, static.is_manual)) for i in order]
            plan = partition.make_plan(call, mesh, specs, self._whole_factors(call))
            spread = [f for f in self._across if plan.size(plan.axes.get(f, ())) > 1]
            if spread:
                plan = dataclasses.replace(plan, across=spread[0])

            def compute(*shards, sizes):
                local = {k: sizes.get(k, v) for k, v in params.items()}
                shards, local, complete = self._neighbours(*shards, plan=plan, **local)
                if plan.across:
                    axes = plan.axes[plan.across]
                    return self._across[plan.across](*shards, axes=axes, **local), None
                has_parts = any(map(plan.summed_axes, call.signature.outputs))
                apart = self._epilogue(*shards, **local) if has_parts else None
                if apart is None:
                    results = self.on_one_device(*shards, **local)
                    return results if complete is None else complete(*results), None
                operands, of_sums, finish = apart
                return self.on_one_device(*operands, **of_sums), finish

            # JAX traces what is without a mesh when it lowers it, so this context is inside.
            lower = implementation.applied(
                static.needs_kernels, partition.run_locally(plan, compute)
            )
            return (
                mesh,
                static.settings.applied(compat.without_mesh(_promoting(lower))),
                [plan.sharding(term) for term in call.signature.outputs],
                tuple(plan.sharding(term) for term in call.signature.operands),
            )

        partitioned = compat.custom_partitioning(run, static_argnums=(0,))
        partitioned.def_partition(partition=partition_call, sharding_rule=rule)
        return partitioned

    def _lower(self, ctx, *values, **params):
        if compat.partitions(ctx):
            call = self._partitioned_call(ctx, params)
        else:
            call = functools.partial(self.on_one_device, **params)
        results = _lower_fun(jax.named_scope(f"jaxops.{self.name}")(call))(ctx, *values)
        compat.let_pickle(ctx)
        return compat.with_output_sharding(ctx, results)

    def _partitioned_call(self, ctx, params):
        if compat.exporting(ctx):
            raise NotImplementedError(
                f"{self.name}: a jit over several devices cannot be exported, because partitioning "
                "it calls back into this process. Wrap the computation in jax.shard_map, or export "
                "it for one device."
            )
        if not compat.setting("jax_use_shardy_partitioner"):
            raise NotImplementedError(
                f"{self.name}: arrays on several devices need the Shardy partitioner, which "
                "jax_use_shardy_partitioner=False turns off. Leave it on, or wrap the computation "
                "in jax.shard_map."
            )
        is_manual = any(map(compat.is_manual, ctx.avals_in))
        needs_kernels = implementation.needs_kernels(self.name)
        settings = compat.Settings.current()
        static = _Static(tuple(params.items()), is_manual, settings, needs_kernels)
        switches = native.allows_new_kernels()
        digest = cache_key.digest(self.name, static, compat.mesh_shapes(ctx), switches)
        call = functools.partial(self._partitioned, static)
        return compat.with_metadata(call, jaxops_digest=digest)

    def _lower_elsewhere(self, ctx, *values, **params):
        """The lowering for platforms that have no handlers."""
        native.refuse_elsewhere(self.name, ctx, self._handled(params))
        return self._lower_reference(ctx, *values, **params)

    def _lower_reference(self, ctx, *values, **params):
        with _refusing_symbolic(self.name, ctx.avals_in):
            lower = compat.lower_as_on_one_device(_promoting(self._run_reference))
            return lower(ctx, *values, **params)

    def _run_reference(self, *operands, **params):
        assert self._reference is not None
        results = self._reference(*operands, **params)
        # Batch dimensions that a result does not depend on are 1 in the definition's.
        types = self._types(*map(jax.typeof, operands), **params)
        return [jnp.broadcast_to(r, t.shape) for r, t in zip(results, types, strict=True)]

    def _run_native(self, *operands, platform, **params):
        other = self._instead_on_gpu(*operands, **params) if platform == "cuda" else None
        if other is not None:
            operands, params, finish = other
            return finish(*self._run_native(*operands, platform=platform, **params))
        call = functools.partial(self._call_native, platform=platform)
        rank = operands[0].ndim - len(signature.parse(self._signature(**params)).operands[0])
        return batch.call_grouped(call, rank, operands, params)

    def _call_native(self, *operands, platform, **params):
        results = self._types(*map(jax.typeof, operands), **params)
        out = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]
        orders = self._orders(platform, [*operands, *out], params)
        attributes = self._handler_attributes(orders, params)
        space = []
        if self._work_space and platform == "cuda":
            space = native.work_space(self.target, operands, out, attributes)
        aliases = {
            i: j
            for i, j in self._aliases.items()
            if (operands[i].shape, operands[i].dtype) == (out[j].shape, out[j].dtype)
        }
        layouts = {}
        if any(orders):
            layouts["input_layouts"] = orders[: len(operands)]
            layouts["output_layouts"] = [*orders[len(operands) :], *[None for _ in space]]
        call = native.ffi_call(self.target, [*out, *space], input_output_aliases=aliases, **layouts)
        return call(*operands, **attributes)[: len(out)]

    def _orders(self, platform, arrays, params):
        """The orders of the arrays' dimensions in memory; None is their own order."""
        if self._cpu_layout is None or platform != "cpu":
            return [None for _ in arrays]
        parsed = signature.parse(self._signature(**params))
        orders: list[tuple[int, ...] | None] = []
        for term, array in zip((*parsed.operands, *parsed.outputs), arrays, strict=True):
            order = self._cpu_layout(term, **params)
            rank = len(array.shape) - len(term)
            batch = range(rank)
            orders.append(None if order is None else (*batch, *(rank + i for i in order)))
        return orders

    def _handler_attributes(self, orders, params):
        assert self._attributes is not None
        attributes = self._attributes(**params)
        if self._cpu_layout is None:
            return attributes
        return {**attributes, "permuted": np.bool_(any(orders))}

    def _may_call(self, platform, ctx, params):
        """Whether a platform runs the handlers of a call: on a GPU XLA may be faster, or known."""
        if platform != "cuda" or native.allows_new_kernels() or implementation.insists():
            return True
        is_new = self._is_new_on_gpu
        if is_new(**params) if callable(is_new) else is_new:
            return False
        if not self._asks_on_gpu(**params):
            return True
        if any(map(compat.has_symbolic_shape, ctx.avals_in)):
            return False  # the handler needs sizes that are numbers
        attributes = self._handler_attributes([], params)
        return native.prefers_kernels(self.target, ctx.avals_in, ctx.avals_out, attributes)

    def _has_known_work_space(self, platform, operands):
        """Whether a call of such operands has none, or one of a size that is known."""
        has_one = self._work_space and platform == "cuda"
        return not (has_one and any(map(compat.has_symbolic_shape, operands)))

    def _handled(self, params):
        """The platforms that have handlers of such a call."""
        return self._platforms(**params) if callable(self._platforms) else self._platforms

    def _lower_native(self, ctx, *values, platform, **params):
        if platform not in self._handled(params):
            return self._lower_elsewhere(ctx, *values, **params)
        if not self._has_known_work_space(platform, ctx.avals_in):
            native.refuse_symbolic(self.name, platform)
            return self._lower_reference(ctx, *values, **params)
        if not self._may_call(platform, ctx, params) or not native.use_kernels(
            self.name, platform, ctx
        ):
            return self._lower_reference(ctx, *values, **params)
        run = functools.partial(self._run_native, platform=platform)
        with _refusing_symbolic(self.name, ctx.avals_in):
            return _lower_fun(run)(ctx, *values, **params)

    def _lower_composed(self, ctx, *values, local, platform, **params):
        if platform is None:
            native.refuse_elsewhere(self.name, ctx, tuple(native.PLATFORMS))
        elif not native.use_kernels(self.name, platform, ctx):
            platform = None
        run = functools.partial(local, platform=platform)
        with _refusing_symbolic(self.name, ctx.avals_in):
            return _lower_fun(run)(ctx, *values, **params)
