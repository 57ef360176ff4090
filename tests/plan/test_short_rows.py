"""Tilings of short rows whose elements lie apart from one another: how many threads share one, by its columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from cupynorm.plan.choose import choose
from cupynorm.plan.config import IN_REGISTERS, PLAIN, DoesNotFitError, Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.problem import Problem
from cupynorm.plan.rules import rules_of
from cupynorm.plan.variants.tiles import KINDS

APART = rules_of("90").apart
SHORT = 512  # columns


def problem(cols: int, size: int = 4, *, rows: int = 1 << 20, vector: int = 0, **fields: Any) -> Problem:
    """Return a problem of neighbouring rows in steps, of which an access may move 16 bytes."""
    compute = max(4, size)
    given: dict[str, Any] = {
        "fused": True,
        "in_steps": True,
        "waits_as_loaded": True,
        "room": True,
        "across": 4096,
        "output_bytes": size,
    }
    return Problem(rows, cols, vector or 16 // size, size, compute, **(given | fields))


def planned(asked: Problem, forced: Plan | None = None, device: str = "h200") -> Plan:
    return choose(asked, RECORDED[device], lambda plan: plan.min_blocks, forced)


OF_KIND: dict[str, dict[str, Any]] = {
    "in steps, x alone, a small state": {"row_numbers": 4},
    "not in steps": {"in_steps": False},
    "in steps, operands": {"load_operands": (2,), "row_numbers": 4},
    "in steps, masked": {"direct_load": False},
    "in steps, pairs": {"load_operands": (2,), "fields": 2, "row_numbers": 4},
    "rounds": {"rounds": True, "in_steps": False},
    "nothing stored": {"output_bytes": 0, "room": False},
}


def asked_by(row: tuple[int, ...]) -> Iterator[Problem]:
    """Give problems that a row of the data may be for."""
    size, fewest, most, vector = row[:4]
    neighbours = 1 if vector == 1 and size < 8 else 16 // size
    for cols in range(fewest, most + 1, max(1, (most - fewest) // 8)):
        yield problem(cols, size, vector=neighbours, **OF_KIND.get(KINDS[row[-1]], {}))


@pytest.mark.parametrize("row", [tuple(each) for each in APART.measured if each[2] <= SHORT], ids=str)
def test_every_tiling_of_short_rows_is_taken(row: tuple[int, ...]) -> None:
    size, _, _, vector, block, width = row[:6]
    taken = {(plan.vector, plan.block, plan.across) for plan in map(planned, asked_by(row))}

    assert (vector, block, width // (size * vector)) in taken


@pytest.mark.parametrize("device", ["h200", "a100", "t4"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_one_thread_has_all_elements_of_rows_that_are_short(size: int, device: str) -> None:
    for cols, stored in ((2, True), (3, False), (10, True), (21, False), (32, True)):
        plan = planned(problem(cols, size, output_bytes=stored * size), device=device)

        assert (plan.variant, plan.group, plan.ctas_per_row) == ("block", 1, 1)
        assert (plan.full, plan.shared_bytes) == (plan.vectors == cols, 0)
        assert stored or plan.vector * max(4, size) <= APART.alone_statistics


def test_rows_of_few_neighbours_are_shared_by_more_threads() -> None:
    assert planned(problem(10, across=7)).group > 1
    assert planned(problem(10, across=8)).group == 1


@pytest.mark.parametrize("kind", OF_KIND)
def test_how_short_rows_are_summed_does_not_depend_on_how_many_there_are(kind: str) -> None:
    for size, cols in ((2, 10), (2, 50), (4, 3), (4, 40), (4, 60), (8, 64)):
        plans = [planned(problem(cols, size, rows=rows, **OF_KIND[kind])) for rows in (64, 5000, 1 << 22)]

        assert len({each.template for each in plans}) == 1, (size, cols)


def tile(vector: int, elements: int, lanes: int, down: int) -> Plan:
    return dataclasses.replace(
        PLAIN,
        variant="block",
        vector=vector,
        vectors=elements,
        group=down,
        across=lanes,
        block=lanes * down,
        waits=IN_REGISTERS,
    )


def test_warps_of_other_rows_do_not_meet_in_further_rounds() -> None:
    rounds = problem(20, **OF_KIND["rounds"])
    assert planned(rounds, tile(2, 20, 64, 1)).across == 64
    with pytest.raises(DoesNotFitError):
        planned(rounds, tile(2, 10, 64, 2))
    assert planned(problem(20), tile(2, 10, 64, 2)).across == 64


def test_masks_of_a_thread_s_rows_are_bytes_of_a_word() -> None:
    assert planned(problem(8, 2), tile(8, 8, 32, 1)).vector == 8
    with pytest.raises(DoesNotFitError):
        planned(problem(8, 2, direct_load=False), tile(8, 8, 32, 1))


def test_exponentials_that_wait_in_place_of_elements_are_not_taken_again() -> None:
    halves = problem(21, 2, row_numbers=4)
    assert planned(halves).vector == 4  # which wait two in a register
    assert planned(dataclasses.replace(halves, early_exponential=True)).vector == 2


@pytest.mark.parametrize("size", [2, 4])
def test_weighted_statistics_wait_nowhere_from_fewer_columns_on(size: int) -> None:
    _, _, fewest, *_ = APART.only_read
    weighted = {"load_operands": (size,), "fields": 2, "waits_as_loaded": False, "row_numbers": 5}
    for cols, numbers in ((fewest, weighted), (fewest, {"row_numbers": 5})):
        plans = [planned(problem(each, size, output_bytes=0, **numbers)) for each in (cols - 1, cols)]
        assert [plan.variant == "uncached" for plan in plans] == [False, "fields" in numbers]


def test_halves_of_which_an_interval_counts_wait_up_to_more_columns() -> None:
    numbers = {"interval_mask": True, "direct_load": False, "row_numbers": 5, "output_bytes": 0}
    fewest = APART.only_read[3]
    halves, longer = (planned(problem(cols, 2, **numbers)) for cols in (fewest - 1, fewest))
    floats = planned(problem(fewest - 1, 4, **numbers))
    assert (halves.waits > 0, longer.waits > 0, floats.waits > 0) == (True, False, False)


@pytest.mark.parametrize(
    ("spilled", "blocks"), [(0, 3), (APART.block_local_bytes, 3), (APART.block_local_bytes + 4, 2)]
)
def test_weighted_halves_have_three_blocks_of_a_multiprocessor(spilled: int, blocks: int) -> None:
    pairs = {"load_operands": (2,), "fields": 2, "waits_as_loaded": False, "direct_load": False}

    def chosen(row_numbers: int) -> Plan:
        def local_bytes(plan: Plan) -> int:
            return spilled if plan.min_blocks > 2 else 0

        asked = problem(768, 2, row_numbers=row_numbers, **pairs)
        return choose(asked, RECORDED["h200"], lambda plan: plan.min_blocks, local_bytes=local_bytes)

    weighted, gradient = chosen(6), chosen(8)

    assert (weighted.vector, weighted.vectors, weighted.ctas_per_row) == (2, 16, 6)
    assert (weighted.min_blocks, gradient.min_blocks) == (blocks, 2)
