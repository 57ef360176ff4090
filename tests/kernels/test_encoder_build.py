"""The kernels of heads and of the encoder keep nothing in local memory, and move vectors of 16 bytes whole."""

from __future__ import annotations

import functools
import itertools
import re

import numpy as np
import pytest

from cupynorm._dtypes import DTYPES, compute_dtype, cpp, dtype_of
from cupynorm.bert import few_tokens, packed_attention
from cupynorm.call.view import View
from cupynorm.lower import heads
from cupynorm.plan.limits import RECORDED
from cupynorm.runtime import compiler, devices, nvrtc
from tests import SLOW
from tests.build_gate import begins_too_soon, code_of, limits_of, local_bytes_of, nvdisasm, spills

BATCH, SEQ, HEADS, SIZE = 4, 6, 3, 64
HALF, SINGLE = dtype_of("float16"), dtype_of("float32")


def contiguous(shape, dtype):
    item = dtype_of(dtype).itemsize
    return View(0, shape, np.empty(shape, np.int8).strides, dtype_of(dtype))._replace(
        strides=tuple(each * item for each in np.empty(shape, np.int8).strides)
    )


def move(x, y, of_bias, merged=False, rows=0, size=SIZE):
    split, row = (3, BATCH, HEADS, SEQ, size), (BATCH, SEQ, 3 * HEADS * size)
    if merged:
        places = (
            heads.by_heads(contiguous(split[1:], x), 1),
            heads.by_rows(contiguous((BATCH, SEQ, HEADS * size), y), 1, HEADS),
        )
    else:
        places = (
            heads.by_rows(contiguous(row, x), 3, HEADS),
            heads.by_heads(contiguous(split, y), 3),
        )
    bias = contiguous((3 * HEADS * size,), of_bias) if of_bias else None
    return heads.move_spec(*places, bias, rows)


def moves():
    same = [(x, x, bias) for x, bias in itertools.product(DTYPES, (None, "float32"))]
    mixed = [
        ("float16", "float32", None),
        ("float32", "float16", "float32"),
        ("bfloat16", "float64", "float16"),
    ]
    for types, rows in itertools.product(same + mixed, (0, 16)):
        yield types, move(*types, rows=rows)
        if types[2] is None:
            yield types, move(*types, merged=True, rows=rows)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["75", "80", "90", "120"] if SLOW else ["75", "90"])
def test_vectors_are_moved_whole_and_nothing_spills(arch):
    if not nvrtc.majors() or arch not in nvrtc.supported_archs(nvrtc.majors()[0]):
        pytest.skip("no NVRTC that knows the architecture")
    wanted = [(types, each, tokens) for types, each in moves() for tokens in heads.TOKENS]
    text = "".join(dict.fromkeys(each.text for _, each, _ in wanted))
    expressions = [each.expression(each.problem.with_tokens(tokens)) for _, each, tokens in wanted]
    kernels = nvrtc.compile_all(text, expressions, compiler.options(), arch)

    for (types, each, tokens), name, kernel in zip(wanted, expressions, kernels, strict=True):
        loaded, stored = (min(16, each.problem.vector * dtype_of(name).itemsize) for name in types[:2])
        code = code_of(kernel, arch)
        accesses = code.accesses

        assert not spills(kernel), name
        assert not begins_too_soon(code, arch), name
        assert accesses["LDG", loaded] >= tokens, (name, accesses)
        assert accesses["STG", stored] == tokens, (name, accesses)
        assert not {"LD", "ST", "LDL", "STL"} & {kind for kind, _ in accesses}, name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "120"] if SLOW else ["90"])
