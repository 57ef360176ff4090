"""The simulator itself: what is right runs, and each planted fault is reported with its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cupynorm
from cupynorm.call.view import View
from cupynorm.lower.row import row_spec
from cupynorm.ops.norm import LAYER_NORM
from cupynorm.ops.softmax import SOFTMAX
from cupynorm.runtime import compiler, devices
from tests import build_gate, module_text, simulator
from tests.simulator import build, cupy, rehearsal, simulated  # noqa: F401  a fixture

KERNEL = """
namespace sample {{
struct Arguments {{
  const float* x;
  float* y;
  int n;
}};
template <int kCase>
__global__ void __launch_bounds__(kCase > 1 ? 256 : 128) kernel(const __grid_constant__ Arguments a) {{
  const int i = threadIdx.x, lane = i % 32;
  (void)lane;
{body}
}}
}}
"""


def kernel(body, case=2):
    """Return a kernel of one struct, as cupynorm's are; its body begins at line 12 of kernel.cu."""
    prefix, _, body = body.rpartition("// body\n")
    name = f"sample::kernel<{case}>"
    return cupy.RawModule(code=prefix + KERNEL.format(body=body), name_expressions=(name,)).get_function(name)


def run(body, x, n=None, threads=64, blocks=1, shared=0, y=None, case=2):
    """Launch a body on x; gives y, of n elements, on the host."""
    x = x if isinstance(x, cupy.ndarray) else cupy.asarray(x)
    y = cupy.empty(x.size if n is None else n, np.float32) if y is None else y
    kernel(body, case)((blocks,), (threads,), (struct_of(x, y),), shared_mem=shared)
    return y.get()


def struct_of(x, y):
    """Return the kernel's one argument."""
    members = np.dtype([("x", np.uintp), ("y", np.uintp), ("n", np.int32)], align=True)
    return np.array([(x.data.ptr, y.data.ptr, y.size)], members)


pytestmark = pytest.mark.unrehearsed  # kernels of its own, with faults


@pytest.fixture(autouse=True)
def twins(simulated, monkeypatch):
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated


COUNT = np.arange(64, dtype=np.float32)

BROADCAST = """
  __shared__ float first[2];
  if (i == 63) first[0] = a.x[5];
  {barrier}
  a.y[i] = first[0];
"""


@pytest.mark.parametrize("schedule", ["forward", "reverse", 0, 1, 2, 3])
def test_a_block_sum_is_right_under_every_schedule(monkeypatch, schedule):
    monkeypatch.setattr(simulator.settings, "schedules", (schedule,))
    body = """
  __shared__ float part[8];
  float sum = a.x[blockIdx.x * blockDim.x + i];
  for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (lane == 0) part[i / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += part[warp];
  a.y[blockIdx.x * blockDim.x + i] = sum;
"""
    x = np.arange(7 * 256, dtype=np.float32)

    y = run(body, x, threads=256, blocks=7)

    np.testing.assert_array_equal(y.reshape(7, 256), np.repeat(x.reshape(7, 256).sum(1)[:, None], 256, 1))


def test_a_barrier_makes_a_broadcast_safe():
    y = run(BROADCAST.format(barrier="__syncthreads();"), COUNT)

    np.testing.assert_array_equal(y, 5)


def test_a_missing_barrier_is_found():
    with pytest.raises(RuntimeError, match=r"race: schedules forward and reverse leave different bits"):
        run(BROADCAST.format(barrier=""), COUNT)


def test_a_missing_barrier_between_uses_is_found():
    body = """
  __shared__ float part[2];
  for (int round = 0; round < 2; ++round) {
    if (lane == 0) part[i / 32] = a.x[i] + round;
    __syncthreads();
    if (!round) a.y[i] = part[1 - i / 32];
  }
"""
    with pytest.raises(RuntimeError, match="race"):
        run(body, COUNT)


def test_lanes_run_apart_until_they_meet():
    body = """
  __shared__ float slot[64];
  slot[i] = a.x[i];
  {meet}
  a.y[i] = slot[i ^ 1];
"""
    np.testing.assert_array_equal(run(body.format(meet="__syncwarp();"), COUNT), COUNT[np.arange(64) ^ 1])
    with pytest.raises(RuntimeError, match="race"):
        run(body.format(meet=""), COUNT)


def test_a_barrier_that_some_threads_have_left_behind_is_reported():
    with pytest.raises(
        RuntimeError,
        match=r"divergent __syncthreads; 57 of 64 threads wait in __syncthreads at kernel\.cu:14; 7 have .*\(0, 0, 0\)",
    ):
        run("\n  if (i < 7) return;\n  __syncthreads();\n", COUNT)


def test_two_barriers_are_not_one():
    body = "\n  if (i < 32)\n    __syncthreads();\n  else\n    __syncthreads();\n"

    with pytest.raises(RuntimeError, match=r"divergent .* 32 of 64 .*:14; 32 of 64 .*:16"):
        run(body, COUNT)


def test_lanes_that_never_come_are_reported():
    with pytest.raises(
        RuntimeError,
        match=r"deadlock: .* 31 of 32 threads wait in __shfl_sync at kernel\.cu:14 with mask 0xffffffff; 1 have exited",
    ):
        run("\n  if (i == 9) return;\n  a.y[i] = __shfl_sync(0xffffffffu, a.x[i], 0);\n", COUNT, threads=32)


