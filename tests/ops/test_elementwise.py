"""Activations and Philox as kernels compute them, how blocks cover an array, and calls that are launched again."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from cupynorm.host import philox, reference
from cupynorm.lower import elementwise as lower_elementwise
from cupynorm.lower.elementwise import THREADS, tiles
from cupynorm.ops import elementwise
from tests import simulator, structs
from tests.kernels.test_functions import HALVES, WORST
from tests.simulator import build, simulated

__all__ = ["simulated"]  # a fixture

needs_compiler = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
SIGNS = pytest.mark.parametrize("sign", [-1, 0, 1])  # of the errors of the device's 2^x and 1/x

HEADERS = WORST + "#include <elementwise/elementwise.cuh>\n"
TESTED = """
namespace cupynorm {{
struct Tested {{
  template <typename T>
  static void apply(const T* x, T* y) {{ {body} }}
}};
}}
"""


def activated(expression: str, x: Any, sign: int) -> Any:
    text = TESTED.format(body=f"y[0] = {expression};")
    with np.errstate(all="ignore"):
        return structs.run(text, "Tested", 1, 1, [x], HEADERS.format(sign=sign))[0]


def sums() -> Any:
    """Return all float16, and floats between them: what x + bias may be."""
    dense = np.linspace(-15, 9, 600_001)
    tiny = np.geomspace(1e-9, 1, 20_001)
    # nan and inf are tested elsewhere
    halves = HALVES[np.isfinite(HALVES)].astype(np.float64)
    return np.concatenate([halves, dense, tiny, -tiny]).astype(np.float32)


def units_off(y: Any, exact: Any, least_exponent: int, fraction_bits: int) -> Any:
    """Return the errors in units of the last place of a 16-bit type."""
    exponent = np.maximum(np.frexp(exact)[1] - 1, least_exponent)
    return np.abs(y.astype(np.float64) - exact) / np.ldexp(1.0, exponent - fraction_bits)


@needs_compiler
@SIGNS
def test_gelu_to_float16_is_within_a_unit(sign: int) -> None:
    x = sums()

    y = activated("gelu_to(half{}, x[0])", x, sign)

    exact = reference._gelu(x.astype(np.float64))
    with np.errstate(over="ignore"):
        held = np.abs(exact) < 65504
        off = units_off(y.astype(np.float16)[held], exact[held], -14, 10)
    assert off.max() < 0.9
    assert units_off(y[held], exact[held], -14, 10).max() < 0.4


@needs_compiler
@SIGNS
def test_gelu_to_bfloat16_is_within_two_units(sign: int) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = sums()

    y = activated("gelu_to(bfloat16{}, x[0])", x, sign)

    exact = reference._gelu(x.astype(np.float64))
    flushed = np.abs(exact) < 2.0**-122
    off = units_off(y.astype(ml_dtypes.bfloat16), exact, -126, 7)
    assert off[~flushed].max() < 1.3
    assert np.abs(y[flushed]).max() < 2.0**-121


@needs_compiler
@SIGNS
def test_gelu_of_every_bfloat16_is_within_two_units(sign: int) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = x[np.isfinite(x) & ((x == 0) | (np.abs(x) > 2.0**-120))]

    y = activated("gelu_to(bfloat16{}, x[0])", x, sign)

    exact = reference._gelu(x.astype(np.float64))
    seen = (np.abs(exact) > 2.0**-122) | (exact == 0)
    assert units_off(y.astype(ml_dtypes.bfloat16), exact, -126, 7)[seen].max() < 1.3


@needs_compiler
@SIGNS
def test_gelu_that_is_multiplied_keeps_its_digits(sign: int) -> None:
    x = sums()

    y = activated("gelu_factor_to(half{}, x[0])", x, sign)

    exact = reference._gelu(x.astype(np.float64))
    near = (x > -7.4) & (x != 0)
    assert (np.abs(y[near] - exact[near]) <= 2.1e-4 * np.abs(exact[near])).all()
    assert np.abs((y - exact)[x <= -7.4]).max() * 131008 < 2.0**-25


@needs_compiler
@pytest.mark.parametrize(
    ("expression", "name"),
    [
        *((f"gelu_to({each}{{}}, x[0])", "gelu") for each in ("half", "bfloat16", "float")),
        *((f"gelu_factor_to({each}{{}}, x[0])", "gelu") for each in ("half", "bfloat16", "float")),
        ("GeluTanh::apply(x[0])", "gelu_tanh"),
        ("Silu::apply(x[0])", "silu"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@np.errstate(all="ignore")
def test_an_activation_has_the_references_limits(expression: str, name: str, dtype: str) -> None:
    large = float(np.finfo(dtype).max)
    x = np.array([-np.inf, np.inf, np.nan, -0.0, 0.0, -large, large, -1e4, 1e4, 131008, -131008], dtype)

    y = activated(expression, x, 0)

    expected = reference.ACTIVATIONS[name](x.astype(np.float64)).astype(dtype)
    assert np.array_equal(y, expected, equal_nan=True)
    if "float{}" not in expression or dtype == "float64":  # fn_gelu makes 0 of -0
        assert np.array_equal(np.signbit(y[3:]), np.signbit(expected[3:]))


@needs_compiler
@pytest.mark.parametrize("name", ["gelu_tanh", "silu"])
@SIGNS
@np.errstate(all="ignore")
def test_the_other_activations_are_within_a_unit_of_float16(name: str, sign: int) -> None:
    x = sums()

    y = activated(f"{'Silu' if name == 'silu' else 'GeluTanh'}::apply(x[0])", x, sign)

    exact = reference.ACTIVATIONS[name](x.astype(np.float64))
    held = np.abs(exact) < 65504
    assert units_off(y.astype(np.float16)[held], exact[held], -14, 10).max() < 0.6


@needs_compiler
@pytest.mark.parametrize("keys", ["uint2{k0, k1}", "philox_keys(uint2{k0, k1})"])
def test_philox_gives_the_published_answers_and_its_mirrors(keys: str) -> None:
    published = [  # kat_vectors of Random123, the authors' library
        ([0] * 6, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 6, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    random = np.random.default_rng(1).integers(0, 2**32, (50, 6))
    inputs = np.concatenate([[given for given, _ in published], random]).astype(np.float64)
    body = (
        "unsigned c[4], k0 = unsigned(x[4]), k1 = unsigned(x[5]);"
        "for (int i = 0; i < 4; ++i) c[i] = unsigned(x[i]);"
        f"const uint4 w = philox4x32_10(uint4{{c[0], c[1], c[2], c[3]}}, {keys});"
        "y[0] = w.x, y[1] = w.y, y[2] = w.z, y[3] = w.w;"
    )
    text = TESTED.replace("{body}", body).replace("{{", "{").replace("}}", "}")

    words = structs.run(text, "Tested", 6, 4, list(inputs.T), "#include <base/philox.cuh>\n")

    found = np.stack(words, axis=1).astype(np.uint64)
    expected = [answer for _, answer in published]
    expected += [philox.philox(row[:4].astype(np.uint64), (int(row[4]), int(row[5]))) for row in random]
    assert np.array_equal(found, np.array(expected, np.uint64))


@needs_compiler
def test_a_block_of_philox_is_its_number_and_zeros() -> None:
    random = np.random.default_rng(2).integers(0, 2**32, (50, 4))
    inputs = np.concatenate([[[0] * 4, [2**32 - 1] * 4], random]).astype(np.float64)
    body = (
        "const auto block = static_cast<unsigned long long>(x[1]) << 32 | static_cast<unsigned long long>(x[0]);"
        "const uint4 w = philox_block(block, uint2{unsigned(x[2]), unsigned(x[3])});"
        "y[0] = w.x, y[1] = w.y, y[2] = w.z, y[3] = w.w;"
    )
    text = TESTED.replace("{body}", body).replace("{{", "{").replace("}}", "}")

    words = structs.run(text, "Tested", 4, 4, list(inputs.T), "#include <base/philox.cuh>\n")

    found = np.stack(words, axis=1).astype(np.uint64)
    expected = [
        philox.words(int(k0) | int(k1) << 32, int(low) | int(high) << 32, 0, 4)
        for low, high, k0, k1 in inputs
    ]
    assert np.array_equal(found, np.array(expected, np.uint64))


def test_round_keys_are_the_kernels() -> None:
    keys = lower_elementwise.round_keys(2**64 - 1)

    assert list(keys) == [
        (2**32 - 1 + i * philox.WEYL[0]) % 2**32 | (2**32 - 1 + i * philox.WEYL[1]) % 2**32 << 32
        for i in range(10)
    ]


SHAPES = [*itertools.product((1, 2, 3, 15, 16, 17, 1000, 70_000), (1, 8, 9, 33, 128, 768, 2048, 4104))]
SHAPES += [(1, 1 << 33), (1 << 33, 1), (3, 1 << 32), (1 << 27, 24), (5_000_000, 8192)]


@pytest.mark.parametrize("unaligned", [0, 1, 2])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_blocks_cover_every_element_and_none_has_too_much(rows: int, cols: int, unaligned: int) -> None:
    vector = math.gcd(8, cols) if unaligned == 0 else 8

    chosen = tiles(rows, cols, vector, unaligned, 1 if unaligned else 2, 270_336)

    across, down = chosen.block
    lead = vector - 1 if unaligned else 0
    assert (chosen.grid[0] - 1) * across * vector < cols + lead <= chosen.grid[0] * across * vector
    groups = chosen.grid[1] * chosen.grid[2]
    assert groups * down * chosen.rows >= rows
    assert (groups - chosen.grid[2]) * down * chosen.rows < rows
    assert across * down <= THREADS
    assert chosen.grid[0] < 1 << 31
    assert max(chosen.grid[1:]) < 1 << 16
    assert chosen.long == (max(rows, cols) >= 1 << 31)


def test_rows_of_many_vectors_are_cut_into_whole_warps() -> None:
    assert tiles(49152, 8192, 8, 0, 2, 270_336)[4:] == ((4, 24576, 1), (256, 1))
    assert tiles(49152, 128, 8, 0, 2, 270_336)[4:] == ((1, 1536, 1), (16, 16))
    assert tiles(4, 2400, 8, 0, 2, 270_336)[4:] == ((2, 4, 1), (160, 1))


class TestAgain:
    """A call is checked once, and launched again for arrays with the same alignment."""

    @pytest.fixture
    def xp(self, simulated: Any) -> Any:
        return simulated.cupy

    @pytest.fixture
    def checked(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        counted: list[int] = []
        check = elementwise.check_each

        def counting(*given: Any, **options: Any) -> Any:
            counted.append(1)
            return check(*given, **options)

        monkeypatch.setattr(elementwise, "check_each", counting)
        return counted

    def arrays(self, xp: Any, seed: int) -> tuple[Any, Any, Any, Any]:
        random = np.random.default_rng(seed)
        x, bias = (random.standard_normal(shape).astype(np.float32) for shape in ((3, 8), (8,)))
        return x, bias, xp.asarray(x), xp.asarray(bias)

    def test_other_arrays_are_not_checked_again(self, xp: Any, checked: list[int]) -> None:
        for seed in range(3):
            x, bias, on_x, on_bias = self.arrays(xp, seed)

            y = elementwise.bias_silu(on_x, on_bias)

            np.testing.assert_allclose(xp.asnumpy(y), elementwise.bias_silu(x, bias), rtol=1e-6)
        assert len(checked) == 1 + 3  # those of NumPy are

    def test_an_out_is_written_wherever_it_lies(self, xp: Any, checked: list[int]) -> None:
        x, bias, on_x, on_bias = self.arrays(xp, 0)
        expected = elementwise.bias_silu(x, bias)
        checked.clear()
        outs = [xp.empty((3, 8), np.float32) for _ in range(3)]
        for out in [*outs, on_x]:
            assert elementwise.bias_silu(on_x, on_bias, out=out) is out
            np.testing.assert_allclose(xp.asnumpy(out), expected, rtol=1e-6)
        # x itself shares memory with x, which was never found to be allowed
        assert len(checked) == 2

    def test_whatever_differs_is_checked(self, xp: Any, checked: list[int]) -> None:
        _, _, x, bias = self.arrays(xp, 0)
        whole = xp.zeros((4, 9), np.float32)
        calls: list[Any] = [
            lambda: elementwise.bias_silu(x, bias),
            lambda: elementwise.bias_silu(x, None),
            lambda: elementwise.bias_gelu(x, bias),
            lambda: elementwise.bias_gelu(x, bias, approximate="tanh"),
            lambda: elementwise.bias_silu(x[:2], bias),
            lambda: elementwise.bias_silu(whole[:3, :8], bias),
            lambda: elementwise.bias_silu(whole[:3, 1:], bias),
            lambda: elementwise.bias_silu(x, bias[:1]),
            lambda: elementwise.bias_silu(x, bias, dtype="float16"),
            lambda: elementwise.bias_silu(x, bias, out=xp.empty((3, 8), np.float16)),
            lambda: elementwise.swiglu(x, bias),
            lambda: elementwise.swiglu(x, bias, gate="second"),
            lambda: elementwise.dropout(x, 0.5, seed=1),
        ]
        for count, call in enumerate(calls, 1):
            for _ in range(2):
                call()
            assert len(checked) == count

    def test_memory_that_is_shared_is_refused_again(self, xp: Any) -> None:
        memory = xp.zeros((9, 8), np.float32)
        elementwise.bias_silu(memory[:3], memory[8], out=memory[4:7])

        with pytest.raises(ValueError, match="out and x share memory in part"):
            elementwise.bias_silu(memory[:3], memory[8], out=memory[2:5])
        with pytest.raises(ValueError, match="out and bias share memory"):
            elementwise.bias_silu(memory[:3], memory[8], out=memory[6:])

    def test_dropouts_numbers_are_those_of_the_call(self, xp: Any, checked: list[int]) -> None:
        x = np.random.default_rng(0).standard_normal(40).astype(np.float32)
        given = xp.asarray(x)
        cases = list(itertools.product((0.2, 0.7, 1.0, 0), (3, 2**64 - 1), (0, 2**64 - 3)))
        expected = [elementwise.dropout(x, p, seed=seed, offset=offset) for p, seed, offset in cases]
        checked.clear()
        for (p, seed, offset), want in zip(cases, expected, strict=True):
            y = xp.asnumpy(elementwise.dropout(given, p, seed=seed, offset=offset))
            assert np.array_equal(y == 0, want == 0)
            np.testing.assert_allclose(y, want, rtol=1e-6)
        assert len(checked) == 1

    def test_a_dtype_that_does_not_hash_is_not_remembered(self, xp: Any, checked: list[int]) -> None:
        _, _, x, bias = self.arrays(xp, 0)
        for _ in range(2):
            with pytest.raises(TypeError):
                elementwise.bias_silu(x, bias, dtype=[("f", []), 1])

        assert len(checked) == 2

    def test_a_bounded_number_is_remembered(self, xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from cupynorm.invoke import bound_calls, row_ops

        monkeypatch.setattr(bound_calls, "MOST", 2)
        for cols in (8, 16, 24, 32):
            elementwise.bias_silu(xp.zeros((2, cols), np.float32), None)

        assert len(row_ops.calls_of_thread().bound) == 2

    def test_each_device_has_its_own(self, monkeypatch: pytest.MonkeyPatch, checked: list[int]) -> None:
        xp = simulator.install(monkeypatch, ["h200", "h200"]).cupy
        for device in (0, 1, 0, 1):
            with xp.cuda.Device(device):
                _, _, x, bias = self.arrays(xp, device)
                y = elementwise.bias_silu(x, bias)
            assert y.device.id == device
        assert len(checked) == 2
        with pytest.raises(ValueError, match="x is on device 0 and bias on device 1"):
            elementwise.bias_silu(self.arrays(xp, 0)[2], bias)
