"""Plans that were chosen before, on disk beside their kernels: a process that finds both imports no planner.

A plan follows from the problem, the device's limits, the rules, and what is known of the kernels of the plans that
were tried: the bytes that they spill and how many blocks of them run at once. The key has the first three, and what
the kernels are compiled from and by. What cannot be in a key is asked again: see row_ops._remembered().
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from cupynorm.plan.config import BOUNDS, VARIANTS, Plan, check_plan
from cupynorm.runtime import compiler, cubins, devices

if TYPE_CHECKING:
    from cupynorm.plan.limits import Limits
    from cupynorm.plan.problem import Problem

FORMAT = "1"  # of the files
MAGIC = b"\x93cupynorm plan 1\n"


@functools.cache
def planner_digest() -> str:
    """Return a hash of the planner: its code, and the rules and their numbers."""
    package = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  without pathlib, as in compiler.digest
    return compiler.digest_of(f"{package}/plan", (".py", ".json"))


def key(text: str, name: str, types: str, problem: Problem, limits: Limits) -> str | None:
    """Return the key of a problem's plan on the current device. The first three are a KernelSpec's.

    The text holds a digest of kernels/. The limits are those of our share of the device where MPS sets one. None where
    kernels are not kept on disk either.
    """
    if not compiler.compiles_itself():
        return None
    try:
        by = planner_digest(), str(devices.driver_cuda()), *compiler.what_compiles()
    except Exception:  # noqa: BLE001  a CuPy that we do not know, or a package without files
        return None
    return cubins.key("plan", FORMAT, text, name, types, repr(problem), repr(limits), *by)


def load(key: str) -> Plan | None:
    """Return the plan that is kept under this key; None if there is none that is complete and can be trusted."""
    body = cubins.load_body(key, cubins.PLAN_SUFFIX, MAGIC)
    return None if body is None else _plan_from(body)


def store(key: str, plan: Plan) -> bool:
    """Keep a plan; say whether it was kept."""
    import json  # noqa: PLC0415  which `import cupynorm` need not wait for

    return cubins.store_body(key, cubins.PLAN_SUFFIX, MAGIC, json.dumps(plan.as_dict()).encode())


def _plan_from(body: bytes) -> Plan | None:
    """Return the plan of a file; None if its fields are not exactly a Plan's, in name, type and range.

    They become C++ text, so nothing but names of variants and numbers may pass.
    """
    import json  # noqa: PLC0415

    try:
        told = json.loads(body)
        plan = Plan(**told)
        check_plan(plan)
    except (ValueError, TypeError, RecursionError):
        return None
    inside = all(low <= getattr(plan, name) <= high for name, (low, high) in BOUNDS.items())
    known = plan.variant in VARIANTS and type(plan.rule) is type(plan.why) is str
    return plan if inside and known and len(told) == len(Plan.__match_args__) else None