def test_lanes_that_wait_elsewhere_are_reported():
    with pytest.raises(RuntimeError, match=r"deadlock: .* 16 of 32 .* __shfl_sync .* 16 of 32 .* __syncwarp"):
        run(
            "  if (i < 16) a.y[i] = __shfl_sync(~0u, a.x[i], 0);\n  else __syncwarp(0xffff0000u), __syncwarp(~0u);",
            COUNT,
            threads=32,
        )


def test_a_lane_outside_its_own_mask_is_reported():
    with pytest.raises(
        RuntimeError, match=r"lane 16 is not in the mask it passes to __shfl_sync at kernel\.cu:12"
    ):
        run("a.y[i] = __shfl_sync(0xffffu, a.x[i], 0);", COUNT, threads=32)


def test_reading_a_lane_outside_the_mask_is_reported():
    with pytest.raises(RuntimeError, match="lane 0 reads lane 20, which takes no part, in __shfl_sync"):
        run("if (i < 16) a.y[i] = __shfl_sync(0xffffu, a.x[i], 20);", COUNT, threads=32)


def test_groups_of_lanes_meet_on_their_own():
    body = """
  const unsigned mask = 0xffu << (lane & 24);
  float sum = a.x[i];
  for (int turn = 0; turn <= lane / 8; ++turn) sum = __shfl_sync(mask, sum, (lane & 24) + 7 - lane % 8);
  a.y[i] = sum;
"""
    turns = np.arange(64) % 32 // 8 + 1

    y = run(body, COUNT)

    np.testing.assert_array_equal(y, np.where(turns % 2, np.arange(64) ^ 7, np.arange(64)))


