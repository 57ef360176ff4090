"""Samples of many combinations, in which any two properties meet."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from tests import SLOW

Candidate = TypeVar("Candidate")


def covering(
    candidates: Sequence[Candidate],
    factors: Callable[[Candidate], Sequence[object]],
    strain: Callable[[Candidate], Any],
    each: Callable[[Candidate], object] = lambda _: None,
) -> list[Candidate]:
    """Choose some of all candidates, so that any two values of two factors that occur together do so among these.

    A fault of the compiler or of a plan comes from one value or from two that meet, such as a variant and a dtype;
    hardly ever from three. A greedy choice: what has most that is new comes first, among equals what strains most.

    each: what else occurs at least once.
    """
    pairs = [
        {*itertools.combinations(enumerate(factors(one)), 2), (each(one),)}  # of one value: not a pair
        for one in candidates
    ]
    strains = [strain(one) for one in candidates]
    order = sorted(range(len(candidates)), key=lambda at: strains[at], reverse=True)
    waiting = [(-len(pairs[at]), rank, at) for rank, at in enumerate(order)]
    heapq.heapify(waiting)
    covered: set[object] = set()
    taken = []
    while waiting:
        _, rank, at = heapq.heappop(waiting)
        new = pairs[at] - covered
        if waiting and (-len(new), rank, at) > waiting[0]:  # others have come to have more
            heapq.heappush(waiting, (-len(new), rank, at))
        elif new:
            covered |= new
            taken.append(at)
        else:
            break
    return [candidates[at] for at in sorted(taken)]


def sample(
    candidates: Iterable[Candidate],
    factors: Callable[[Candidate], Sequence[object]],
    each: Callable[[Candidate], object] = lambda _: None,
) -> list[Candidate]:
    """Choose as covering() does; all with CUPYNORM_SLOW=1."""
    every = [*candidates]
    return every if SLOW else covering(every, factors, lambda _: 0, each)


def in_pairs(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return some of all combinations, so that any two values of two factors meet; all with CUPYNORM_SLOW=1."""
    return sample(itertools.product(*factors), lambda each: each)
