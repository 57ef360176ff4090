"""warp and block: a row waits in the registers of a group of threads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cupynorm._values import replace
from cupynorm.plan.base import Question, with_grid
from cupynorm.plan.config import (
    ACCESS_BYTES,
    AT_USE,
    CONVERTED,
    HALF_BYTES,
    LINE_BYTES,
    MAX_BLOCK,
    PER_ROW,
    PLAIN,
    REGISTERS,
    SHARED,
    UNALIGNED,
    UNALIGNED_APART,
    WARP,
    Plan,
)
from cupynorm.plan.partition import (
    alignment_period,
    blocks_of,
    converted_bytes,
    in_registers,
    is_power_of_two,
    least_group,
    line_vectors,
    power_of_two_from,
    power_of_two_to,
    words,
)
from cupynorm.plan.registers import registers
from cupynorm.plan.rule_types import FixedRule, RegisterRule
from cupynorm.plan.variants.tiled import tiled

if TYPE_CHECKING:
    from cupynorm.plan.problem import Problem


def warp(question: Question) -> Plan | None:
    """Return the plan of 1 to 32 lanes of a warp for each row."""
    together = tiled(question)
    if together is not None:
        return together
    for by_rows in (True, False):
        fixed = fixed_rule(question, by_rows=by_rows)
        if fixed is None or fixed[1] > WARP:
            break
        plan = _plan(question, "warp", fixed[1], fixed[0])
        if plan is not None or not fixed[0].by_rows:
            return plan
    rule = register_rule(question) or _first_rule(question)
    return _plan(question, "warp", min(WARP, group_of(question, warp_thread_bytes(question))), rule)


def block(question: Question) -> Plan | None:
    """Return the plan of 2 to 32 warps for each row."""
    for by_rows in (True, False):
        fixed = fixed_rule(question, by_rows=by_rows)
        if fixed is None or fixed[1] <= WARP:
            break
        plan = _plan(question, "block", fixed[1], fixed[0])
        if plan is not None or not fixed[0].by_rows:
            return plan
    rule = register_rule(question)
    if rule is None:
        return None
    group = max(2 * WARP, group_of(question, thread_bytes(question, rule)))
    while group <= MAX_BLOCK:
        plan = _plan(question, "block", group, rule)
        if plan is not None or not question.problem.fused:
            return plan
        group *= 2  # with what is loaded beside x, registers may be too few
    return None


# ---- rules


def register_rule(question: Question) -> RegisterRule | None:
    """Return how a row is held in registers; None where it is too long for them."""
    problem, rules = question.problem, question.rules
    if problem.fused and not problem.doubles:
        of_warp = WARP * ACCESS_BYTES
        several = problem.vector_bytes == ACCESS_BYTES and of_warp % problem.row_bytes == 0
        in_warps = several or problem.row_bytes % of_warp == 0
        if problem.only_reads and problem.load_bytes > 1 and in_warps and not problem.unaligned:
            alone = rules.register_rule("only read", problem)
            if alone is not None:
                return alone
        return rules.register_rule(_fused_table(question), problem)
    if question.narrow and rules.has_register_rules("narrow", problem.kind):
        return rules.register_rule("narrow", problem)
    return rules.register_rule("unaligned" if problem.unaligned else "aligned", problem)


def _fused_table(question: Question) -> str:
    problem, rules = question.problem, question.rules
    if problem.fusion == "quantized" or (problem.output_bytes == 1 and problem.direct_load):
        alone = problem.outputs == 1 and rules.has_register_rules("quantized, one output", problem.kind)
        return "quantized, one output" if alone else "quantized"
    if problem.sums_of_bytes and not problem.unaligned:
        return "sums of bytes"
    if problem.masked_statistics and rules.has_register_rules("masked statistics", problem.kind):
        return "masked statistics"
    return "affine with outputs" if problem.fusion == "affine" and problem.outputs > 1 else problem.fusion


def _first_rule(question: Question) -> RegisterRule:
    return question.rules.register_rules["aligned", question.problem.kind][0]


def fixed_rule(question: Question, *, by_rows: bool = True) -> tuple[FixedRule, int] | None:
    """Return the rule that leaves the fewest places empty, and its threads; None where register_rule is better.

    by_rows: among all rules. Otherwise without those for many or few rows: where such a launch does not fit, rows are
    summed in the same order by another.
    """
    problem, rules, limits = question.problem, question.rules, question.limits
    if problem.fused or question.narrow:
        return None
    least, table = math.inf, "unaligned"
    if not problem.unaligned:
        table = "ragged"
        rule = register_rule(question)
        if rule is not None:
            usual = group_of(question, rule.thread_bytes)
            least = usual * math.ceil(problem.vectors / usual)
        if least == problem.vectors:
            table = "full" if problem.same_types else ""
    best = None
    many = problem.rows >= rules.tile.many_rows * limits.sm_count
    for fixed in rules.fixed_rules.get((table, problem.kind), ()):
        if not fixed.above < problem.row_bytes <= fixed.row_bytes or fixed.many not in {None, many}:
            continue
        if problem.rows < fixed.min_rows * limits.sm_count or (fixed.by_rows and not by_rows):
            continue
        threads = math.ceil(problem.vectors / fixed.vectors)
        group = math.ceil(threads / WARP) * WARP if fixed.warps else power_of_two_from(threads)
        group = max(group, least_group(problem))
        places = group * fixed.vectors
        if group <= MAX_BLOCK and math.ceil(problem.vectors / group) == fixed.vectors and places <= least:
            best, least = (fixed, group), places - 1
    return best


# ---- threads that share a row


def group_of(question: Question, bytes_a_thread: int) -> int:
    """Return how many threads share a row, so that each holds about so many bytes of it."""
    problem, tile = question.problem, question.rules.tile
    vectors = max(1, problem.vectors)
    narrow = _group_of_narrow_fused(question)
    if narrow:
        return max(narrow, least_group(problem))
    vectors_per_thread = max(1, bytes_a_thread // (problem.vector * problem.element_bytes))
    group = power_of_two_from(math.ceil(vectors / vectors_per_thread))
    half = group // 2
    fits = half > 0 and math.ceil(vectors / half) * problem.vector <= max_elements(question)
    whole = vectors % group != 0 and fits and vectors % half == 0
    if whole and vectors_per_thread <= tile.many_vectors and not problem.unaligned:
        group = half  # those hold the row without a gap
    # to bytes a thread's own work counts most
    few = problem.fused and problem.fusion == "quantized" and vectors < group * vectors_per_thread
    if problem.fused and (vectors % group or few):
        group = _fullest(question, group, vectors)
    return max(group, least_group(problem))


def _group_of_narrow_fused(question: Question) -> int:
    """Return how many threads share a fused row in narrow accesses: neighbours read neighbours; 0: others decide."""
    problem, numbers = question.problem, question.rules.narrow_fused
    single = (
        problem.fields == 1 and problem.output_bytes > 0 and not (problem.rounds or problem.sums_of_bytes)
    )
    narrow = (
        problem.fused and problem.vector_bytes < ACCESS_BYTES and not (problem.unaligned or problem.doubles)
    )
    if not (single and narrow and numbers.least_vectors <= problem.vectors <= numbers.most_vectors):
        return 0
    return max(numbers.threads, power_of_two_from(math.ceil(problem.vectors / numbers.vectors_of_thread)))


def _fullest(question: Question, group: int, vectors: int) -> int:
    """Return how many threads leave the fewest places empty, of those the fewest: each does some work but once."""
    problem, tile = question.problem, question.rules.tile
    affine = problem.unaligned > 0 and bool(problem.parameter_bytes)
    most = (tile.full_unaligned_elements if affine else tile.full_elements)[problem.element_bytes]
    most = max(problem.vector, most // problem.fields)
    least = max(1, 2 * problem.vector - 2 if problem.unaligned else 1)
    # a thread's own work counts little already
    spread = problem.fusion == "affine" and math.ceil(vectors / group) >= tile.affine_vectors
    for each in (*(1 << power for power in range(WARP.bit_length() - 1)), *range(WARP, MAX_BLOCK + 1, WARP)):
        held = math.ceil(vectors / each)
        places, fewest = each * held, group * math.ceil(vectors / group)
        too_many = held * problem.vector > most or each < least
        if not too_many and (places < fewest or (places == fewest and each < group and not spread)):
            group = each
    return group


def thread_bytes(question: Question, rule: RegisterRule | None) -> int:
    """Return how many bytes of a row a thread holds."""
    problem, tile = question.problem, question.rules.tile
    if problem.rounds:
        rounds = question.rules.rounds
        elements = min(
            rounds.elements, max(problem.vector, problem.cols // rounds.lanes), max_elements(question)
        )
        return elements * problem.element_bytes
    if rule is None:
        return tile.thread_bytes
    if question.narrow:
        return max(rule.thread_bytes, tile.min_narrow_vectors * problem.vector * problem.element_bytes)
    if not problem.fused or problem.sums_of_bytes:
        return rule.thread_bytes
    # what is wider than x are parameters as a rule, which come from a cache
    operands = (*problem.load_operands, *problem.epilogue_operands)
    beside = sum(size for size in operands if size <= problem.load_bytes)
    each = rule.thread_bytes * problem.load_bytes // (problem.load_bytes + beside)
    counted = max(problem.load_bytes, HALF_BYTES)
    most = tile.max_elements[problem.compute_bytes] * counted
    if problem.fields > 1:
        most = min(most, max_elements(question) * counted)
    least = tile.min_thread_bytes if rule.thread_bytes > tile.min_thread_bytes else 0
    return min(most, max(each, least))


def warp_thread_bytes(question: Question) -> int:
    """Return the same for rows that a warp can hold."""
    own = question.problem.fused or question.narrow
    return thread_bytes(question, register_rule(question)) if own else question.rules.tile.thread_bytes


def max_elements(question: Question) -> int:
    """Return how many elements of a row a thread holds at most."""
    problem, tile = question.problem, question.rules.tile
    if problem.unaligned:
        fused = tile.max_fused_unaligned_elements
        most = (fused if problem.fused else tile.max_unaligned_elements)[problem.element_bytes]
        return max(problem.vector, most // problem.fields)
    if problem.sums_of_bytes:
        return max(problem.vector, tile.max_summed_bytes)
    return max(problem.vector, tile.max_elements[problem.compute_bytes] // problem.fields)


def loaded_with(problem: Problem) -> int:
    """Return how many times x's bytes a thread loads, as a power of two."""
    operands = sum((*problem.load_operands, *problem.epilogue_operands))
    return power_of_two_to(1 + operands // problem.load_bytes)


# ---- the plan


def _plan(question: Question, variant: str, group: int, rule: RegisterRule | FixedRule) -> Plan | None:
    problem, limits, rules = question.problem, question.limits, question.rules
    elements = math.ceil(problem.vectors / group) * problem.vector
    fixed = isinstance(rule, FixedRule)
    if elements > max_elements(question) and not fixed:
        return None
    compiled = isinstance(rule, RegisterRule) and _was_compiled(question, rule, group)
    most = (rules.tile.max_elements if problem.fused else rules.tile.max_grouped_elements)[
        problem.compute_bytes
    ]
    fits = (fixed or rule.rows * elements * problem.fields <= most) and not problem.doubles
    rows = rule.rows if fits and (problem.alignment_period or not problem.unaligned) else 1
    block = _block(question, rule, group)
    plan = replace(
        PLAIN,
        variant=variant,
        vector=problem.vector,
        group=group,
        rows_per_group=rows,
        unaligned=problem.unaligned,
        alignment_period=alignment_period(problem, rows),
        block=group if problem.rounds and group > WARP else max(1, block // group) * group,
    )
    plan = in_registers(
        problem, _with_parameter_cache(question, plan, rule, elements, sure=fixed or compiled)
    )
    needed = registers(
        question, elements, full=plan.full, cached=plan.parameter_cache in (PER_ROW, REGISTERS)
    )
    needed += (rows - 1) * (elements * problem.fields // 2 if problem.fused else elements + 1)
    needed += rules.registers.converted * rows * (plan.parameter_cache == CONVERTED)
    known = compiled or problem.sums_of_bytes or (fixed and question.measured and problem.same_types)
    resident = _resident_threads(question, rule, elements)
    if known:
        needed = min(needed, limits.registers_per_sm // resident)
    if needed * plan.block > limits.registers_per_sm:
        return None
    threads = min(resident, limits.threads_per_sm, limits.registers_per_sm // needed)
    plan = replace(plan, min_blocks=max(1, threads // plan.block))
    return with_grid(question, plan, blocks_of(problem, plan), rule)


def _block(question: Question, rule: RegisterRule | FixedRule, group: int) -> int:
    """Return how many threads a rule gives a block: fewer where rows are few, each in the same order."""
    rows, tile, sms = question.problem.rows, question.rules.tile, question.limits.sm_count
    few = rows < tile.many_rows * sms and rows * group <= tile.few_block_threads * sms
    return rule.few_block if few and isinstance(rule, RegisterRule) and rule.few_block else rule.block


def _resident_threads(question: Question, rule: RegisterRule | FixedRule, elements: int) -> int:
    """Return how many threads of so many elements a rule puts on a multiprocessor."""
    beside = rule.registers_beside if isinstance(rule, FixedRule) else 0
    if not beside:
        return rule.resident_threads
    needed = words(question.problem, elements, cached=False) + beside
    return min(rule.resident_threads, question.limits.registers_per_sm // needed)


def _with_parameter_cache(
    question: Question, plan: Plan, rule: RegisterRule | FixedRule, elements: int, *, sure: bool
) -> Plan:
    """Return a plan with the parameter cache of its rule, as far as it fits. sure: the rule was seen to fit."""
    problem, limits, tile = question.problem, question.limits, question.rules.tile
    if rule.parameter_cache in (
        SHARED,
        REGISTERS,
    ):  # for all rows of a block, which are on their way meanwhile
        compiled = sure and isinstance(rule, RegisterRule)
        cache = rule.parameter_cache if compiled or can_cache(question, elements) else SHARED
        plan = replace(plan, parameter_cache=cache, stages=int(question.can_stage))
        # where parameters are not aligned, the accesses to all of them are on their way at once
        in_flight = tile.fused_vectors_in_flight if problem.fused else tile.vectors_in_flight
        computed = problem.fused and not problem.direct_load
        if (
            computed
            or not may_persist(problem, plan)
            or (problem.unaligned and elements > in_flight * problem.vector)
        ):
            plan = replace(plan, parameter_cache=AT_USE, stages=0)
    fits = converted_bytes(problem, problem.vector) <= limits.shared_bytes_per_block
    if rule.parameter_cache == CONVERTED and fits:
        plan = replace(plan, parameter_cache=CONVERTED)
    crowded = problem.unaligned and (
        problem.fused or elements > tile.unaligned_cache_elements[problem.element_bytes]
    )
    if rule.parameter_cache == PER_ROW and (sure or (can_cache(question, elements) and not crowded)):
        plan = replace(plan, parameter_cache=PER_ROW)
    return plan


def _was_compiled(question: Question, rule: RegisterRule, group: int) -> bool:
    """Say whether so many threads are those that a rule was seen to give enough registers."""
    problem = question.problem
    full = not problem.unaligned and problem.vectors % group == 0 and is_power_of_two(problem.vectors)
    few = problem.vectors // group * problem.vector * problem.element_bytes <= thread_bytes(question, rule)
    wide = problem.vector_bytes == ACCESS_BYTES and problem.same_types
    little = 0 < rule.extra_registers >= problem.extra_registers and problem.fields == 1
    return full and few and wide and little and question.measured


def can_cache(question: Question, elements: int) -> bool:
    """Say whether a thread that holds so many elements has room for their parameters in registers."""
    problem, tile = question.problem, question.rules.tile
    most = tile.narrow_parameter_words if question.narrow else tile.parameter_words
    return bool(problem.parameter_bytes) and words(problem, elements, cached=True) <= most


def may_persist(problem: Problem, plan: Plan) -> bool:
    """Say whether what is kept for a block's next rows, or on its way, is theirs."""
    if not plan.unaligned:
        return True  # else they must have the same alignment
    if plan.dynamic:
        # threads hold what is before a row's first line, and each of their warps has a vector; only a thread's last
        # vector may be missing
        line, (least, _) = LINE_BYTES // problem.load_bytes, line_vectors(problem, plan.ctas_per_row)
        holds = plan.group >= line - 1 and least > (line - 2) // WARP * WARP
        return plan.unaligned == UNALIGNED and holds and plan.group * (plan.vectors - 1) <= least
    return (
        problem.alignment_period > 0
        and plan.rows_per_group == 1
        and not (plan.stages and plan.unaligned == UNALIGNED_APART)
    )