@pytest.mark.parametrize(
    ("call", "source"),
    [
        ("__shfl_sync(~0u, v, 3)", lambda i: i // 32 * 32 + 3),
        ("__shfl_sync(~0u, v, 11, 8)", lambda i: i // 8 * 8 + 3),
        ("__shfl_xor_sync(~0u, v, 5)", lambda i: i ^ 5),
        (
            "__shfl_xor_sync(~0u, v, 8, 8)",
            lambda i: np.where(i & 8, i ^ 8, i),
        ),  # earlier groups may be read, later ones not
        ("__shfl_down_sync(~0u, v, 3)", lambda i: np.where(i % 32 + 3 < 32, i + 3, i)),
        ("__shfl_up_sync(~0u, v, 3, 16)", lambda i: np.where(i % 16 >= 3, i - 3, i)),
    ],
)
def test_shuffles_move_values_of_4_and_8_bytes(call, source):
    body = """
  auto test = [&](auto v, int place) {{ a.y[64 * place + i] = {call} / 3; }};
  test(a.x[i] * 3, 0);
  test(double(a.x[i]) * 3, 1);
  test(int(a.x[i]) * 3, 2);
  test((unsigned long long)a.x[i] * 3, 3);
"""
    y = run(body.format(call=call), COUNT, n=256)

    np.testing.assert_array_equal(y.reshape(4, 64), np.tile(source(np.arange(64)), (4, 1)))


def test_votes_see_the_lanes_of_the_mask():
    body = """
  if (lane >= 8) return;
  const bool odd = lane % 2;
  a.y[i] = __ballot_sync(0xffu, odd) + 1000 * __any_sync(0xffu, lane == 3) + 2000 * __all_sync(0xffu, lane < 8)
         + 4000 * __all_sync(0xffu, odd) + 8000 * __any_sync(0xffu, lane > 8);
"""
    y = run(body, COUNT, threads=32)

    np.testing.assert_array_equal(y[:8], 0xAA + 3000)


COPIES = """
  __shared__ __align__(16) float held[2][64];
  auto copy = [&](int stage) {
    simulator::copy_later(&held[stage][i], a.x + 64 * stage + i, 4, {"copy", __FILE__, __LINE__});
    simulator::commit_copies();
  };
  copy(0);
  copy(1);
  simulator::wait_for_copies(WAIT);
  a.y[i] = held[0][i];
  simulator::wait_for_copies(0);
  a.y[64 + i] = held[1][i];
"""


def test_asynchronous_copies_are_there_after_the_wait():
    x = np.arange(128, dtype=np.float32)

    np.testing.assert_array_equal(run(COPIES.replace("WAIT", "1"), x, n=128), x)


def test_reading_a_copy_before_the_wait_is_found():
    with pytest.raises(RuntimeError, match=r"race: .* 256 of the 512 bytes"):
        run(COPIES.replace("WAIT", "2"), np.arange(128, dtype=np.float32), n=128)


def test_shared_memory_holds_nan_until_written():
    prefix = "extern __shared__ __align__(16) unsigned char shared_memory[];\n// body\n"
    body = "__shared__ float s[64];\n a.y[i] = i % 2 ? s[i] : reinterpret_cast<float*>(shared_memory)[i];\n s[i] = 1;"

    y = run(prefix + body, COUNT, blocks=3, shared=256)

    assert np.isnan(y).all()


def test_a_write_past_the_shared_memory_asked_for_is_reported():
    prefix = "extern __shared__ __align__(16) unsigned char shared_memory[];\n// body\n"

    with pytest.raises(
        RuntimeError,
        match="write past the 255 bytes of dynamic shared memory that were asked for, at byte 255",
    ):
        run(prefix + "reinterpret_cast<float*>(shared_memory)[i] = 1;", COUNT, shared=255)


@pytest.mark.parametrize(
    ("index", "where"),
    [
        ("i + 1", "4 bytes past the end .* 1 bytes away"),
        ("i - 1", "4 bytes before the start .* 1 bytes away"),
    ],
)
def test_a_write_outside_an_array_is_reported(index, where):
    with pytest.raises(RuntimeError, match=f"out-of-bounds write: {where}"):
        run(f"a.y[{index}] = a.x[i];", COUNT)


def test_a_read_outside_an_array_brings_nan():
    y = run("a.y[i] = a.x[i + 1];", COUNT)

    np.testing.assert_array_equal(y, [*COUNT[1:], np.nan])


def test_a_write_outside_is_reported_once():
    with pytest.raises(RuntimeError, match="out-of-bounds"):
        run("a.y[i + 1] = 0;", COUNT)

    np.testing.assert_array_equal(run("a.y[i] = 1;", COUNT), 1)


@pytest.mark.parametrize("misalign", [4, 8])
def test_a_misaligned_access_is_reported(misalign):
    x = simulator.place(COUNT, misalign)

    with pytest.raises(
        RuntimeError, match=r"misaligned access to 0x\w+, which needs 16 bytes of alignment, at kernel.cu:12"
    ):
        run("a.y[i] = i < 16 ? __ldg(reinterpret_cast<const uint4*>(a.x) + i).x : 0;", x)


def test_an_illegal_address_ends_the_launch_only():
    with pytest.raises(
        RuntimeError, match=r"illegal address .*, some time after __syncthreads at kernel.cu:12"
    ):
        run("__syncthreads(); a.y[i] = *(volatile float*)(unsigned long long)(a.n * 4);", COUNT)

    np.testing.assert_array_equal(run("a.y[i] = 1;", COUNT), 1)


def test_a_trap_is_reported():
    with pytest.raises(RuntimeError, match=r"the kernel called __trap at kernel.cu:12 .*thread \(5, 0, 0\)"):
        run("if (i == 5) __trap();", COUNT)


def test_undefined_behaviour_is_reported_on_request(monkeypatch):
    monkeypatch.setenv("CUPYNORM_SIMULATOR_SANITIZE", "undefined")

    with pytest.raises(RuntimeError, match=r"shift out of range at kernel.cu:12"):
        run("a.y[i] = 1 << a.n;", COUNT)


ADDRESS = """
import sys
sys.path.insert(0, {path!r})
import numpy as np
from tests import simulator
from tests.kernels import test_simulator
x, y = simulator.cupy.asarray(test_simulator.COUNT), simulator.cupy.empty(64, np.float32)
assert (test_simulator.run("a.y[i] = a.x[i];", x) == x.get()).all()
prefix = "extern __shared__ __align__(16) unsigned char shared_memory[];\\n// body\\n"
faults = [
    lambda: test_simulator.run("a.y[i] = a.x[i + 1];", x, shared=64),
    lambda: test_simulator.run(prefix + "__syncthreads(); a.y[i] = shared_memory[i + 1];", x, shared=64),
    lambda: test_simulator.run_clusters(
        test_simulator.AFTERWARDS.replace("{{use}}", "a.y[i] = remote"), width=2, blocks=2
    ),
]
for fault in faults:
    try:
        fault()
    except RuntimeError as error:
        print("RAISED", error)
test_simulator.run_clusters("a.y[i] = 1; cluster_sync();", width=4, blocks=8)
"""


def test_an_address_sanitizer_reports_reads_too():
    environment = simulator.sanitized_environment("address")
    if not Path(environment["LD_PRELOAD"]).is_file():
        pytest.skip("libasan is not installed")

    script = ADDRESS.format(path=str(Path(__file__).parents[2]))
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )

    raised = [line for line in done.stdout.splitlines() if line.startswith("RAISED")]
    assert done.returncode == 0, done.stderr
    assert len(raised) == 3
    assert all("AddressSanitizer: use-after-poison" in line for line in raised)
    assert all(
        "kernel.cu:" in line for line in raised[:2]
    )  # binutils loses the name where a text names it twice


WIDTH, HEIGHT, DEPTH, NON_PORTABLE = 11, 12, 13, 14  # cuFuncSetAttribute's numbers

MEETINGS = """
inline void cluster_arrive(SIMULATOR_HERE) { simulator::cluster_arrive({"cluster_arrive", file, line}); }
inline void cluster_wait(SIMULATOR_HERE) { simulator::cluster_wait({"cluster_wait", file, line}); }
inline void cluster_sync(SIMULATOR_HERE) { cluster_arrive(file, line), cluster_wait(file, line); }
inline void grid_arrive(SIMULATOR_HERE) { simulator::grid_arrive({"grid_arrive", file, line}); }
inline void grid_wait(SIMULATOR_HERE) { simulator::grid_wait({"grid_wait", file, line}); }
inline void grid_sync(SIMULATOR_HERE) { grid_arrive(file, line), grid_wait(file, line); }
template <typename T>
inline T& of_block(T& shared, int block, SIMULATOR_HERE) {
  return *static_cast<T*>(simulator::of_block(&shared, block, {"of_block", file, line}));
}
#define own simulator::block_of_cluster()
#line 1 "kernel.cu"
"""


def set_cluster(function, width):
    """Ask for clusters, as the host does."""
    if width > 8:
        simulator.driver.funcSetAttribute(function.kernel.ptr, NON_PORTABLE, 1)
    for attribute, value in ((WIDTH, width), (HEIGHT, 1), (DEPTH, 1)):
        simulator.driver.funcSetAttribute(function.kernel.ptr, attribute, value)


def run_clusters(body, width, blocks, threads=64, shared=0, prefix=""):
    """Launch a body in clusters on 0, 1, ..., one number for each thread; gives y, as many."""
    x, y = (
        cupy.asarray(np.arange(blocks * threads, dtype=np.float32)),
        cupy.empty(blocks * threads, np.float32),
    )
    function = kernel(prefix + MEETINGS + "// body\n" + body)
    set_cluster(function, width)
    function((blocks,), (threads,), (struct_of(x, y),), shared_mem=shared)
    return y.get()


def run_cooperative(body, blocks, threads=64, n=None):
    """Launch a body cooperatively on 0, 1, ..., one number for each thread; gives y, as many."""
    x = cupy.asarray(np.arange(blocks * threads, dtype=np.float32))
    y = cupy.empty(n or x.size, np.float32)
    launch_cooperative(kernel(MEETINGS + "// body\n" + body), blocks, threads, struct_of(x, y))
    return y.get()


def launch_cooperative(function, blocks, threads, arguments):
    """Launch through the driver: CuPy's functions have no word for it."""
    parameters = np.array([arguments.ctypes.data], np.uintp)
    simulator.driver.launchCooperativeKernel(
        function.kernel.ptr, blocks, 1, 1, threads, 1, 1, 0, 0, parameters.ctypes.data
    )


CLUSTER_SUM = """
  __shared__ float part[2], total;
  float sum = a.x[blockIdx.x * blockDim.x + i];
  for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (lane == 0) part[i / 32] = sum;
  FIRST;
  if (i == 0) {
    total = 0;
    for (int block = 0; block < WIDTH; ++block) total += of_block(part[0], block) + of_block(part[1], block);
  }
  __syncthreads();
  a.y[blockIdx.x * blockDim.x + i] = total + 1000000 * own;
  LAST;
"""


@pytest.mark.parametrize("width", [1, 2, 8, 16])
@pytest.mark.parametrize("os_threads", [1, 2])
def test_a_sum_over_a_cluster_is_right_under_every_schedule(monkeypatch, width, os_threads):
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse", 0, 1, 2, 3))
    monkeypatch.setattr(simulator.settings, "os_threads", os_threads)
    body = (
        CLUSTER_SUM.replace("WIDTH", "a.n / 192")
        .replace("FIRST", "cluster_sync()")
        .replace("LAST", "cluster_sync()")
    )

    y = run_clusters(body, width, blocks=3 * width)

    expected = np.arange(3 * width * 64).reshape(3, -1).sum(1)[:, None] + 1000000 * np.arange(width)
    np.testing.assert_array_equal(y.reshape(3 * width, 64), np.repeat(expected.reshape(-1, 1), 64, 1))


def test_remote_memory_before_the_first_barrier_is_reported():
    body = (
        CLUSTER_SUM.replace("WIDTH", "2")
        .replace("FIRST", "__syncthreads()")
        .replace("LAST", "cluster_sync()")
    )

    with pytest.raises(
        RuntimeError, match=r"block 1 of the cluster, which may not have begun: .* of_block at kernel\.cu:20"
    ):
        run_clusters(body, width=2, blocks=4)


def test_remote_memory_of_a_block_that_has_exited_is_reported():
    body = CLUSTER_SUM.replace("WIDTH", "2").replace("FIRST", "cluster_sync()").replace("LAST", "")

    with pytest.raises(
        RuntimeError,
        match=r"shared memory of block 0 of the cluster, which has exited, of_block at .*:20 \[block \(1, 0, 0\)",
    ):
        run_clusters(body, width=2, blocks=2)


AFTERWARDS = """
  __shared__ float slot[64];
  slot[i] = a.x[i];
  cluster_sync();
  float& remote = of_block(slot[i], 1 - own);
  cluster_sync();
  if (own == 0) {use};
"""


def test_a_read_of_a_block_that_has_exited_is_found():
    with pytest.raises(RuntimeError, match="race: schedules forward and reverse"):
        run_clusters(AFTERWARDS.replace("{use}", "a.y[i] = remote"), width=2, blocks=2)


def test_a_write_to_a_block_that_has_exited_is_found():
    with pytest.raises(
        RuntimeError,
        match=r"wrote to the shared memory of this one, which had exited \[block \(1, 0, 0\)\] \(schedule reverse\)",
    ):
        run_clusters(AFTERWARDS.replace("{use}", "remote = 1"), width=2, blocks=2)


ROUNDS = """
  __shared__ float slot[64];
  float sum = 0;
  for (int round = 0; round < 3; ++round) {
    slot[i] = a.x[blockIdx.x * 64 + i] * (1 + round);
    cluster_sync();
    sum += of_block(slot[63 - i], (own + 1) % 4);
    LAST;
  }
  a.y[blockIdx.x * 64 + i] = sum;
"""


def test_a_missing_second_barrier_of_the_cluster_is_found():
    y = run_clusters(ROUNDS.replace("LAST", "cluster_sync()"), width=4, blocks=8)

    neighbours = np.roll(np.arange(512).reshape(2, 4, 64), -1, 1)[:, :, ::-1]
    np.testing.assert_array_equal(y.reshape(2, 4, 64), 6 * neighbours)
    with pytest.raises(RuntimeError, match="race"):
        run_clusters(ROUNDS.replace("LAST", "if (round == 2) cluster_sync()"), width=4, blocks=8)


def test_what_stands_between_arrival_and_wait_may_come_late():
    body = """
  __shared__ float slot[64];
  slot[i] = a.x[i];
  cluster_arrive();
  {between}
  cluster_wait();
  a.y[blockIdx.x * 64 + i] = of_block(slot[i], 1 - own);
  cluster_sync();
"""
    y = run_clusters(body.format(between=""), 2, 2)

    np.testing.assert_array_equal(y, np.tile(np.arange(64), 2))
    with pytest.raises(RuntimeError, match="race"):
        run_clusters(body.format(between="if (own == 0) slot[i] = 7;"), 2, 2)


def test_static_and_dynamic_memory_of_each_block_hold_nan_until_written():
    prefix = "extern __shared__ __align__(16) unsigned char shared_memory[];\n"
    body = """
  __shared__ float slot[64];
  auto& dynamic = reinterpret_cast<float(&)[32]>(shared_memory);
  cluster_sync();
  a.y[blockIdx.x * 64 + i] = i % 2 ? of_block(slot[i], 1 - own) : of_block(dynamic[i / 2], 1 - own);
  cluster_sync();
  slot[i] = 1, dynamic[i / 2] = 2;
"""
    assert np.isnan(run_clusters(body, width=2, blocks=8, shared=128, prefix=prefix)).all()
    with pytest.raises(RuntimeError, match="address past the 124 bytes of dynamic shared memory .* of_block"):
        run_clusters(body, width=2, blocks=8, shared=124, prefix=prefix)


def test_a_remote_write_past_the_shared_memory_asked_for_is_reported():
    prefix = "extern __shared__ __align__(16) unsigned char shared_memory[];\n"
    body = "cluster_sync(); if (own == 1) (&of_block(shared_memory[0], 0))[a.n] = 1; cluster_sync();"

    with pytest.raises(RuntimeError, match=r"write past the 128 bytes .* at byte 128 \[block \(0, 0, 0\)"):
        run_clusters(body, 2, 2, shared=128, prefix=prefix)


@pytest.mark.parametrize(
    ("body", "report"),
    [
        (
            "__shared__ float s; cluster_sync(); of_block(s, 2) = 1;",
            "block 2 of a cluster of 2, of_block",
        ),
        (
            "__shared__ float s; cluster_sync(); of_block(s, -1) = 1;",
            "block -1 of a cluster of 2, of_block",
        ),
        (
            "float s; cluster_sync(); of_block(s, 0) = 1;",
            "address outside the shared memory of this block, of_block",
        ),
        ("cluster_arrive(); cluster_arrive();", "a second arrival, the first was in cluster_arrive at .*:12"),
        ("cluster_wait();", "a wait without an arrival before it: cluster_wait"),
        (
            "if (i < 9)\n cluster_sync();\n else\n cluster_sync();",
            "divergent barrier of the cluster; 9 of 64 threads arrive in .*:13; 55 of 64 threads arrive in .*:15",
        ),
        (
            "if (own)\n __syncthreads();\n else if (i)\n __syncthreads(); else\n cluster_sync();",
            r"deadlock: .*; 63 of 128 .* __syncthreads at .*:15; 1 of 128 .* cluster_wait at .*; 64 have .*\(0, 0, 0\)",
        ),
        ("grid_arrive();", "only a cooperative launch has a barrier of the grid: grid_arrive"),
    ],
)
def test_a_fault_of_a_cluster_is_reported(body, report):
    with pytest.raises(RuntimeError, match=report):
        run_clusters(body, width=2, blocks=2)


def test_threads_that_have_exited_are_not_waited_for_by_a_cluster():
    body = """
  a.y[blockIdx.x * 64 + i] = 1;
  if (own == 1 && i % 3) return;
  cluster_sync();
  a.y[blockIdx.x * 64 + i] = 2;
"""
    y = run_clusters(body, width=2, blocks=2)

    np.testing.assert_array_equal(y[:64], 2)
    np.testing.assert_array_equal(y[64:], np.where(np.arange(64) % 3, 1, 2))


def test_a_launch_without_clusters_has_clusters_of_one_block():
    y = run(
        MEETINGS
        + "// body\n__shared__ float s[64]; s[i ^ 1] = 2; cluster_sync(); a.y[i] = of_block(s[i], own);",
        COUNT,
    )

    np.testing.assert_array_equal(y, 2)


@pytest.mark.parametrize(
    ("attribute", "value"), [(WIDTH, 16), (WIDTH, -1), (HEIGHT, 2), (DEPTH, 2), (NON_PORTABLE, 2)]
)
def test_a_cluster_of_a_wrong_shape_is_refused(attribute, value):
    with pytest.raises(RuntimeError, match=f"CUDA_ERROR_INVALID_VALUE.* attribute {attribute} is {value}"):
        simulator.driver.funcSetAttribute(kernel("").kernel.ptr, attribute, value)


def test_wide_clusters_are_asked_for():
    function = kernel("")
    nothing = (np.zeros(1, "u8,u8,u8"),)
    set_cluster(function, 16)

    function((32,), (1,), nothing)
    assert simulator.driver.funcGetAttribute(WIDTH, function.kernel.ptr) == 16
    simulator.driver.funcSetAttribute(function.kernel.ptr, NON_PORTABLE, 0)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_CLUSTER_SIZE: .* clusters \(16, 1, 1\)"):
        function((32,), (1,), nothing)


def test_a_grid_that_is_no_multiple_of_the_cluster_is_refused():
    function = kernel("")
    set_cluster(function, 4)

    with pytest.raises(
        RuntimeError, match=r"INVALID_CLUSTER_SIZE: .* clusters \(4, 1, 1\) in a grid \(6, 1, 1\)"
    ):
        function((6,), (1,), (np.zeros(1, "u8,u8,u8"),))


def test_a_cluster_with_a_width_only_is_refused():
    function = kernel("")
    simulator.driver.funcSetAttribute(function.kernel.ptr, WIDTH, 4)

    with pytest.raises(RuntimeError, match=r"INVALID_CLUSTER_SIZE: .* clusters \(4, 0, 0\)"):
        function((4,), (1,), (np.zeros(1, "u8,u8,u8"),))


def test_a_device_before_sm_90_has_no_clusters(monkeypatch):
    simulator.install(monkeypatch, "a100")

    with pytest.raises(RuntimeError, match="a device of compute capability 80 has no clusters"):
        set_cluster(kernel(""), 2)


GRID_SUM = """
  float& part = a.y[gridDim.x];  // behind the results: one for each block
  float sum = a.x[blockIdx.x * blockDim.x + i];
  for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (i == 0) (&part)[blockIdx.x] = sum;
  {meet}
  sum = 0;
  for (int block = 0; block < gridDim.x; ++block) sum += (&part)[block];
  if (i == 0) a.y[blockIdx.x] = sum;
"""


@pytest.mark.parametrize("schedule", ["forward", "reverse", 0, 1, 2, 3])
def test_a_sum_over_the_grid_is_right_under_every_schedule(monkeypatch, schedule):
    monkeypatch.setattr(simulator.settings, "schedules", (schedule,))

    y = run_cooperative(GRID_SUM.format(meet="grid_sync();"), blocks=7, threads=32, n=14)

    np.testing.assert_array_equal(y[:7], np.arange(7 * 32).sum())


def test_a_missing_barrier_of_the_grid_is_found():
    with pytest.raises(RuntimeError, match="race"):
        run_cooperative(GRID_SUM.format(meet=""), blocks=7, threads=32, n=14)


NEIGHBOURS = """
__global__ void f(int* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
  for (int step = 1; step <= 2; ++step) {
    y[i] = step * i;
    grid_sync();
    const int other = y[(i + blockDim.x + 1) % all];
    grid_sync();
    y[i] = other;
  }
}
"""


def test_a_whole_device_waits_for_itself(monkeypatch):
    monkeypatch.setattr(simulator.settings, "schedules", ("reverse",))
    blocks = 132  # of an H200, one on each SM
    y = cupy.empty(blocks * 1024, np.int32)
    module = cupy.RawModule(code=MEETINGS + NEIGHBOURS, name_expressions=("f",))

    launch_cooperative(module.get_function("f"), blocks, 1024, np.array([y.data.ptr]))

    np.testing.assert_array_equal(y.get(), 2 * np.roll(np.arange(y.size), -1025))


def test_a_barrier_of_the_grid_that_a_thread_leaves_out_is_reported():
    with pytest.raises(
        RuntimeError,
        match=r"deadlock: threads wait for threads that never arrive; 191 of 192 .* grid_wait at .*:12; 1 have exited",
    ):
        run_cooperative("if (blockIdx.x == 1 && i == 5) return; grid_sync();", blocks=3)


def test_a_cooperative_launch_may_have_clusters():
    body = """
  __shared__ float slot;
  if (i == 0) slot = a.x[blockIdx.x * 64];
  grid_sync();
  a.y[blockIdx.x * 64 + i] = of_block(slot, 1 - own);
  cluster_sync();
"""
    x, y = cupy.asarray(np.arange(256, dtype=np.float32)), cupy.empty(256, np.float32)
    function = kernel(MEETINGS + "// body\n" + body)
    set_cluster(function, 2)

    launch_cooperative(function, 4, 64, struct_of(x, y))

    np.testing.assert_array_equal(y.get().reshape(4, 64)[:, 0], [64, 0, 192, 128])


def test_a_cooperative_launch_that_the_device_cannot_hold_is_refused():
    function = kernel("")
    nothing = np.zeros(1, "u8,u8,u8")

    with pytest.raises(
        RuntimeError, match="CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: .*: 529, the device holds 528 at once"
    ):
        launch_cooperative(function, 529, 256, nothing)
    launch_cooperative(function, 5, 256, nothing)


def test_more_threads_than_the_launch_bounds_are_refused():
    kernel("", case=1)((1,), (128,), (np.zeros(1, "u8,u8,u8"),))
    with pytest.raises(RuntimeError, match="block of 160 threads, __launch_bounds__ allows 128"):
        kernel("", case=1)((1,), (160,), (np.zeros(1, "u8,u8,u8"),))


def test_shared_memory_beyond_48_kib_is_asked_for():
    too_much = kernel("__shared__ float held[12289];\n  held[i] = 0;\n  a.y[i] = held[i];")
    function = kernel("__shared__ float held[256];\n  held[i] = 0;\n  a.y[i] = held[i];")
    nothing = (np.zeros(1, "u8,u8,u8"),)

    with pytest.raises(Exception, match="bytes of static shared memory, 49152 at most"):
        _ = too_much.kernel
    assert (function.shared_size_bytes, function.max_dynamic_shared_size_bytes) == (1024, 48128)
    with pytest.raises(RuntimeError, match="the function's attribute allows 48128"):
        function((1,), (1,), nothing, shared_mem=48129)
    with pytest.raises(RuntimeError, match="the device has 231424 beside the static ones"):
        function.max_dynamic_shared_size_bytes = 231425
    function.max_dynamic_shared_size_bytes = 231424


def test_occupancy_is_that_of_the_chosen_device(monkeypatch):
    function = kernel("")
    h200 = simulator.driver.occupancyMaxActiveBlocksPerMultiprocessor(function.kernel.ptr, 256, 0)
    simulator.install(monkeypatch, "t4")
    t4 = simulator.driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel("").kernel.ptr, 256, 0)

    assert (h200, t4) == (4, 4)  # both by 64 registers a thread
    assert devices.present_limits() == devices.RECORDED["t4"]


