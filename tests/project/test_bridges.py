"""docs/bridges.md: its code runs, and gives the gradients of PyTorch and JAX, where they are installed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.pages import CHECKOUT, Block, blocks

PAGE = CHECKOUT / "docs" / "bridges.md"
ROWS, COLS, CLASSES = 12, 40, 7
# of the gradients' largest element: each framework rounds several times in 16 bits
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])


def section(framework: str) -> list[Block]:
    """Return the blocks of the page's section, which begins with the framework's import."""
    found: list[Block] = []
    for block in blocks(PAGE):
        if f"\nimport {framework}\n" in f"\n{block.text}" or (found and "import" not in block.text):
            found.append(block)
        elif found:
            break
    return found


def run(chosen: list[Block]) -> Any:
    """Run blocks in one namespace, as they go on from one another, and return what they define."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in chosen:
        exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)  # noqa: S102
    return type("Names", (), {name: staticmethod(each) for name, each in names.items()})


class Given(NamedTuple):
    """Rows with a mean and a scale of their own, what a network does with them, and what arrives at each loss."""

    x: np.ndarray
    gamma: np.ndarray
    beta: np.ndarray
    weight: np.ndarray
    labels: np.ndarray
    dloss: np.ndarray


@pytest.fixture
def given() -> Given:
    random = np.random.default_rng(3)
    return Given(
        random.standard_normal((ROWS, COLS)) * 3 + 1,
        random.standard_normal(COLS),
        random.standard_normal(COLS),
        random.standard_normal((COLS, CLASSES)) / COLS**0.5,
        random.integers(0, CLASSES, ROWS),
        random.standard_normal(ROWS),
    )


def assert_same(found: Any, expected: Any, dtype: str) -> None:
    found, expected = (np.asarray(each, np.float64) for each in (found, expected))
    assert found.shape == expected.shape
    assert abs(found - expected).max() <= TOLERANCE[dtype] * max(1, abs(expected).max())


def test_the_page_has_a_section_for_each() -> None:
    assert [len(section(framework)) for framework in ("torch", "jax")] == [4, 2]
    assert len(blocks(PAGE)) == 6


# ---- PyTorch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def bridge(torch: Any) -> Any:
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    return run(section("torch")[:1])


def torchs_gradients(torch: Any, norm: Any, loss: Any, given: Given, dtype: str, where: str) -> list[Any]:
    """Return losses and gradients of x, gamma, beta and weight."""
    leaves = [
        torch.tensor(each, dtype=getattr(torch, dtype), device=where, requires_grad=True)
        for each in given[:4]
    ]
    x, gamma, beta, weight = leaves
    losses = loss(norm(x, gamma, beta) @ weight, torch.tensor(given.labels, device=where))
    losses.backward(torch.tensor(given.dloss, dtype=losses.dtype, device=where))
    assert [each.grad.dtype for each in leaves] == [each.dtype for each in leaves]
    return [each.detach().double().cpu().numpy() for each in (losses, *(leaf.grad for leaf in leaves))]


def assert_gives_torchs_gradients(torch: Any, bridge: Any, given: Given, dtype: str, where: str) -> None:
    given.labels[:3] = -100
    functions = torch.nn.functional

    found = torchs_gradients(torch, bridge.LayerNorm.apply, bridge.CrossEntropy.apply, given, dtype, where)

    expected = torchs_gradients(
        torch,
        lambda x, gamma, beta: functions.layer_norm(x, x.shape[-1:], gamma, beta),
        lambda logits, labels: functions.cross_entropy(logits, labels, reduction="none"),
        given,
        dtype,
        where,
    )
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, dtype)


def test_pytorchs_blocks_run(torch: Any) -> None:
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    run([block for block in section("torch") if '"cuda"' not in block.text])


@every_dtype
def test_gradients_are_pytorchs(torch: Any, bridge: Any, given: Given, dtype: str) -> None:
    assert_gives_torchs_gradients(torch, bridge, given, dtype, "cpu")


def test_gradients_pass_pytorchs_check(torch: Any, bridge: Any, given: Given) -> None:
    x, gamma, beta = (torch.tensor(each[..., :6], requires_grad=True) for each in given[:3])
    labels = torch.tensor(given.labels) % 6

    assert torch.autograd.gradcheck(bridge.LayerNorm.apply, (x, gamma, beta))
    assert torch.autograd.gradcheck(bridge.CrossEntropy.apply, (x, labels))
    y = bridge.LayerNorm.apply(x, gamma, beta)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@every_dtype
def test_tensors_and_arrays_share_memory(torch: Any, bridge: Any, dtype: str) -> None:
    tensor = torch.zeros(3, 5, dtype=getattr(torch, dtype), requires_grad=True)[1:]

    array = bridge.array_of(tensor)
    back = bridge.tensor_of(array)

    assert array.dtype == np.dtype(dtype)
    assert array.ctypes.data == back.data_ptr() == tensor.data_ptr()
    assert back.dtype == tensor.dtype
    assert back.shape == array.shape == tensor.shape


def test_a_loss_that_ends_the_network_needs_one_call(torch: Any) -> None:
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    blocks_of_torch = section("torch")
    end = Block(PAGE, 1, "python", "for each in parameters:\n    each.grad = None\n")
    names = run([*blocks_of_torch[:2], end, blocks_of_torch[2]])
    found = [each.grad.numpy().copy() for each in names.parameters]
    logits = names.LayerNorm.apply(names.tokens, names.gamma, names.beta) @ names.weight

    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, names.labels), names.parameters)

    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, "float32")


