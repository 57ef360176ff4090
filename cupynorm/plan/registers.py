"""How many registers a thread wants: an estimate by the numbers of the rules' register model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynorm.plan.config import AMPERE, FLOAT_BYTES, HALF_BYTES, REGISTER_BYTES, REGISTER_UNIT
from cupynorm.plan.partition import words

if TYPE_CHECKING:
    from cupynorm.plan.base import Question


def registers(question: Question, elements: int, *, full: bool, cached: bool) -> int:
    """Return how many registers keep a thread of so many elements from spilling.

    cached: with its parameters in registers.
    """
    problem, model, measured = question.problem, question.rules.registers, question.measured
    values = words(problem, elements, cached=cached)
    others = (model.cached if cached else model.at_use)[problem.compute_bytes]
    if not full:
        others += _ragged(question, values, cached=cached)
    others += model.step * (cached and elements > model.crowded_elements and not measured)
    if problem.unaligned:
        others += model.unaligned[problem.compute_bytes]
    if problem.fused:
        others += _fused(question, elements)
        # what is on its way need not wait for the arithmetic, nor that for it
        others = max(others, _words_loaded(question, elements) - words(problem, elements, cached=False))
    if not cached:  # the parameters pass through registers, a vector at a time
        passing = sum(size * problem.vector // REGISTER_BYTES for size in problem.parameter_bytes)
        others += max(0, 2 * (passing - model.passing_words))
    many = _many_addresses(question, elements, cached=cached)
    wide = problem.element_bytes == FLOAT_BYTES
    simple = problem.extra_registers <= model.few
    if many and not (full and wide and simple and measured):
        others += model.addresses if simple else model.many_addresses
    narrow = problem.fused and bool(problem.parameter_bytes) and problem.extra_registers <= model.narrow
    if measured and narrow and full and not cached:
        others -= model.step * (problem.element_bytes == HALF_BYTES and values <= model.crowded_elements)
    if question.architecture < AMPERE:
        others += model.before_ampere
    elif full and not (problem.parameter_bytes or problem.load_operands) and not problem.doubles:
        others -= model.step * (values <= model.few_values or (problem.fused and not many))
    needed = -(-(values + others) // REGISTER_UNIT) * REGISTER_UNIT
    if measured and _fills_a_multiprocessor(question, elements, values, full=full, cached=cached):
        return min(needed, model.full_block)
    return needed


def _ragged(question: Question, values: int, *, cached: bool) -> int:
    """Return what a thread wants more where its last vector may be missing."""
    problem, model = question.problem, question.rules.registers
    ragged = model.ragged[problem.compute_bytes]
    if cached:
        return ragged // 2 if problem.unaligned or problem.element_bytes == HALF_BYTES else ragged
    return model.step if problem.unaligned else max(model.step, values // 2 - model.step)


def _fused(question: Question, elements: int) -> int:
    """Return what a thread wants more where something is computed on the way."""
    problem, model = question.problem, question.rules.registers
    more = model.step * problem.doubles
    if problem.unaligned:
        more += model.edge * (1 + len(problem.load_operands) + len(problem.epilogue_operands))
    if problem.fusion == "quantized":
        floats = problem.element_bytes == FLOAT_BYTES
        more += model.step * (1 + floats) * (elements > model.crowded_elements)
        more += model.step * (floats and elements > model.crowded_floats)
    if not question.measured:
        more += model.step * (1 if elements // problem.vector <= question.rules.tile.many_vectors else 2)
    steps = problem.extra_registers
    if question.measured and steps > model.few and problem.element_bytes == HALF_BYTES:
        steps = min(steps, model.function_at_once)  # a dropout's numbers are made one after another
    return more + steps + elements * sum(problem.epilogue_operands) // REGISTER_BYTES


def _words_loaded(question: Question, elements: int) -> int:
    """Return how many registers x and its operands take on their way, with their addresses."""
    problem = question.problem
    operands = sum((*problem.load_operands, *problem.epilogue_operands))
    return elements * (problem.load_bytes + operands) // question.rules.registers.loaded_bytes


def _many_addresses(question: Question, elements: int, *, cached: bool) -> bool:
    """Say whether a thread has so many vectors that their addresses take registers, too."""
    problem = question.problem
    many = elements // problem.vector > question.rules.tile.many_vectors and not cached
    return many and (problem.fused or not problem.unaligned) and problem.vector_bytes > FLOAT_BYTES


def _fills_a_multiprocessor(
    question: Question, elements: int, values: int, *, full: bool, cached: bool
) -> bool:
    """Say whether a ragged sum, or an unaligned loss, in 16 bits does with the registers that 1024 threads leave."""
    problem, model = question.problem, question.rules.registers
    few = elements // problem.vector <= question.rules.tile.many_vectors
    if problem.element_bytes != HALF_BYTES or not few:
        return False
    if problem.early_exponential:  # what waits are exponentials alone
        return bool(problem.unaligned) and problem.waits_as_loaded
    sums = problem.fused and problem.fusion == "affine" and not (full or cached or problem.unaligned)
    sums = sums and values <= model.crowded_elements and problem.extra_registers <= model.few
    return sums and _words_loaded(question, elements) <= model.loaded_words