def test_several_devices_keep_their_arrays_and_kernels_apart(monkeypatch):
    simulator.install(monkeypatch, ("h200", "a100"))
    function = kernel("")
    first = function.kernel.ptr
    with cupy.cuda.Device(1):
        there = cupy.empty(3)
        second = function.kernel.ptr
        with pytest.raises(RuntimeError, match="not a function of device 1"):
            simulator.driver.funcGetAttribute(0, first)

    assert first != second
    assert (there.device.id, there[1:].device.id, cupy.empty(3).device.id) == (1, 1, 0)


def test_a_compiler_error_names_the_kernels_file_and_line(tmp_path):
    (tmp_path / "broken.cuh").write_text("\n\n__global__ void f(int) { nonsense(); }\n")
    module = cupy.RawModule(
        code="#include <broken.cuh>\n", options=(f"-I{tmp_path}",), name_expressions=("f",)
    )

    with pytest.raises(Exception, match=r"broken\.cuh:3:.*'nonsense' was not declared") as raised:
        _ = module.get_function("f").kernel

    assert type(raised.value).__name__ == "CompileException"


def test_an_edited_header_is_compiled_anew(tmp_path):
    header = tmp_path / "value.cuh"
    code = "#include <value.cuh>\n__global__ void f(float* y) { *y = VALUE; }\n"
    y = cupy.empty(1, np.float32)
    seen = []

    for value in (1, 2, 1):
        header.write_text(f"#define VALUE {value}\n")
        cupy.RawModule(code=code, options=(f"-I{tmp_path}",), name_expressions=("f",)).get_function("f")(
            (1,), (1,), (y,)
        )
        seen.append(float(y.get()[0]))

    assert seen == [1, 2, 1]


