"""A green context has a share of the multiprocessors: rows that blocks share over the grid are right there, too."""

from __future__ import annotations

import ctypes
import threading
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cupynorm
from cupynorm.invoke import row_ops
from cupynorm.runtime import devices
from cupynorm.tools.testing import assert_close

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OF_MULTIPROCESSORS = 1  # CU_DEV_RESOURCE_TYPE_SM
DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
RESOURCE_BYTES = 1024  # more than a CUdevResource has
MULTIPROCESSORS = 16


def ask(name: str, *arguments: Any) -> None:
    """Call a function of the driver; skip the test where it does not know it, or refuses."""
    try:
        function = getattr(devices._driver_library(), name)
    except AttributeError:
        pytest.skip(f"the driver has no {name}")
    status = function(*arguments)
    if status:
        pytest.skip(f"{name} gave status {status}")


class Handle:
    """A stream's handle, by the protocol that CuPy takes one from."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.value


@pytest.fixture
def share(cuda: Any) -> Iterator[Any]:
    """Give a stream of a green context with a few of the multiprocessors."""
    cuda.cuda.runtime.memGetInfo()  # the device has its context
    device, whole, part, rest = (
        ctypes.c_int(),
        *(ctypes.create_string_buffer(RESOURCE_BYTES) for _ in range(3)),
    )
    groups, description = ctypes.c_uint(1), ctypes.c_void_p()
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    ask("cuDeviceGet", ctypes.byref(device), cuda.cuda.runtime.getDevice())
    ask("cuDeviceGetDevResource", device, whole, OF_MULTIPROCESSORS)
    ask(
        "cuDevSmResourceSplitByCount",
        part,
        ctypes.byref(groups),
        whole,
        rest,
        ctypes.c_uint(0),
        ctypes.c_uint(MULTIPROCESSORS),
    )
    ask("cuDevResourceGenerateDesc", ctypes.byref(description), part, ctypes.c_uint(1))
    ask("cuGreenCtxCreate", ctypes.byref(context), description, device, ctypes.c_uint(DEFAULT_STREAM))
    ask("cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(NON_BLOCKING), ctypes.c_int(0))
    yield cuda.cuda.Stream.from_external(Handle(stream.value))
    cuda.cuda.Device().synchronize()
    row_ops.forget()  # plans for the share
    library = devices._driver_library()
    library.cuStreamDestroy_v2(stream)
    library.cuGreenCtxDestroy(context)


def layer_norm(x: Any, parameters: Any) -> Any:
    return cupynorm.layer_norm(x, *parameters)


def softmax(x: Any, parameters: Any) -> Any:
    del parameters
    return cupynorm.softmax(x)


CALLS: dict[str, tuple[Callable[..., Any], tuple[int, int], str]] = {
    "clusters that claim rows of any address": (layer_norm, (700, 8193), "float16"),
    "clusters that claim rows": (layer_norm, (700, 16384), "float32"),
    "the whole grid": (softmax, (1, 1 << 19), "float32"),
    "parts in shared memory": (layer_norm, (2, 1 << 22), "float32"),
}


@pytest.mark.parametrize("known", [False, True], ids=["at first", "after the whole device"])
@pytest.mark.parametrize("name", CALLS)
def test_rows_that_blocks_share_are_right_in_a_share_of_the_device(
    share: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch, name: str, known: bool
) -> None:
    monkeypatch.setattr(row_ops, "_refusal_told", threading.Event())
    function, shape, dtype = CALLS[name]
    generator = np.random.default_rng(0)
    host = [generator.standard_normal(each).astype(dtype) for each in (shape, shape[1], shape[1])]
    x, *parameters = map(cuda.asarray, host)
    cuda.cuda.Device().synchronize()
    row_ops.forget()
    if known:
        function(x, parameters)
        (found,) = row_ops._launches.values()
        assert found.plan.cooperative  # or this test says nothing
        cuda.cuda.Device().synchronize()

    with warnings.catch_warnings(record=True) as told, share:
        warnings.simplefilter("always")
        first = function(x, parameters)
        again = function(x, parameters)
        share.synchronize()

    expected = function(host[0].astype(np.float64), [each.astype(np.float64) for each in host[1:]])
    for y in (first, again):
        assert_close(cuda.asnumpy(y), expected)
    refused = [str(each.message) for each in told if "at once" in str(each.message)]
    (found,) = row_ops._launches.values()
    print(f"\n{name}: {found.plan.variant}, refused: {refused}")
    assert len(refused) == (not found.plan.cooperative)


@pytest.mark.parametrize("known", [False, True], ids=["at first", "after the whole device"])
@pytest.mark.parametrize("cols", [32768, 65536, 262144], ids=lambda cols: f"{cols} columns")
def test_fused_rows_in_clusters_are_right_in_a_share_of_the_device(
    share: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch, cols: int, known: bool
) -> None:
    monkeypatch.setattr(row_ops, "_refusal_told", threading.Event())
    generator = np.random.default_rng(1)
    host = generator.standard_normal((20, cols)).astype("float16")
    keep = generator.random(host.shape) < 0.5
    x, where = cuda.asarray(host), cuda.asarray(keep)
    cuda.cuda.Device().synchronize()
    row_ops.forget()
    if known:
        cupynorm.softmax(x, where=where)
        (found,) = row_ops._launches.values()
        assert found.plan.cluster > 1  # or this test says nothing
        cuda.cuda.Device().synchronize()

    with warnings.catch_warnings(), share:
        warnings.simplefilter("ignore")
        results = [cupynorm.softmax(x, where=where) for _ in range(2)]
        share.synchronize()

    expected = cupynorm.softmax(host.astype(np.float64), where=keep)
    for y in results:
        assert_close(cuda.asnumpy(y), expected)
    (found,) = row_ops._launches.values()
    print(f"\nsoftmax with a mask, {cols} columns: {found.plan.variant}, clusters of {found.plan.cluster}")
