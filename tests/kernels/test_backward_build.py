"""Gradients and losses through every variant compile, and the assembler found them good."""

from __future__ import annotations

import functools

import pytest

from cupynorm.plan.config import HOPPER, VARIANTS
from cupynorm.plan.limits import STATIC_SHARED_BYTES
from cupynorm.runtime import nvrtc
from tests import SLOW
from tests.build_gate import (
    GRADIENTS,
    Instance,
    begins_too_soon,
    code_of,
    compile_instances,
    endless_waits,
    extremes,
    fused_instances,
    narrow_loads,
    spills,
    stalls_a_cluster,
    tightest,
    tightness,
)
from tests.sampling import covering

pytestmark = pytest.mark.slow

# A dtype of some kinds, in which registers are fewest. All of them, on all architectures, and at all plans on the first
# of these, with CUPYNORM_SLOW=1.
SAMPLED = {
    "softmax backward, causal": "float16",
    "layer_norm backward": "float32",
    "cross_entropy": "float32",
    "cross_entropy, loss alone": "float64",
    "cross_entropy of labels": "float16",
    "cross_entropy of labels, some ignored": "float32",
    "cross_entropy of labels, loss alone": "float16",
    "cross_entropy of smooth labels": "float16",
    "cross_entropy of smooth labels, some ignored": "float16",
    "cross_entropy of smooth labels, loss alone": "float32",
    "logsumexp": "float16",
}
CASES = [
    (kind, dtype, arch)
    for arch in ("90", *(("75", "80", "100") if SLOW else ()))
    for kind in GRADIENTS
    for dtype in ("float16", "float32", "float64")
    if SLOW or SAMPLED.get(kind) == dtype
    if not ("smooth" in kind and dtype == "float64")  # which take another op
]


@functools.cache
def sample() -> dict[str, list[Instance]]:
    """Choose kernels of the sampled calls: each with every variant, and with full, ragged and unaligned rows."""
    found = [
        (kind, each)
        for kind, dtype in SAMPLED.items()
        for each in fused_instances(kind, dtype, "90", tightest)
    ]
    chosen = covering(
        found,
        lambda each: (
            each[0],
            each[1].plan.variant,
            (each[1].plan.kernel, each[1].plan.full, each[1].plan.unaligned),
        ),
        lambda each: tightness(each[1].plan),
    )
    return {kind: [each for name, each in chosen if name == kind] for kind in SAMPLED}


@pytest.mark.parametrize(("kind", "dtype", "arch"), CASES)
def test_gradients_neither_spill_nor_split_vectors(kind: str, dtype: str, arch: str) -> None:
    if not nvrtc.majors():
        pytest.skip("NVRTC is not installed")
    choice = extremes if arch == "90" else tightest
    instances = fused_instances(kind, dtype, arch, choice) if SLOW else sample()[kind]
    missing = {"cluster"} if int(arch) < HOPPER else set()
    assert {each.plan.variant for each in instances} == set(VARIANTS) - missing

    faults = {}
    for instance, kernel in compile_instances(instances, arch, nvrtc.majors()[0]):
        code, dynamic = code_of(kernel, arch), instance.plan.shared_bytes
        found = spills(kernel) + begins_too_soon(code, arch) + stalls_a_cluster(code, arch)
        found += narrow_loads(instance, code) + endless_waits(kernel)
        if dynamic and kernel.shared_bytes > STATIC_SHARED_BYTES and not kind.startswith("cross_entropy"):
            found.append(f"{kernel.shared_bytes} bytes of static shared memory")
        if found:
            faults[instance.expression] = found

    assert not faults, f"{len(faults)} of {len(instances)} kernels: {faults}"