def test_what_was_built_ahead_is_not_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYNORM_SIMULATOR_CACHE", str(tmp_path / "cache"))
    code = "template <int n> __global__ void f(float* y) { *y = n; }\n"
    names = [f"f<{n}>" for n in range(3)]
    y = cupy.empty(1, np.float32)

    simulator.prebuild([(code, name) for name in names])
    monkeypatch.setattr(build, "_run", lambda command: pytest.fail(f"ran {command}"))
    seen = []
    for name in names:
        cupy.RawModule(code=code, name_expressions=(name,)).get_function(name)((1,), (1,), (y,))
        seen.append(float(y.get()[0]))

    assert seen == [0, 1, 2]
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


TWO_FOLDERS = """
import os, sys
import numpy as np
sys.path.insert(0, {path!r})
from tests.simulator import cupy
code = "template <int n> __global__ void f(int* y) {{ __syncthreads(); y[threadIdx.x] = n + blockDim.x; }}"
for n, folder in enumerate({folders!r}):
    os.environ["CUPYNORM_SIMULATOR_CACHE"] = folder
    y = cupy.empty(2, np.int32)
    cupy.RawModule(code=code, name_expressions=(f"f<{{n}}>",)).get_function(f"f<{{n}}>")((1,), (2,), (y,))
    print(*y.get())
"""


