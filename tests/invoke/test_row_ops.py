"""Dispatcher, launcher and kernels together, on the simulator: what a device would do, without one."""

from __future__ import annotations

import dataclasses
import threading
import types
from typing import Any

import numpy as np
import pytest

import cupynorm
from cupynorm.invoke import row_ops
from cupynorm.ops.norm import LAYER_NORM
from cupynorm.plan import choose
from cupynorm.plan.config import PLAIN
from cupynorm.plan.variants import grid
from cupynorm.runtime import compiler, devices
from cupynorm.tools import explain
from tests import simulator
from tests.simulator import simulated

__all__ = ["simulated"]  # a fixture


def rows(shape: tuple[int, ...] = (6, 40), dtype: Any = np.float32) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def test_a_device_array_comes_back_as_one_and_equals_the_host(simulated: Any) -> None:
    host = rows()

    y = cupynorm.softmax(simulated.cupy.asarray(host))

    assert type(y) is simulated.cupy.ndarray
    np.testing.assert_allclose(simulated.cupy.asnumpy(y), cupynorm.softmax(host), rtol=1e-6)


def test_host_and_device_arrays_do_not_mix(simulated: Any) -> None:
    x = simulated.cupy.asarray(rows())
    with pytest.raises(TypeError, match="x is a CuPy array .* and gamma is a NumPy array"):
        cupynorm.layer_norm(x, np.ones(40, np.float32))
    with pytest.raises(TypeError, match="x is a NumPy array .* and out is a CuPy array"):
        cupynorm.softmax(rows(), out=x)


def test_arrays_of_two_devices_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    two = simulator.install(monkeypatch, ["h200", "a100"])
    with two.cupy.cuda.Device(1):
        gamma = two.cupy.asarray(np.ones(40, np.float32))
    with pytest.raises(ValueError, match="x is on device 0 and gamma on device 1"):
        cupynorm.rms_norm(two.cupy.asarray(rows()), gamma)


def test_an_array_of_another_device_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    two = simulator.install(monkeypatch, ["h200", "a100"])
    with two.cupy.cuda.Device(1):
        x = two.cupy.asarray(rows())

    y = cupynorm.softmax(x)

    assert y.device.id == 1
    assert two.cupy.cuda.runtime.getDevice() == 0


def test_columns_may_lie_apart(simulated: Any) -> None:
    host = rows((6, 80))

    y = cupynorm.softmax(simulated.cupy.asarray(host)[:, ::2])

    np.testing.assert_allclose(simulated.cupy.asnumpy(y), cupynorm.softmax(host[:, ::2]), rtol=2e-6)


def test_rows_may_lie_anywhere_and_are_not_copied(simulated: Any) -> None:
    host = rows((4, 6, 50))
    x = simulated.cupy.asarray(host)

    y = cupynorm.layer_norm(x[::2, ::-1, 3:43])

    np.testing.assert_allclose(
        simulated.cupy.asnumpy(y), cupynorm.layer_norm(host[::2, ::-1, 3:43]), rtol=2e-6, atol=1e-6
    )


def test_an_empty_batch_launches_nothing(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "driver", lambda: pytest.fail("the driver was asked"))

    y, mean, _ = cupynorm.layer_norm(simulated.cupy.empty((0, 7), np.float32), return_stats=True)

    assert (y.shape, mean.shape) == ((0, 7), (0,))