@pytest.fixture
def cuda(device: Any, torch: Any) -> Any:
    if not torch.cuda.is_available():
        pytest.skip("torch is installed without CUDA")
    return device


@pytest.mark.gpu
@every_dtype
def test_gradients_on_a_device_are_pytorchs(
    cuda: Any, torch: Any, bridge: Any, given: Given, dtype: str
) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_gives_torchs_gradients(torch, bridge, given, dtype, "cuda")


@pytest.mark.gpu
def test_pytorchs_block_for_a_device_runs_on_its_stream_without_a_copy(cuda: Any, torch: Any) -> None:
    names = run(
        [block for block in section("torch") if "optimizer" not in block.text and "loss," not in block.text]
    )

    torch.cuda.synchronize()
    assert names.x.grad.dtype == torch.bfloat16
    assert names.array_of(names.x).data.ptr == names.x.data_ptr()
    assert names.tensor_of(names.array_of(names.x)).data_ptr() == names.x.data_ptr()
    assert_same(
        names.gamma.grad.cpu(),
        torch.nn.functional.layer_norm(names.x.float(), (1024,)).sum(0).tolist(),
        "float16",
    )
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), names.stream_of(names.x):
        assert cuda.cuda.get_current_stream().ptr == stream.cuda_stream


# ---- JAX


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # or a GPU's memory is gone for all other tests
    return pytest.importorskip("jax", reason="jax is not installed")


@pytest.fixture
def jax_bridge(jax: Any) -> Any:
    return run(section("jax")[:1])


def formulas(jax: Any) -> tuple[Any, Any]:
    """Return layer_norm and cross_entropy as JAX's users write them, in at least float32."""

    def norm(x: Any, gamma: Any, beta: Any) -> Any:
        wide = x.astype(jax.numpy.promote_types(x.dtype, "float32"))
        centred = wide - wide.mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * gamma + beta
        return y.astype(x.dtype)

    def loss(logits: Any, labels: Any) -> Any:
        wide = logits.astype(jax.numpy.promote_types(logits.dtype, "float32"))
        return -jax.numpy.take_along_axis(jax.nn.log_softmax(wide), labels[..., None], -1)[..., 0]

    return norm, loss


def jaxs_gradients(jax: Any, norm: Any, loss: Any, given: Given, dtype: str, *, jit: bool) -> list[Any]:
    labels, dloss = (jax.numpy.asarray(each) for each in (given.labels, given.dloss))

    def total(x: Any, gamma: Any, beta: Any, weight: Any) -> Any:
        losses = loss(norm(x, gamma, beta) @ weight, labels)
        return (losses * dloss.astype(losses.dtype)).sum(), losses

    function = jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True)
    leaves = [jax.numpy.asarray(each, dtype) for each in given[:4]]
    gradients, losses = (jax.jit(function) if jit else function)(*leaves)
    assert [each.dtype for each in gradients] == [each.dtype for each in leaves]
    return [losses, *gradients]


def assert_gives_jaxs_gradients(jax: Any, bridge: Any, given: Given, dtype: str, *, jit: bool) -> None:
    with (
        jax.enable_x64(dtype == "float64"),
        jax.default_matmul_precision("highest"),
    ):  # a GPU's default is TF32
        found = jaxs_gradients(jax, bridge.norm, bridge.loss_of, given, dtype, jit=jit)
        expected = jaxs_gradients(jax, *formulas(jax), given, dtype, jit=jit)

        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, dtype)


def test_jaxs_blocks_run(jax: Any) -> None:
    run(section("jax"))


@every_dtype
@pytest.mark.parametrize("jit", [False, True], ids=["outside of jit", "inside of jit"])
def test_gradients_are_jaxs(jax: Any, jax_bridge: Any, given: Given, dtype: str, jit: bool) -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        assert_gives_jaxs_gradients(jax, jax_bridge, given, dtype, jit=jit)


def test_vmap_gives_what_more_rows_give(jax: Any, jax_bridge: Any, given: Given) -> None:
    x, gamma, beta = (jax.numpy.asarray(each, "float32") for each in given[:3])
    expected = jax_bridge.norm(x, gamma, beta)

    found = jax.vmap(jax_bridge.norm, in_axes=(0, None, None))(x.reshape(3, 4, COLS), gamma, beta)

    assert_same(found.reshape(x.shape), expected, "float32")


def test_second_derivatives_are_errors(jax: Any, jax_bridge: Any, given: Given) -> None:
    x, gamma, beta = (jax.numpy.asarray(each, "float32") for each in given[:3])

    def slope(x: Any) -> Any:
        return jax.grad(lambda x: (jax_bridge.norm(x, gamma, beta) ** 2).sum())(x).sum()

    with pytest.raises(ValueError, match="do not support JVP"):
        jax.grad(slope)(x)


def test_arrays_of_a_cpu_are_read_in_place(jax: Any, jax_bridge: Any) -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        x = jax.numpy.ones((64, 64))
        seen: list[np.ndarray] = []

        returned = jax_bridge.call(lambda given: seen.append(given) or given + 1, x, x)

    assert [each.ctypes.data for each in seen] == [x.unsafe_buffer_pointer()]
    assert (returned == 2).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("jit", [False, True], ids=["outside of jit", "inside of jit"])
def test_gradients_on_a_device_are_jaxs(
    device: Any, jax: Any, jax_bridge: Any, given: Given, dtype: str, jit: bool
) -> None:
    if jax.default_backend() == "cpu":
        pytest.skip("jax is installed without CUDA")
    assert_gives_jaxs_gradients(jax, jax_bridge, given, dtype, jit=jit)