def test_a_kernel_runs_on_the_engine_of_its_own_folder(tmp_path):
    engine = build.engine(build.sanitizer())
    folders = [tmp_path / name for name in ("one", "another")]
    for folder in folders:
        folder.mkdir(mode=0o700)
        (folder / engine.name).write_bytes(engine.read_bytes())

    script = TWO_FOLDERS.format(path=str(Path(__file__).parents[2]), folders=[str(each) for each in folders])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert (done.stdout.split(), done.stderr) == (["2", "2", "3", "3"], "")


def test_device_arrays_are_not_host_arrays():
    host = np.arange(6.0).reshape(2, 3)
    x = cupy.asarray(host)

    host[0, 0] = 9

    assert not isinstance(host, cupy.ndarray)
    assert devices.is_device_array(x)
    assert x.get()[0, 0] == 0
    assert type(cupy.asnumpy(x[:, ::2])) is np.ndarray
    assert isinstance(x[:, 1:], cupy.ndarray)
    assert x[:, 1:].data.ptr == x.data.ptr + 8
    assert np.isnan(cupy.empty(5, np.float16).get()).all()
    with pytest.raises(TypeError, match="only in kernels"):
        _ = x + 1


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CUPYNORM_SIMULATOR_CXX", "no-such-compiler")

    assert "no-such-compiler, which is not installed" in simulator.why_not()
    with pytest.raises(pytest.skip.Exception, match="no-such-compiler"):
        simulator.skip_if_missing()


