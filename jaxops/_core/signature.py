"""Einsum-like signatures: which axis of which operand is which.

An operator family declares one string a primitive, such as

    time (heads depth), heads taps -> time (heads depth)

and from it follow the output shapes, the batching rule, the Shardy sharding rule, the shards that
each device computes and the sum over devices that a reduced axis needs. A factor that no operand
shows may be written with its size, as in "rows part0, rows part1 -> rows whole=128". Leading batch
dimensions are not written: every operand has the same number of them, each of the common size or 1
where the operand does not vary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

from jax import lax

Dim = tuple[str, ...]  # the factors of one dimension, major first; () is a dimension of size 1
Term = tuple[Dim, ...]  # the dimensions of one array


@dataclasses.dataclass(frozen=True)
class Signature:
    operands: tuple[Term, ...]
    outputs: tuple[Term, ...]
    given: Mapping[str, int] = dataclasses.field(default_factory=dict)  # sizes in the text

    def factors(self) -> list[str]:
        """Every factor once, in order of appearance."""
        return list(dict.fromkeys(f for t in (*self.operands, *self.outputs) for f in flat(t)))


def flat(term: Sequence[Dim]) -> list[str]:
    return [factor for dim in term for factor in dim]


def with_last(term: Term, name: str) -> tuple[int, ...]:
    """The order of a term's dimensions with those of name0, name1, ... after the others."""
    last = [i for i, dim in enumerate(term) if any(re.fullmatch(rf"{name}\d+", f) for f in dim)]
    return (*(i for i in range(len(term)) if i not in last), *last)


@functools.cache
def parse(text: str) -> Signature:
    """Reads "a (b c), b d -> a (b c) e=5"; several outputs are separated by commas."""
    given = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", text)}

    def term(part: str) -> Term:
        dims = re.findall(r"\(([^)]*)\)|(\S+)", part)
        return tuple(tuple((group or single).split()) for group, single in dims)

    operands, outputs = re.sub(r"=\d+", "", text).split("->")
    return Signature(
        tuple(term(part) for part in operands.split(",")),
        tuple(term(part) for part in outputs.split(",")),
        given,
    )


@dataclasses.dataclass(frozen=True)
class Call:
    """A signature applied to operands: batch dimensions written out, every factor sized.

    Batch dimension i is the factor "batch{i}" where an array varies along it and () where it has
    size 1 and does not.
    """

    signature: Signature
    sizes: Mapping[str, int]

    def shape(self, term: Term) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[f] for f in dim) for dim in term)

    def reduced(self, output: Term) -> set[str]:
        """The factors that are summed over to make an output."""
        present = {f for term in self.signature.operands for f in flat(term)}
        return present - set(flat(output))


def apply(
    signature: Signature,
    shapes: Sequence[Sequence[int]],
    known: Mapping[str, int],
    summed: Sequence[bool],
    summed_outputs: Sequence[int],
) -> Call:
    """Matches operand shapes against a signature.

    `known` gives by name sizes that no operand shows. `summed[i]` tells that batch dimension i
    is summed over in the outputs numbered in `summed_outputs`.
    """
    rank = len(shapes[0]) - len(signature.operands[0])
    batch = lax.broadcast_shapes(*(tuple(shape[:rank]) for shape in shapes))
    sizes = {f"batch{i}": size for i, size in enumerate(batch)}
    sizes |= signature.given
    sizes |= {f: known[f] for f in signature.factors() if f in known}
    dims = [
        (dim, size)
        for term, shape in zip(signature.operands, shapes, strict=True)
        for dim, size in zip(term, shape[rank:], strict=True)
    ]
    # Dimensions of one factor settle the sizes that the compound ones are divided by.
    for dim, size in sorted(dims, key=lambda entry: len(entry[0])):
        unknown = [f for f in dim if f not in sizes]
        if unknown:
            (missing,) = unknown
            sizes[missing] = size // math.prod(sizes[f] for f in dim if f != missing)

    def lead(varies):
        return tuple((f"batch{i}",) if varies[i] else () for i in range(rank))

    operands = tuple(
        lead([shape[i] == batch[i] for i in range(rank)]) + term
        for shape, term in zip(shapes, signature.operands, strict=True)
    )
    outputs = tuple(
        lead([not (i in summed_outputs and s) for s in summed]) + term
        for i, term in enumerate(signature.outputs)
    )
    return Call(Signature(operands, outputs), sizes)