def test_attention_keeps_everything_in_registers_and_multiplies_on_tensor_cores(arch):
    if not nvrtc.majors() or arch not in nvrtc.supported_archs(nvrtc.majors()[0]):
        pytest.skip("no NVRTC that knows the architecture")
    for dtype in {"float16", "bfloat16"} & set(DTYPES):
        text = compiler.text("bert/attention.cuh", f"cupynorm::Attention<{cpp(dtype_of(dtype))}>", 56)
        kinds = [(size, 1) for size in range(16, 129, 16)] + [(size, 2) for size in (16, 32, 48, 64)]
        names = [packed_attention.by_warps(dtype_of(dtype), size, tiles).expression for size, tiles in kinds]
        compiled = nvrtc.compile_all(text, names, compiler.options(), arch)
        kernels = dict(zip(names, compiled, strict=True))
        launched = {
            packed_attention.choose(
                *(dtype_of(dtype), size, sequences, 12, 512, limits_of(arch)),
                lambda plan, kernels=kernels: local_bytes_of(kernels[plan.expression]),
                accelerated=False,
            ).expression
            for size, _ in kinds
            for sequences in (1, 64)
        }
        assert len(launched) >= len(kinds) - 1  # at most one size has no kernel of two tiles
        for name in launched:
            kernel = kernels[name]
            code = code_of(kernel, arch)

            assert not spills(kernel), name
            assert any(each.startswith("HMMA") for each in code.instructions), name
            assert code.accesses["LDGSTS", 16], name
            assert kernel.shared_bytes <= 48 << 10, name


@pytest.mark.slow
def test_attention_by_a_group_waits_for_products_only_where_it_says():
    if not nvrtc.majors() or "90" not in nvrtc.supported_archs(nvrtc.majors()[0]):
        pytest.skip("no NVRTC that knows the architecture")
    for dtype in {"float16", "bfloat16"} & set(DTYPES):
        text = compiler.text("bert/attention.cuh", f"cupynorm::Attention<{cpp(dtype_of(dtype))}>", 56)
        plans = [packed_attention.by_group(dtype_of(dtype), size) for size in packed_attention.GROUPED]
        plans.append(packed_attention.by_group(dtype_of(dtype), devices.BOX_COLS, boxed=True))
        names = [plan.expression for plan in plans]
        for name, kernel in zip(
            names, nvrtc.compile_all(text, names, compiler.options(), "90a"), strict=True
        ):
            assert not spills(kernel), name
            assert any(each.startswith("HGMMA") for each in code_of(kernel, "90a").instructions), name
            assert "wgmma" not in kernel.log, kernel.log  # the assembler tells if it must wait for each
            assert kernel.registers <= 128, name  # four blocks on a multiprocessor


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["90", "120"] if SLOW else ["90"])
def test_products_of_few_tokens_keep_everything_in_registers_and_multiply_on_tensor_cores(arch):
    if not nvrtc.majors() or arch not in nvrtc.supported_archs(nvrtc.majors()[0]):
        pytest.skip("no NVRTC that knows the architecture")
    for dtype in {"float16", "bfloat16"} & set(DTYPES):
        kind = cpp(dtype_of(dtype))
        text = compiler.text("bert/few.cuh", f"cupynorm::Few<{kind}>", 80)
        plans = [
            *((rows, 8, 1, 4, "false", few_tokens.ADD_RESIDUAL) for rows in few_tokens.ROWS),
            *((rows, 32, 8, 4, "false", few_tokens.ADD_RESIDUAL) for rows in few_tokens.ROWS),
            *(
                (rows, 24, 1, 4, "true", finish)
                for rows in few_tokens.ROWS
                for finish in few_tokens.FINISHES.values()
            ),
        ]
        names = [f"cupynorm::multiply_few<{kind}, {', '.join(map(str, plan))}>" for plan in plans]
        for name, kernel in zip(names, nvrtc.compile_all(text, names, compiler.options(), arch), strict=True):
            code = code_of(kernel, arch)

            assert not spills(kernel), name
            assert any(each.startswith("HMMA") for each in code.instructions), name
            assert code.accesses["LDGSTS", 16], name
            assert kernel.shared_bytes <= few_tokens.MESSAGE_BYTES + 1024, name


FEW_PLANS = [
    *((32, 8, 1, 4, "false", finish) for finish in (few_tokens.ADD_RESIDUAL, *few_tokens.FINISHES.values())),
    *((rows, 32, 8, 4, "false", few_tokens.ADD_RESIDUAL) for rows in few_tokens.ROWS),
    *((rows, 24, 1, 4, "true", few_tokens.FINISHES["none"]) for rows in few_tokens.ROWS),
]
PARAMETERS_AT = 0x210  # in the constant bank, for sm_90


