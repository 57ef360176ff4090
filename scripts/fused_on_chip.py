"""Fused calls in `shared` and `cached` on a GPU: right beside float64, and timed beside the variants that calls choose.

Writes $OUT/fused_on_chip.json. Usage: PYTHONPATH=. python scripts/fused_on_chip.py [seconds, 140]
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import time
from typing import Any

import cupy

from cupynorm.catalog import forms
from cupynorm.plan.config import DoesNotFitError
from cupynorm.runtime import devices
from cupynorm.tools import bench
from cupynorm.tools.results import Point
from cupynorm.tools.testing import assert_form_close

BEGUN, SECONDS = time.monotonic(), float(sys.argv[1]) if len(sys.argv) > 1 else 140.0
NEW = ("shared", "cached")
BESIDE = ("block", "cluster")
TIMED = (
    "softmax/causal",
    "softmax/where",
    "softmax/lengths",
    "layer_norm/int8",
    "add_layer_norm/sum",
    "add_layer_norm/dropout",
    "add_layer_norm",
    "layer_norm/fuse",
)
COLS = (50257, 16384, 32768, 65536, 20480, 8192, 4096)  # the weak ones first
CHECKED = (77, 1001, 4096, 8195, 20480, 50257)
REPLAYS = 7


def left() -> float:
    """Return the seconds that are left."""
    return SECONDS - (time.monotonic() - BEGUN)


def checked() -> dict[str, str]:
    """Return what is wrong, or "right" or "refused", for every form, dtype, width and new variant."""
    found = {}
    for name, what in forms.FORMS.items():
        if what.alone or what.missing or not ("softmax" in name or "norm" in name):
            continue
        for cols, dtype in ((cols, dtype) for cols in CHECKED for dtype in ("float16", "float32")):
            if left() < SECONDS * 0.6:
                return {**found, "cut off": f"before {name}, {cols} columns"}
            given = forms.inputs(what, 5 if cols > 5000 else 300, cols, dtype)  # noqa: PLR2004
            on_device = {key: cupy.asarray(each) for key, each in given.items()}
            wanted = what.reference(given)
            for variant in NEW:
                label = f"{name} {dtype} {cols} {variant}"
                try:
                    results = what.call(on_device, plan=variant)
                    results = results if isinstance(results, tuple) else (results,)
                    assert_form_close(what, tuple(map(cupy.asnumpy, results)), wanted)
                    found[label] = "right"
                except DoesNotFitError:
                    found[label] = "refused"
                except Exception as fault:  # noqa: BLE001
                    found[label] = f"{type(fault).__name__}: {str(fault)[:300]}"
    return found


def held(point: Point) -> tuple[dict[str, Any], list[str]]:
    """Return the plans of a point by variant, and which variants hold its rows."""
    plans: dict[str, Any] = {}
    spec, device = bench.lowered(point), devices.present_device()
    for variant in (None, *NEW, *BESIDE):
        with contextlib.suppress(DoesNotFitError):
            plan = bench.row_ops._prepare(device, spec, variant).plan  # noqa: SLF001
            plans[variant or "chosen"] = plan.as_dict()
    return plans, [each for each in (*NEW, *BESIDE) if each in plans]


def main() -> None:
    """Check, then time as many points as there is time for."""
    report: dict[str, Any] = {"checked": checked(), "points": []}
    wrong = {key: each for key, each in report["checked"].items() if each not in {"right", "refused"}}
    right = sum(each == "right" for each in report["checked"].values())
    print(f"{right} right, {len(wrong)} not:", json.dumps(wrong, indent=1)[:3000], flush=True)
    wanted = [
        Point(op, dtype, 4096, cols) for cols in COLS for op in TIMED for dtype in ("float16", "float32")
    ]
    for point in wanted:
        if left() < 4:  # noqa: PLR2004
            report["cut off"] = str(point)
            break
        try:
            plans, variants = held(point)
            found = bench.measure(point, (), variants, replays=REPLAYS)
        except Exception as fault:  # noqa: BLE001
            print(point, f"{type(fault).__name__}: {str(fault)[:200]}", flush=True)
            continue
        times = {name: each.median for name, each in found.timings.items()}
        copy = min((each for name, each in times.items() if name.startswith("copy")), default=float("nan"))
        shares = {name: round(copy / each, 3) for name, each in times.items() if not name.startswith("copy")}
        report["points"].append({"point": str(point), "shares": shares, "plans": plans, "notes": found.notes})
        print(point, plans.get("chosen", {}).get("variant"), shares, found.notes or "", flush=True)
        (pathlib.Path(os.environ.get("OUT", ".")) / "fused_on_chip.json").write_text(json.dumps(report))
    cupy.get_default_memory_pool().free_all_blocks()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