def test_a_plan_is_made_once_for_a_problem(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = simulated.cupy.asarray(rows())
    cupynorm.softmax(x)
    monkeypatch.setattr(choose, "choose", lambda *_, **__: pytest.fail("asked again"))

    cupynorm.softmax(x)


def test_threads_that_start_cold_compile_once(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    original = compiler._load
    monkeypatch.setattr(
        compiler, "_load", lambda *given, **more: loads.append(given) or original(*given, **more)
    )
    x = simulated.cupy.asarray(rows())
    expected = cupynorm.softmax(rows())
    results: list[Any] = []

    threads = [threading.Thread(target=lambda: results.append(cupynorm.softmax(x))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(loads) == 1
    for y in results:
        np.testing.assert_allclose(simulated.cupy.asnumpy(y), expected, rtol=1e-6)


def test_different_kernels_compile_at_the_same_time(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    original = compiler._load

    def load(*given: Any, **more: Any) -> Any:
        both.wait()  # a BrokenBarrierError if one waits for the other
        return original(*given, **more)

    monkeypatch.setattr(compiler, "_load", load)
    x = simulated.cupy.asarray(rows())
    results: list[Any] = []

    threads = [
        threading.Thread(target=lambda op=op: results.append(op(x, plan="uncached")))
        for op in (cupynorm.softmax, cupynorm.rms_norm)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 2


def test_a_result_does_not_depend_on_the_other_rows(simulated: Any) -> None:
    host = rows((9, 77), np.float16)
    alone = simulated.cupy.asnumpy(cupynorm.layer_norm(simulated.cupy.asarray(host[4:5])))
    host[:4] = np.nan

    among = simulated.cupy.asnumpy(cupynorm.layer_norm(simulated.cupy.asarray(host)))

    assert alone.tobytes() == among[4:5].tobytes()


def test_a_compiler_error_shows_the_log_and_the_kernels_file_and_line(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compiler, "text", lambda *_: '#include <row/variants.cuh>\n#line 7 "layer_norm.cu"\nint x = y;\n'
    )
    with pytest.raises(cupynorm.CompileError, match=r"layer_norm\.cu.?.?7"):
        cupynorm.layer_norm(simulated.cupy.asarray(rows()))


def test_the_layout_guard_stops_a_struct_that_differs(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = compiler.text
    monkeypatch.setattr(compiler, "text", lambda source, whole, size: original(source, whole, size + 8))
    with pytest.raises(cupynorm.CompileError, match="host and device layouts differ"):
        cupynorm.layer_norm(simulated.cupy.asarray(rows()))


def test_the_digest_notices_a_header(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    before = compiler.digest.__wrapped__()
    for path in compiler.kernels_dir().rglob("*.cu*"):
        target = tmp_path / path.relative_to(compiler.kernels_dir())
        target.parent.mkdir(exist_ok=True)
        target.write_text(path.read_text() + ("// edited\n" if path.name == "vector.cuh" else ""))
    monkeypatch.setattr(compiler, "kernels_dir", lambda: tmp_path)

    assert compiler.digest.__wrapped__() != before


@pytest.mark.parametrize(("value", "spelling"), [(True, "true"), (False, "false"), (1, "1"), (32, "32")])
def test_template_arguments_are_spelled_in_cpp(value: Any, spelling: str) -> None:
    assert compiler.template_argument(value) == spelling


def test_explain_needs_no_device() -> None:
    found = explain.explain(LAYER_NORM, (49152, 1024), "float16", device="h200")

    assert found.plan.variant in {"warp", "block"}
    assert found.bytes_moved == 49152 * 1024 * 4 + 2 * 1024 * 2
    assert "cupynorm::LayerNorm<float>" in found.kernel
    assert found.as_dict()["problem"]["cols"] == 1024
    assert 0 < found.occupancy <= 1


def test_explain_names_the_devices_it_knows() -> None:
    with pytest.raises(ValueError, match="device 'h300' is not recorded: use h200, h100, a100, t4"):
        explain.explain(LAYER_NORM, (4, 4), "float32", device="h300")
    with pytest.raises(ValueError, match="nothing would be launched"):
        explain.explain(LAYER_NORM, (0, 4), "float32", device="h200")


class Driver:
    """As much of libcuda as tells a name; status: of the question for the device."""

    def __init__(self, status: int) -> None:
        self.status = status

    def cuDeviceGet(self, number: Any, device: int) -> int:  # noqa: N802
        number._obj.value = device + 40
        return self.status

    def cuDeviceGetName(self, name: Any, length: int, number: Any) -> int:  # noqa: N802
        name.value = f"of {number.value}, {length}".encode()
        return 0


def _missing() -> None:
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("library", "name"),
    [(lambda: Driver(0), "of 41, 256"), (lambda: Driver(100), "CuPy's"), (_missing, "CuPy's")],
)
def test_a_devices_name_is_the_drivers_or_else_cupys(
    library: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = types.SimpleNamespace(getDeviceProperties=lambda device: {"name": b"CuPy's"})
    module = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(devices, "cupy", lambda: module)
    monkeypatch.setattr(devices, "_driver_library", library)

    assert devices.name_of(1) == name


class Launches:
    """Twin of cuLaunchKernelEx: it notes what its configuration says."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, *pointers: Any) -> int:
        config, function, parameters, extra = map(simulator.driver.address, pointers)
        assert not extra
        told = devices._LaunchConfig.from_address(config)
        attributes = [(each.id, each.value[0]) for each in told.attributes[: told.attribute_count]]
        sizes = tuple(told.grid), tuple(told.block), told.shared_bytes
        self.seen.append((function, parameters, told.stream or 0, *sizes, attributes))
        return self.status


def test_a_kernel_may_begin_before_the_one_before_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(devices, "_launch_kernel_ex", lambda: launches)
    launch = devices.Launches(devices._early(11, (5, 6, 7), (32, 2, 1), 1024), 99)

    for stream in (3, 4, 3, 0):
        launch[stream]()

    early = [(6, 1)]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert launches.seen == [(11, 99, stream, (5, 6, 7), (32, 2, 1), 1024, early) for stream in (3, 4, 3, 0)]


def test_a_kernel_whose_blocks_wait_for_one_another_may_begin_early_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = Launches()
    monkeypatch.setattr(devices, "_launch_kernel_ex", lambda: launches)

    devices._early(11, (1, 132, 1), (512, 1, 1), 64, cooperative=True)(3, 99)()

    attributes = [(6, 1), (2, 1)]  # the other is CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert launches.seen == [(11, 99, 3, (1, 132, 1), (512, 1, 1), 64, attributes)]


@pytest.mark.parametrize(
    ("how", "cooperative"),
    [
        ({"stages": 1}, True),
        ({"parameter_cache": 2}, True),
        ({"parameter_cache": 1}, False),
        ({"stages": 1, "unaligned": 1}, False),
        ({"stages": 1, "unaligned": 1, "parameter_cache": 4}, True),
        ({"stages": 1, "ctas_per_row": 1}, False),
    ],
)
def test_clusters_with_a_dynamic_scheduler_are_launched_together(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, int], cooperative: bool
) -> None:
    seen: dict[str, bool] = {}
    monkeypatch.setattr(devices, "launch_of", lambda *_, **given: seen.update(given))

    plan = dataclasses.replace(PLAIN, variant="cluster", group=128, block=128, ctas_per_row=2, grid=6)

    row_ops.launcher(11, dataclasses.replace(plan, **how))

    assert seen == {"cooperative": cooperative}


def test_a_launch_may_meet_any_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(devices, "_launch_kernel_ex", lambda: launches)
    launch = devices.Launches(devices._early(11, (1, 1, 1), (32, 1, 1), 0), 99)

    for stream in range(3 * devices.MOST_STREAMS):
        launch[stream]()
        assert len(launch) <= devices.MOST_STREAMS

    assert [seen[2] for seen in launches.seen] == list(range(3 * devices.MOST_STREAMS))


def test_a_launch_that_fails_gives_the_drivers_error(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_launch_kernel_ex", lambda: Launches(status=719))
    x = simulated.cupy.asarray(rows())

    for _ in range(2):
        with pytest.raises(devices.driver().CUDADriverError, match="719"):
            cupynorm.softmax(x)


REMEMBERED: dict[str, Any] = {
    "row": cupynorm.softmax,
    "row with statistics": lambda x: cupynorm.layer_norm(x, return_stats=True),
    "fused": lambda x: cupynorm.softmax(x, scale=2.0),
    "elementwise": lambda x: cupynorm.dropout(x, 0.5, seed=1),
    "heads": lambda x: cupynorm.split_heads(x, heads=2),
}


@pytest.mark.parametrize("name", REMEMBERED)
def test_a_launch_that_fails_the_second_time_gives_the_drivers_error_too(
    simulated: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    launches = Launches()
    monkeypatch.setattr(devices, "_launch_kernel_ex", lambda: launches)
    x = simulated.cupy.asarray(rows())
    REMEMBERED[name](x)
    launches.status = 719

    with pytest.raises(devices.driver().CUDADriverError, match="719"):
        REMEMBERED[name](x)

    assert len(launches.seen) == 2


@pytest.mark.parametrize(("device", "cuda"), [("h200", 12020), ("a100", 13000)])
def test_an_older_driver_or_device_launches_as_ever(
    monkeypatch: pytest.MonkeyPatch, device: str, cuda: int
) -> None:
    simulator.install(monkeypatch, device)
    monkeypatch.setattr(devices, "driver_cuda", lambda: cuda)
    monkeypatch.setattr(devices, "_early", None)

    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(devices.driver(), "launchCooperativeKernel", lambda *given: seen.append(given))
    monkeypatch.setattr(devices.driver(), "launchKernel", lambda *given: seen.append(given))
    for cooperative in (True, False):
        devices.launch_of(1, (1, 132, 1), (32, 1, 1), 64, cooperative=cooperative)(5, 99)()
    assert seen == [(1, 1, 132, 1, 32, 1, 1, 64, 5, 99), (1, 1, 132, 1, 32, 1, 1, 64, 5, 99, 0)]


# ---- early launches


@pytest.mark.parametrize(
    ("setting", "ptx", "binary", "early"),
    [
        (None, 90, 90, True),
        ("1", 90, 90, True),
        ("0", 90, 90, False),
        (None, 80, 90, False),  # the driver made it of PTX, in which there is no wait
        (None, 80, 80, False),
        (None, 100, 100, True),
    ],
)
def test_a_kernel_begins_early_where_it_was_compiled_to_wait_and_nobody_forbids_it(
    simulated: Any, monkeypatch: pytest.MonkeyPatch, setting: str | None, ptx: int, binary: int, early: bool
) -> None:
    monkeypatch.delenv("CUPYNORM_EARLY", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUPYNORM_EARLY", setting)
    get = simulated.driver.funcGetAttribute
    versions = {5: ptx, 6: binary}
    monkeypatch.setattr(
        simulated.driver, "funcGetAttribute", lambda number, f: versions.get(number) or get(number, f)
    )
    taken: list[bool] = []
    for name, value in (("_early", True), ("_in_turn", False)):
        real = getattr(devices, name)
        monkeypatch.setattr(
            devices, name, lambda *a, real=real, value=value, **k: (taken.append(value), real(*a, **k))[1]
        )

    cupynorm.softmax(simulated.cupy.asarray(rows()))

    assert taken == [early]


# ---- devices that do not run all blocks at once


class Refusing:
    """In place of cuLaunchKernelEx: refuses cooperative launches while `refuses` is set."""

    def __init__(self, call: Any) -> None:
        self.call, self.refuses, self.asked = call, True, 0

    def __call__(self, config: Any, *rest: Any) -> int:
        told = devices._LaunchConfig.from_address(simulator.driver.address(config))
        if any(each.id == devices.COOPERATIVE for each in told.attributes[: told.attribute_count]):
            self.asked += 1
            if self.refuses:
                return 720
        return int(self.call(config, *rest))


@pytest.fixture
def refusing(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> Refusing:
    made = Refusing(simulated.driver.launch_kernel_ex)
    monkeypatch.setattr(devices, "_launch_kernel_ex", lambda: made)
    return made


WIDE = (3, 16384)  # few rows that the whole grid shares where that is asked for


def wide(simulated: Any) -> Any:
    return simulated.cupy.asarray(np.random.default_rng(0).normal(size=WIDE).astype(np.float32))


@pytest.fixture
def grid_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every op's rows be shared by the whole grid where they can be."""
    turns = choose.in_order
    monkeypatch.setattr(choose, "in_order", lambda question: (grid.split, *turns(question)))


def test_a_refused_cooperative_launch_is_made_by_another_plan_with_one_warning(
    simulated: Any, refusing: Refusing, grid_first: None
) -> None:
    x = wide(simulated)

    with pytest.warns(
        UserWarning, match="does not run .* blocks at once .*: variant .* is used instead of split"
    ):
        first = cupynorm.softmax(x)
    again = cupynorm.softmax(x)  # without a warning, which would be an error here

    assert refusing.asked == 1  # the second call goes to the other plan at once
    expected = cupynorm.softmax(simulated.cupy.asnumpy(x))
    for y in (first, again):
        np.testing.assert_allclose(simulated.cupy.asnumpy(y), expected, rtol=1e-5)


def test_a_call_whose_plan_is_refused_later_falls_back_then(
    simulated: Any, refusing: Refusing, grid_first: None
) -> None:
    x, out = wide(simulated), simulated.cupy.empty(WIDE, np.float32)
    refusing.refuses = False
    cupynorm.softmax(x, out=out)
    cupynorm.softmax(x, out=out)
    assert refusing.asked == 2
    refusing.refuses = True
    out.fill(0)

    with pytest.warns(UserWarning, match="is used instead of split"):
        cupynorm.softmax(x, out=out)
    asked = refusing.asked
    cupynorm.softmax(x, out=out)

    assert refusing.asked == asked
    np.testing.assert_allclose(
        simulated.cupy.asnumpy(out), cupynorm.softmax(simulated.cupy.asnumpy(x)), rtol=1e-5
    )


def test_a_refused_plan_that_was_asked_for_is_an_error_that_says_why(
    simulated: Any, refusing: Refusing
) -> None:
    with pytest.raises(
        RuntimeError, match="green context or with MPS: the plan that was asked for needs that"
    ):
        cupynorm.softmax(wide(simulated), plan="split")