@functools.cache
def instructions(ending):
    """Return the code of each of FEW_PLANS, with something in front of its kernel's header."""
    headers = "".join(
        f"#include <{each}.cuh>\n" for each in ("row/variants", "elementwise/elementwise", "bert/mma")
    )
    text = f"{headers}{ending}#include <bert/few.cuh>\n"
    names = [f"cupynorm::multiply_few<cupynorm::half, {', '.join(map(str, plan))}>" for plan in FEW_PLANS]
    kernels = nvrtc.compile_all(text, names, compiler.options())
    return {plan: code_of(each, "90").instructions for plan, each in zip(FEW_PLANS, kernels, strict=True)}


def pointers_of(code):
    """Return the names of the pointers of a Few that instructions fetch."""
    found = set()
    for each in code:
        for at in re.findall(r"c\[0x0\]\[(0x[0-9a-f]+)\]", each):
            offset = int(at, 16) - PARAMETERS_AT
            bytes_ = 16 if ".128" in each else 8 if ".64" in each else 4
            for name in few_tokens.POINTERS:
                begin = few_tokens.FEW.fields[name][1]
                if offset < begin + 8 and begin < offset + bytes_:
                    found.add(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plan", FEW_PLANS, ids=str)
def test_products_of_few_tokens_read_constants_alone_before_they_wait(plan):
    """A kernel that ends where it would wait has what comes before: all that it fetches an address of is a constant."""
    if not nvrtc.majors() or "90" not in nvrtc.supported_archs(nvrtc.majors()[0]):
        pytest.skip("no NVRTC that knows the architecture")
    if nvdisasm() is None:
        pytest.skip("no nvdisasm")
    whole, before = instructions("")[plan], instructions("#define pdl_wait() return\n")[plan]

    waits = next(i for i, each in enumerate(whole) if each.startswith("ACQBULK"))
    copies = [each for each in before if each.startswith("LDGSTS")]
    assert pointers_of(whole) >= {"x", "weight", "y"}  # they are found where they are
    assert {"weight"} <= pointers_of(before) <= few_tokens.CONSTANTS
    assert ("gamma" in pointers_of(before)) == (plan[4] == "true")
    # the whole kernel has these copies before it waits, and touches nothing else
    touched = [
        each for each in whole[:waits] if re.match(r"LDG(?!DEPBAR)|STG|RED|ATOM|UBLKCP|UTMA|LD\b|ST\b", each)
    ]
    assert copies
    assert all(each.startswith("LDGSTS") for each in touched)
    assert len(touched) == len(copies)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90"] if SLOW else ["90"])
def test_the_encoders_small_kernels_keep_nothing_in_local_memory(arch):
    if not nvrtc.majors():
        pytest.skip("no NVRTC")
    names = ["cupynorm::differ<4>"]
    for dtype in DTYPES:
        compute = cpp(compute_dtype(dtype_of(dtype)))
        kinds = f"{cpp(dtype_of(dtype))}, {compute}"
        for vector in (1, 16 // dtype_of(dtype).itemsize):
            names += [f"cupynorm::look_up<{vector}, {kinds}>"]
            names += [f"cupynorm::pool<{vector}, {each}, {kinds}>" for each in ("true", "false")]
    text = "#include <row/variants.cuh>\n#include <bert/encoder.cuh>\n"
    for name, kernel in zip(names, nvrtc.compile_all(text, names, compiler.options(), arch), strict=True):
        assert not spills(kernel), name
        assert not begins_too_soon(code_of(kernel, arch), arch), name


@pytest.mark.parametrize(("size", "vector"), [(64, 8), (36, 4), (10, 2), (33, 1)])
def test_the_head_size_says_how_wide_vectors_are(size, vector):
    assert move("float16", "float16", "float32", size=size).problem.vector == vector


def rows(tokens, stride):
    view = View(0, (tokens, SIZE), (stride, 2), dtype_of("float16"))
    return heads.by_rows(view, 1, 1)


def test_what_is_large_is_counted_in_64_bits():
    for tokens, source, target in (
        (1 << 29, 128, 128),  # 8 vectors each
        (1 << 20, 1 << 13, 128),  # elements far apart
        (1 << 20, 128, 1 << 13),
        (1 << 20, 128, -(1 << 13)),
    ):
        wide = heads.move_spec(rows(tokens, source), rows(tokens, target), None)
        assert "MovedHeads<unsigned long long, " in wide.params.cpp

    fits = heads.move_spec(rows(1 << 20, 1 << 11), rows(1 << 20, 1 << 11), None)
    assert fits.expression(fits.problem.with_tokens(1)).count("unsigned, ") == 1


def test_a_thread_takes_two_tokens_where_that_leaves_half_of_what_a_device_holds():
    h200 = 132 * 2048
    real = move("float16", "float16", None).problem._replace(threads=4096 * 96, tokens=4096)

    assert heads.tokens_of_a_thread(real.threads, h200) == 2
    assert heads.tokens_of_a_thread(32 * 96, h200) == 1
    assert real.with_tokens(2).grid[0] * heads.BLOCK == 2048 * 96


@pytest.mark.parametrize(
    ("tokens", "deep", "out", "norm", "plan"),
    [
        (1, 768, 2304, True, (16, 24, 1)),
        (32, 768, 768, False, (16, 24, 1)),
        (33, 768, 3072, True, (32, 24, 1)),
        (32, 3072, 768, False, (16, 24, 4)),
        (64, 3072, 768, False, (64, 32, 4)),
        (16, 1536, 384, False, (16, 24, 2)),
        (64, 1024, 3072, True, (32, 24, 1)),
        (8, 1024, 1024, False, (16, 16, 1)),
        (65, 768, 768, False, None),
        (8, 1536, 384, True, None),  # a norm needs whole rows, and they are too long
        (8, 768, 772, False, None),
        (8, 40, 64, False, None),
    ],
)
def test_products_of_few_tokens_are_cut_as_was_measured(tokens, deep, out, norm, plan):
    found = few_tokens.choose(tokens, deep, out, RECORDED["h200"], norm=norm)

    assert found == (plan and few_tokens.Plan(*plan))


def test_few_tokens_need_clusters_and_16_bits():
    assert few_tokens.fits(HALF, 64, 768, 3072, RECORDED["h200"])
    assert not few_tokens.fits(HALF, 64, 768, 3072, RECORDED["a100"])
    assert not few_tokens.fits(SINGLE, 64, 768, 3072, RECORDED["h200"])
    assert not few_tokens.fits(HALF, 64, 768, 3073, RECORDED["h200"])


def test_attention_in_one_launch_has_a_block_for_each_sequence_and_head():
    h200 = RECORDED["h200"]

    assert packed_attention.fits(HALF, 64, 12, 65535, h200)
    assert not packed_attention.fits(HALF, 64, 12, 65536, h200)
    assert not packed_attention.fits(HALF, 60, 12, 8, h200)
    assert not packed_attention.fits(SINGLE, 64, 12, 8, h200)


def test_attention_takes_one_tile_where_registers_are_spilled_with_two():
    call = HALF, 64, 64, 12, 512, RECORDED["rtx4090"]
    one, two = (packed_attention.by_warps(HALF, 64, tiles) for tiles in (1, 2))
    asked = []

    assert packed_attention.choose(*call, accelerated=True) == two
    assert packed_attention.choose(*call, lambda plan: asked.append(plan) or 48, accelerated=True) == one
    assert asked == [two]


@pytest.mark.parametrize(
    ("device", "size", "sequences", "length", "accelerated", "by_group"),
    [
        ("h200", 64, 32, 512, True, True),
        ("h200", 32, 32, 512, True, True),
        ("h200", 64, 32, 65, True, True),
        ("h200", 64, 32, 64, True, False),
        ("h200", 64, 8, 128, True, False),
        ("h200", 64, 1, 129, True, True),
        ("h200", 64, 32, 512, False, False),
        ("h200", 48, 32, 512, True, False),
        ("a100", 64, 32, 512, True, False),
    ],
)
def test_a_warpgroup_attends_where_it_is_faster(device, size, sequences, length, accelerated, by_group):
    limits = RECORDED[device]

    plan = packed_attention.choose(HALF, size, sequences, 12, length, limits, accelerated=accelerated)

    assert plan.accelerated == by_group
    boxed = size == 64 and length >= packed_attention.BOXED_FROM
    assert (
        plan == packed_attention.by_group(HALF, size, boxed=boxed)
        if by_group
        else "attend<" in plan.expression
    )