def test_the_product_runs_unchanged():
    x = np.random.default_rng(0).normal(size=(3, 1025)).astype(np.float32)

    y = cupy.asnumpy(cupynorm.softmax(cupy.asarray(x)))

    expected = np.exp(x.astype(float) - x.max(-1, keepdims=True))
    np.testing.assert_allclose(y, expected / expected.sum(-1, keepdims=True), rtol=1e-6)


def test_a_barrier_taken_out_of_the_shipped_kernels_is_found(tmp_path, monkeypatch):
    for path in compiler.kernels_dir().rglob("*.cu*"):
        copy = tmp_path / path.relative_to(compiler.kernels_dir())
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text().replace("__syncthreads();", ";"))
    monkeypatch.setattr(compiler, "kernels_dir", lambda: tmp_path)

    with pytest.raises(RuntimeError, match="race"):
        cupynorm.softmax(cupy.asarray(np.ones((2, 8192), np.float32)), plan="shared")


def without_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder be the cache in which there is only the engine, which takes two seconds to compile."""
    engine = build.engine(build.sanitizer())
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / engine.name).write_bytes(engine.read_bytes())
    monkeypatch.setenv("CUPYNORM_SIMULATOR_CACHE", str(folder))


@pytest.mark.skipif(build.compiler() != "g++", reason="other compilers do without")
def test_headers_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_kernels(tmp_path, monkeypatch)
    build._header.cache_clear()
    build.library('extern "C" __global__ void nothing() {}', "nothing")

    (header,) = tmp_path.glob("header-*/simulator.h.gch")
    build._header.cache_clear()  # the folder goes
    assert header.read_bytes().startswith(b"gpch")  # a library, which has no such mark, would be passed over


def joined(tmp_path, monkeypatch, kernels):
    """Compile kernels together into an empty cache."""
    without_kernels(tmp_path / "cache", monkeypatch)
    found = [build.wanted(code, name, compiler.options()) for code, name in kernels]
    build.together(found)
    return found


def row_kernels(op=LAYER_NORM):
    """Give text and name of kernels that need more and less shared memory."""
    what = row_spec(op, *(View(0, (8, 1024), (4096, 4), np.dtype(np.float32)),) * 2, 1, {})
    plans = {each.kernel: each for each in build_gate.plans(what.problem, "90")}
    return [(what.text, what.expression(plan)) for plan in plans.values()]


def test_kernels_that_are_compiled_together_are_those_that_are_compiled_alone(tmp_path, monkeypatch):
    kernels = row_kernels()
    found = joined(tmp_path, monkeypatch, kernels)
    assert all(each.path.exists() for each in found)
    assert len({each.path.stat().st_ino for each in found}) == 1  # one library
    together = [build.Library(code, name, compiler.options()) for code, name in kernels]

    without_kernels(tmp_path / "another", monkeypatch)
    for (code, name), one in zip(kernels, together, strict=True):
        alone = build.Library(code, name, compiler.options())
        for what in ("static_shared_bytes", "max_threads", "parameter_bytes"):
            assert getattr(one, what) == getattr(alone, what), (name, what)
    assert len({one.static_shared_bytes for one in together}) > 1
    assert len({one.entry for one in together}) == len(kernels)


def test_a_kernel_that_does_not_compile_leaves_the_others_to_be_compiled_alone(tmp_path, monkeypatch):
    (code, name), *_ = row_kernels()
    good, bad = joined(tmp_path, monkeypatch, [(code, name), (code, name.replace("LayerNorm", "Missing"))])
    assert not good.path.exists()
    assert build.library(code, name, compiler.options()) == good.path
    with pytest.raises(build.CompileError, match="Missing"):
        build.library(code, bad.name, compiler.options())


def test_kernels_that_include_others_headers_are_one_library_too(tmp_path, monkeypatch):
    kernels = [row_kernels(op)[0] for op in (LAYER_NORM, SOFTMAX)]
    found = joined(tmp_path, monkeypatch, kernels)
    assert len({each.includes for each in found}) == 2
    assert len({each.path.stat().st_ino for each in found}) == 1


def test_where_headers_do_not_go_together_those_that_include_the_same_are_compiled_together(
    tmp_path, monkeypatch
):
    (code, name), *others = row_kernels(SOFTMAX)
    kernels = [*row_kernels()[:2], (code, name.replace("Softmax", "Missing")), others[0]]
    found = joined(tmp_path, monkeypatch, kernels)
    assert [each.path.exists() for each in found] == [True, True, False, False]


def test_only_texts_that_are_whole_by_themselves_are_joined():
    (code, name), *_ = row_kernels()
    assert build.wanted(code, name).parts
    assert build.wanted(code, name + "Function_1").parts is None  # a function that another text might have
    assert build.wanted(code + "int more;\n", name).parts is None
    assert build.wanted(code + "\n", name).key != build.wanted(code, name).key


def test_texts_that_define_the_same_are_joined_to_one_that_defines_it_once() -> None:
    header = "#include <row/variants.cuh>\n"
    one, other = (
        f"namespace cupynorm {{\nstruct {each} {{\n}};\n}}  // namespace cupynorm\n" for each in "AB"
    )

    assert module_text.joined([header + one, header + other + one]) == header + one + other
    assert module_text.joined([header + one, "int unknown;\n" + one]) == header + one + "int unknown;\n" + one


def test_cases_that_a_rehearsal_left_out_come_back_when_one_compiled_a_kernel_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_out, other = object(), object()
    monkeypatch.setattr(rehearsal, "_left_out", {"test_f": {left_out}})
    monkeypatch.setattr(rehearsal, "_done", {left_out, other})
    monkeypatch.setattr(rehearsal, "_in_vain", {"test_f": rehearsal.IN_VAIN})
    monkeypatch.setattr(build, "alone", [])

    rehearsal.pytest_runtest_logfinish("test_f[1]")
    assert rehearsal._done == {left_out, other}

    build.alone.append("a kernel")
    rehearsal.pytest_runtest_logfinish("test_f[2]")
    assert rehearsal._done == {other}
    assert rehearsal._in_vain == {"test_f": 0}
    assert build.alone == []
