"""The encoder against its papers' formulas in float64, one sequence and one head after the other."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
import types

import numpy as np
import pytest

from cupynorm.bert import host_steps
from cupynorm.encoder import BertEncoder, EncoderConfig
from cupynorm.npy.paths import FileError
from cupynorm.runtime import devices

ml_dtypes = pytest.importorskip("ml_dtypes")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

BASE = EncoderConfig(hidden=24, heads=4, layers=2, ffn=40, vocabulary=50, positions=16, types=3, eps=1e-6)
CONFIGS = {
    "post-norm": BASE,
    "pre-norm": dataclasses.replace(BASE, norm="pre"),
    "tanh": dataclasses.replace(BASE, approximate="tanh"),
    "pre-norm, tanh": dataclasses.replace(BASE, norm="pre", approximate="tanh"),
    "odd sizes": dataclasses.replace(BASE, hidden=21, heads=3, ffn=17, layers=3),
    "one of each": EncoderConfig(hidden=1, heads=1, layers=1, ffn=1, vocabulary=2, positions=9, types=1),
    "a head of one": dataclasses.replace(BASE, hidden=5, heads=5),
    "one wide head": dataclasses.replace(BASE, hidden=33, heads=1),
    "large eps": dataclasses.replace(BASE, eps=0.5),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def weights_of(config, seed=0, dtype=np.float32):
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.shapes().items():
        weights[name] = generator.normal(0, 0.3, shape).astype(dtype)
        if name.endswith("LayerNorm.weight"):
            weights[name] += dtype(1)
    return weights


def tokens_of(config, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocabulary, shape)


class Reference:
    """The papers' encoder, without a batch: x is [seq, hidden], looks is [seq, seq], everything float64."""

    def __init__(self, config, weights):
        self.config = config
        self.weights = {name: each.astype(np.float64) for name, each in weights.items()}

    def norm(self, name, x):
        mean = x.mean(axis=1, keepdims=True)
        variance = ((x - mean) ** 2).mean(axis=1, keepdims=True)
        scaled = (x - mean) / np.sqrt(variance + self.config.eps)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def dense(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def gelu(self, x):
        if self.config.approximate == "tanh":
            return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x / 2 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))

    def attention(self, at, x, looks):
        q, k, v = (self.dense(f"{at}.attention.self.{name}", x) for name in ("query", "key", "value"))
        size = self.config.hidden // self.config.heads
        heads = []
        for head in range(self.config.heads):
            of = slice(head * size, (head + 1) * size)
            powers = np.exp(q[:, of] @ k[:, of].T / math.sqrt(size)) * looks
            total = powers.sum(axis=1, keepdims=True)
            heads.append(np.divide(powers, total, out=np.zeros_like(powers), where=total > 0) @ v[:, of])
        return self.dense(f"{at}.attention.output.dense", np.concatenate(heads, axis=1))

    def ffn(self, at, x):
        return self.dense(f"{at}.output.dense", self.gelu(self.dense(f"{at}.intermediate.dense", x)))

    def forward(self, x, looks=None):
        x = x.astype(np.float64)
        looks = np.ones((len(x), len(x))) if looks is None else looks
        for layer in range(self.config.layers):
            at = f"encoder.layer.{layer}"
            first, second = f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"
            if self.config.norm == "post":
                x = self.norm(first, x + self.attention(at, x, looks))
                x = self.norm(second, x + self.ffn(at, x))
            else:
                x = x + self.attention(at, self.norm(first, x), looks)
                x = x + self.ffn(at, self.norm(second, x))
        return x if self.config.norm == "post" else self.norm("encoder.LayerNorm", x)

    def look_up(self, tokens, types=None, places=None):
        types = np.zeros(len(tokens), int) if types is None else types
        places = np.arange(len(tokens)) if places is None else places
        tables = {"word": tokens, "position": places, "token_type": types}
        total = sum(self.weights[f"embeddings.{name}_embeddings.weight"][at] for name, at in tables.items())
        return self.norm("embeddings.LayerNorm", total)

    def embed(self, tokens, types=None, places=None, pooling="mean"):
        hidden = self.forward(self.look_up(tokens, types, places))
        pooled = hidden[0] if pooling == "cls" else hidden.mean(axis=0)
        return pooled / np.linalg.norm(pooled)


def both(config, seed=0):
    weights = weights_of(config, seed)
    return BertEncoder(config, weights), Reference(config, weights)


def assert_near(got, expected, tolerance=2e-5):
    assert got.shape == expected.shape
    np.testing.assert_allclose(
        got, expected, rtol=tolerance, atol=tolerance * max(1, np.abs(expected).max(initial=0))
    )


@every_config
def test_hidden_states_are_the_papers(config):
    ours, reference = both(config)
    hidden = numbers(3, 7, config.hidden)

    assert_near(ours.forward(hidden), np.stack([reference.forward(each) for each in hidden]))


@every_config
def test_embeddings_are_the_papers(config):
    ours, reference = both(config)
    tokens, kinds = tokens_of(config, 4, 9), np.random.default_rng(1).integers(0, config.types, (4, 9))

    for pooling in ("mean", "cls"):
        got = ours.embed(tokens, types=kinds, pooling=pooling)
        expected = [reference.embed(*each, pooling=pooling) for each in zip(tokens, kinds, strict=True)]
        assert got.dtype == np.float32
        assert_near(got, np.stack(expected))
    assert_near(
        ours.look_up(tokens, kinds),
        np.stack([reference.look_up(*each) for each in zip(tokens, kinds, strict=True)]),
    )


@every_config
@pytest.mark.parametrize("as_mask", [None, np.bool_, np.uint8, np.int64])
def test_what_is_not_there_changes_nothing_and_is_not_computed(config, as_mask):
    ours, reference = both(config)
    hidden, lengths = numbers(6, 8, config.hidden), np.array([3, 8, 1, 3, 0, 7])
    there = np.arange(8) < lengths[:, None]
    hidden[~there] = np.nan
    given = {"lengths": lengths} if as_mask is None else {"mask": there.astype(as_mask)}

    y = ours.forward(hidden, **given)

    assert (y[~there] == 0).all()
    for got, x, length in zip(y, hidden, lengths, strict=True):
        assert_near(got[:length], reference.forward(x[:length]))


@every_config
def test_packed_sequences_equal_padded_ones(config):
    ours, reference = both(config)
    lists = [tokens_of(config, length, seed=length) for length in (9, 1, 4, 9, 2, 4, 4)]
    padded = np.zeros((len(lists), 9), np.int32)
    for row, each in zip(padded, lists, strict=True):
        row[: len(each)] = each
    lengths = [len(each) for each in lists]

    expected = np.stack([reference.embed(each) for each in lists])
    packed = ours.embed(lists)
    assert_near(packed, expected)
    np.testing.assert_array_equal(ours.embed([each.tolist() for each in lists]), packed)
    np.testing.assert_array_equal(ours.embed(padded, lengths=lengths), packed)
    np.testing.assert_array_equal(ours.embed(padded, mask=np.arange(9) < np.array(lengths)[:, None]), packed)
    alone = np.concatenate([ours.embed([each]) for each in lists])
    assert_near(packed, alone)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_mask_with_holes_keeps_places(pooling):
    ours, reference = both(BASE)
    tokens = tokens_of(BASE, 2, 8)
    keep = np.array([[0, 0, 1, 1, 0, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0, 1]], bool)

    got = ours.embed(tokens, mask=keep, pooling=pooling)

    for each, row, there in zip(got, tokens, keep, strict=True):
        assert_near(each, reference.embed(row[there], places=np.nonzero(there)[0], pooling=pooling))


@every_config
def test_each_token_may_look_where_its_mask_says(config):
    ours, reference = both(config)
    hidden = numbers(3, 6, config.hidden)
    looks = np.random.default_rng(2).random((3, 6, 6)) < 0.5
    looks[1, 2] = False  # looks at nothing
    looks[2] = np.tri(6)

    y = ours.forward(hidden, mask=looks)

    assert_near(y, np.stack([reference.forward(*each) for each in zip(hidden, looks, strict=True)]))


def test_scores_may_be_cut_into_pieces(monkeypatch):
    ours, _ = both(BASE)
    hidden, lengths = numbers(9, 8, BASE.hidden), [8, 8, 3, 8, 8, 3, 8, 1, 3]
    looks = np.random.default_rng(2).random((9, 8, 8)) < 0.5
    whole = ours.forward(hidden, lengths=lengths), ours.forward(hidden, mask=looks)

    for size in (1, 3 * BASE.heads * 8 * 8 * 4):
        monkeypatch.setattr(host_steps, "SCORE_BYTES", size)
        assert_near(ours.forward(hidden, lengths=lengths), whole[0])
        assert_near(ours.forward(hidden, mask=looks), whole[1])


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float16", 2e-2), ("bfloat16", 1.5e-1), ("float32", 2e-5), ("float64", 1e-10)]
)
def test_every_dtype_is_as_near_as_it_can_be(norm, dtype, tolerance):
    config = dataclasses.replace(BASE, norm=norm, dtype=dtype)
    ours, reference = both(config)
    # what matrices are after rounding is what both compute with
    reference.weights = {
        name: (each.astype(ours._dtype) if each.ndim > 1 else each).astype(np.float64)
        for name, each in reference.weights.items()
    }
    hidden = numbers(2, 7, config.hidden).astype(ours._dtype)

    y = ours.forward(hidden)

    assert y.dtype == ours._dtype
    expected = np.stack([reference.forward(each) for each in hidden])
    assert_near(y.astype(np.float64), expected, tolerance)
    pooled = ours.embed(tokens_of(config, 2, 7))
    assert pooled.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert_near(np.linalg.norm(pooled, axis=1), np.ones(2), 1e-6)


def test_without_normalize_the_mean_itself_comes_back():
    ours, reference = both(BASE)
    tokens = tokens_of(BASE, 1, 7)

    assert_near(
        ours.embed(tokens, normalize=False)[0], reference.forward(reference.look_up(tokens[0])).mean(axis=0)
    )


def test_nothing_gives_zeros_or_no_rows():
    ours, _ = both(BASE)

    assert ours.embed([]).shape == (0, BASE.hidden)
    assert ours.embed(np.empty((0, 5), int)).shape == (0, BASE.hidden)
    assert ours.forward(numbers(2, 0, BASE.hidden)).shape == (2, 0, BASE.hidden)
    for pooling in ("mean", "cls"):
        y = ours.embed([[], [3, 4]], pooling=pooling)
        assert (y[0] == 0).all()
        np.testing.assert_array_equal(y[1:], ours.embed([[3, 4]], pooling=pooling))


def test_a_sequence_may_be_as_long_as_the_positions():
    ours, reference = both(BASE)
    tokens = tokens_of(BASE, 1, BASE.positions)

    assert_near(ours.embed(tokens)[0], reference.embed(tokens[0]))


ENCODER = BertEncoder(BASE, weights_of(BASE))
HIDDEN, TOKENS = numbers(2, 5, BASE.hidden), tokens_of(BASE, 2, 5)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: ENCODER.forward(HIDDEN[0]),
            ValueError,
            r"hidden has shape \(5, 24\): it must be \(batch, seq, 24\)",
        ),
        (lambda: ENCODER.forward(HIDDEN[..., :-1]), ValueError, "hidden has shape"),
        (lambda: ENCODER.forward(HIDDEN.astype(int)), TypeError, "int64 is not supported"),
        (lambda: ENCODER.forward(HIDDEN.tolist()), TypeError, "hidden is a builtins.list"),
        (
            lambda: ENCODER.forward(HIDDEN, mask=np.ones((2, 4), bool)),
            ValueError,
            r"mask has shape \(2, 4\): it must be \(2, 5\) or",
        ),
        (lambda: ENCODER.forward(HIDDEN, mask=np.ones((1, 5), bool)), ValueError, "mask has shape"),
        (lambda: ENCODER.forward(HIDDEN, mask=np.ones((2, 5, 4), bool)), ValueError, "mask has shape"),
        (lambda: ENCODER.forward(HIDDEN, mask=np.zeros((2, 5))), TypeError, "mask has dtype float64"),
        (lambda: ENCODER.forward(HIDDEN, mask=np.full((2, 5), -1)), ValueError, "mask has values from -1"),
        (lambda: ENCODER.forward(HIDDEN, mask=[[1] * 5] * 2), TypeError, "mask is a builtins.list"),
        (lambda: ENCODER.forward(HIDDEN, lengths=[5]), ValueError, "lengths has shape"),
        (
            lambda: ENCODER.forward(HIDDEN, lengths=[5, 6]),
            ValueError,
            r"lengths\[1\] is 6: sequences have 0 to 5",
        ),
        (lambda: ENCODER.forward(HIDDEN, lengths=[-1, 6]), ValueError, r"lengths\[0\] is -1"),
        (lambda: ENCODER.forward(HIDDEN, lengths=[1.0, 2.0]), TypeError, "lengths has dtype float64"),
        (
            lambda: ENCODER.forward(HIDDEN, lengths=[1, 2], mask=np.ones((2, 5), bool)),
            ValueError,
            "one of them",
        ),
        (lambda: ENCODER.embed(TOKENS + 50), ValueError, r"token \d+ at \[0, 0\]: the vocabulary has 50"),
        (lambda: ENCODER.embed(TOKENS - 50), ValueError, r"token -\d+ at \[0, 0\]"),
        (lambda: ENCODER.embed([[1], [2, 3, 50]]), ValueError, r"token 50 at \[1, 2\]"),
        (lambda: ENCODER.look_up(np.full((1, 1), 50)), ValueError, r"token 50 at \[0, 0\]"),
        (lambda: ENCODER.look_up(np.zeros(3, int)), ValueError, r"tokens has shape \(3,\)"),
        (
            lambda: ENCODER.embed(TOKENS, types=np.full((2, 5), 3)),
            ValueError,
            r"type 3 at \[0, 0\]: types are 3",
        ),
        (lambda: ENCODER.embed(TOKENS, types=np.zeros((2, 4), int)), ValueError, "types has shape"),
        (lambda: ENCODER.embed([[1, 2]], types=[[0]]), ValueError, "types and tokens differ in length"),
        (
            lambda: ENCODER.embed(np.zeros((1, 17), int)),
            ValueError,
            "17 tokens: the encoder has 16 positions",
        ),
        (lambda: ENCODER.embed([[0] * 17]), ValueError, "17 tokens"),
        (lambda: ENCODER.embed(TOKENS.astype(float)), TypeError, "tokens has dtype float64"),
        (lambda: ENCODER.embed([[1.5]]), TypeError, r"tokens\[0\] has dtype float64"),
        (lambda: ENCODER.embed([[[1]]]), ValueError, r"tokens\[0\] has shape \(1, 1\)"),
        (lambda: ENCODER.embed("text"), TypeError, "tokens is a builtins.str"),
        (lambda: ENCODER.embed(TOKENS[0]), ValueError, "tokens has shape"),
        (lambda: ENCODER.embed([[1]], lengths=[1]), ValueError, "neither mask nor lengths"),
        (lambda: ENCODER.embed(TOKENS, pooling="max"), ValueError, "pooling is 'max': use mean or cls"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_tokens_behind_a_mask_may_be_anything():
    tokens = np.array([[1, 2, -100], [3, 4, 10**9]])

    np.testing.assert_array_equal(ENCODER.embed(tokens, lengths=[2, 2]), ENCODER.embed([[1, 2], [3, 4]]))


def test_device_arrays_are_refused_in_words():
    on_device = types.SimpleNamespace()

    for call in (ENCODER.forward, ENCODER.embed, ENCODER.look_up):
        with pytest.raises(TypeError, match="SimpleNamespace: give a NumPy array"):
            call(on_device)


def test_an_encoder_on_a_device_that_is_not_there_is_refused(monkeypatch):
    def refuse():
        raise devices.NoDeviceError("no CUDA device")

    monkeypatch.setattr(devices, "present_device", refuse)

    with pytest.raises(devices.NoDeviceError, match="no CUDA device"):
        BertEncoder(ENCODER.config, {}, device="gpu")
    with pytest.raises(ValueError, match="device is 'tpu': use auto, cpu or gpu"):
        BertEncoder(ENCODER.config, {}, device="tpu")
    with pytest.raises(ValueError, match="weights do not fit"):
        BertEncoder(ENCODER.config, {}, device="auto")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": 25}, ValueError, "hidden is 25: not a multiple of 4 heads"),
        ({"layers": 0}, ValueError, "layers is 0"),
        ({"heads": -4}, ValueError, "heads is -4"),
        ({"ffn": 4.0}, ValueError, "ffn is 4.0"),
        ({"types": True}, ValueError, "types is True"),
        ({"norm": "middle"}, ValueError, "norm is 'middle': use post or pre"),
        ({"approximate": "relu"}, ValueError, "approximate is 'relu': use none or tanh"),
        ({"eps": -1.0}, ValueError, "eps is -1.0"),
        ({"eps": math.nan}, ValueError, "eps is nan"),
        ({"eps": "1"}, TypeError, "eps is '1' .a str.: give a number"),
        ({"dtype": "int8"}, TypeError, "int8 is not supported"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        dataclasses.replace(BASE, **change)


def test_a_config_is_a_value():
    assert dataclasses.replace(BASE) == BASE
    assert BASE.head_size == 6
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.hidden = 3


def test_every_weight_that_does_not_fit_is_listed():
    weights = weights_of(BASE)
    del weights["encoder.layer.1.output.dense.bias"]
    del weights["embeddings.LayerNorm.weight"]
    weights["encoder.layer.0.intermediate.dense.weight"] = numbers(24, 40)
    weights["encoder.layer.0.output.dense.bias"] = np.zeros(24, np.int8)
    weights["encoder.layer.0.output.LayerNorm.bias"] = [0.0] * 24

    with pytest.raises(ValueError, match="weights do not fit") as raised:
        BertEncoder(BASE, weights)

    told = str(raised.value)
    for words in (
        "encoder.layer.1.output.dense.bias is missing",
        "embeddings.LayerNorm.weight is missing",
        "encoder.layer.0.intermediate.dense.weight has shape (24, 40), not (40, 24)",
        "encoder.layer.0.output.dense.bias: dtype int8 is not supported",
        "encoder.layer.0.output.LayerNorm.bias is not a NumPy array",
    ):
        assert words in told
    assert told.count(";") == 4


def test_a_layer_count_beyond_all_weights_is_refused_at_once():
    with pytest.raises(
        ValueError, match="weights do not fit: there are 37, too few for 1000000000 layers"
    ) as raised:
        BertEncoder(dataclasses.replace(BASE, layers=10**9), weights_of(BASE))

    assert len(str(raised.value)) < 200


def test_a_pre_norm_encoder_has_one_more_norm():
    with pytest.raises(
        ValueError, match=r"encoder.LayerNorm.weight is missing; encoder.LayerNorm.bias is missing"
    ):
        BertEncoder(dataclasses.replace(BASE, norm="pre"), weights_of(BASE))


@pytest.mark.parametrize(("approximate", "tolerance"), [("none", 1e-11), ("tanh", 1e-14)])
def test_gelu_is_that_of_its_definition(approximate, tolerance):
    x = np.concatenate([np.linspace(-16, 16, 40_001), [0.0, -0.0, 40.0, -40.0]])
    exact = {
        "none": [each * math.erfc(-each / math.sqrt(2)) / 2 for each in x],
        "tanh": [
            each / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * each * (1 + 0.044715 * each * each)))
            for each in x
        ],
    }

    y = host_steps.bias_gelu(x[np.newaxis], np.zeros(1), approximate=approximate)[0]

    np.testing.assert_allclose(y, exact[approximate], rtol=1e-9, atol=tolerance)
    assert np.isnan(host_steps.bias_gelu(np.full((1, 1), np.nan), np.zeros(1), approximate=approximate)).all()


safetensors_only = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None, reason="safetensors is not installed"
)
BERT_JSON = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "vocab_size": 50,
    "max_position_embeddings": 16,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-6,
}


def save(folder, weights, told=BERT_JSON):
    """Write a model's folder as Hugging Face lays it out."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))
    save_file(weights, folder / "model.safetensors")
    return folder


@safetensors_only
@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("old", [False, True])
def test_a_folder_gives_the_encoder_of_its_weights(tmp_path, prefix, old):
    weights = weights_of(BASE)
    stored = {f"{prefix}{name}": each for name, each in weights.items()}
    if old:  # as conversions from TensorFlow named them
        stored = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): each
            for name, each in stored.items()
        }
    stored |= {
        f"{prefix}embeddings.position_ids": np.arange(16)[np.newaxis],
        f"{prefix}pooler.dense.weight": numbers(24, 24),
        "cls.predictions.bias": numbers(50),
    }

    loaded = BertEncoder.from_safetensors(save(tmp_path / "model", stored))

    assert loaded.config == BASE
    np.testing.assert_array_equal(loaded.embed(TOKENS), ENCODER.embed(TOKENS))


@safetensors_only
@pytest.mark.parametrize("stored", [np.dtype(np.float16), BFLOAT16, np.dtype(np.float64)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_weights_of_any_dtype_are_held_in_the_one_asked_for(tmp_path, stored, dtype):
    weights = {name: each.astype(stored) for name, each in weights_of(BASE).items()}

    loaded = BertEncoder.from_safetensors(str(save(tmp_path / "model", weights)), dtype=dtype)

    assert loaded.config.dtype == dtype
    direct = BertEncoder(dataclasses.replace(BASE, dtype=dtype), weights)
    np.testing.assert_array_equal(loaded.embed(TOKENS), direct.embed(TOKENS))


@safetensors_only
@pytest.mark.parametrize(
    ("activation", "approximate"), [("gelu", "none"), ("gelu_new", "tanh"), ("gelu_pytorch_tanh", "tanh")]
)
def test_the_activation_is_read(tmp_path, activation, approximate):
    folder = save(tmp_path / "model", weights_of(BASE), {**BERT_JSON, "hidden_act": activation})

    assert BertEncoder.from_safetensors(folder).config.approximate == approximate


@safetensors_only
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "roberta"},
            "config.json: is a model of type 'roberta': only BERT encoders ('bert') are supported",
        ),
        ({"model_type": None}, "of type None"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', but only gelu, gelu_new"),
        ({"hidden_act": ["gelu"]}, "hidden_act is ['gelu']"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"hidden_size": "24"}, "config.json: hidden is '24'"),
        ({"num_attention_heads": 5}, "config.json: hidden is 24: not a multiple of 5 heads"),
        ({"layer_norm_eps": None}, "config.json: eps is None"),
        (
            {"num_hidden_layers": 1},
            "model.safetensors: has tensors of 2 layers, but config.json says 1",
        ),
        ({"num_hidden_layers": 3}, "model.safetensors: has tensors of 2 layers, but config.json says 3"),
        ({"num_hidden_layers": 10**9}, "has tensors of 2 layers, but config.json says 1000000000"),
        ({"num_hidden_layers": 2.5}, "config.json: layers is 2.5"),
        ({"num_hidden_layers": 0}, "config.json: layers is 0"),
        ({"num_hidden_layers": -1}, "config.json: layers is -1"),
        ({"num_hidden_layers": True}, "config.json: layers is True"),
        ({"hidden_size": 10**12, "num_attention_heads": 1}, "has shape (50, 24), not (50, 1000000000000)"),
        ({"vocab_size": 10**12}, "has shape (50, 24), not (1000000000000, 24)"),
        ({"max_position_embeddings": 10**15}, "has shape (16, 24), not (1000000000000000, 24)"),
        ({"layer_norm_eps": 10**400}, "config.json: eps is "),
        ({"layer_norm_eps": -1}, "config.json: eps is -1"),
        ({"layer_norm_eps": "1e-6"}, "config.json: eps is '1e-6'"),
        ({"vocab_size": 51}, "embeddings.word_embeddings.weight has shape (50, 24), not (51, 24)"),
    ],
)
def test_another_architecture_is_refused(tmp_path, change, words):
    folder = save(tmp_path / "model", weights_of(BASE), {**BERT_JSON, **change})

    with pytest.raises(FileError) as raised:
        BertEncoder.from_safetensors(folder)

    assert str(raised.value).startswith(str(folder))
    assert words in str(raised.value)


@safetensors_only
@pytest.mark.parametrize("built", [["BertForMaskedLM"], ["NomicBertModel"], "Other", None, []], ids=str)
def test_a_class_of_any_name_is_taken_where_its_tensors_fit(tmp_path, built):
    weights = weights_of(BASE)
    prefixed = {f"bert.{name}": each for name, each in weights.items()}

    loaded = BertEncoder.from_safetensors(
        save(tmp_path / "model", prefixed, {**BERT_JSON, "architectures": built})
    )

    assert loaded.config == BertEncoder(BASE, weights).config


@safetensors_only
def test_float8_weights_are_refused_by_name(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    folder = save(tmp_path / "model", weights_of(BASE))
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name = "encoder.layer.0.attention.self.query.weight"
    first, last = header[name]["data_offsets"]
    assert ml_dtypes.float8_e4m3fn(1).nbytes == 1
    header[name] |= {"dtype": "F8_E4M3", "shape": [(last - first)]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    with pytest.raises(
        FileError, match=rf"{name} \(F8_E4M3\): weights may be float16, bfloat16, float32, float64"
    ):
        BertEncoder.from_safetensors(folder)


@safetensors_only
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_weights_that_are_no_numbers_are_a_warning_that_names_them(tmp_path, value, dtype):
    weights = {name: each.astype(dtype) for name, each in weights_of(BASE).items()}
    weights["encoder.layer.1.output.dense.bias"][3] = value

    with pytest.warns(RuntimeWarning, match=r"encoder.layer.1.output.dense.bias hold NaN or infinity"):
        BertEncoder.from_safetensors(save(tmp_path / "model", weights))


@safetensors_only
def test_large_weights_are_no_warning(tmp_path):
    weights = weights_of(BASE)
    weights["encoder.layer.1.output.dense.bias"][:] = 3e38

    BertEncoder.from_safetensors(save(tmp_path / "model", weights))


@safetensors_only
def test_sizes_that_are_missing_are_listed(tmp_path):
    told = {name: value for name, value in BERT_JSON.items() if name not in {"vocab_size", "layer_norm_eps"}}

    with pytest.raises(FileError, match=r"config.json: has no vocab_size, layer_norm_eps"):
        BertEncoder.from_safetensors(save(tmp_path / "model", weights_of(BASE), told))


@safetensors_only
def test_a_folder_that_is_none_or_holds_no_weights_is_named(tmp_path):
    folder = save(tmp_path / "model", weights_of(BASE))
    good = (folder / "model.safetensors").read_bytes()

    with pytest.raises(FileError, match=r"nowhere: is not a folder"):
        BertEncoder.from_safetensors(tmp_path / "nowhere")
    for content, words in (
        (b"", "is not a safetensors file"),
        (b"x" * 99, "is not a"),
        (good[:-1], "damaged"),
    ):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(FileError, match=words):
            BertEncoder.from_safetensors(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileError, match=r"model.safetensors: does not exist$"):
        BertEncoder.from_safetensors(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileError, match=r"but pytorch_model.bin: pickled weights are never loaded"):
        BertEncoder.from_safetensors(folder)
    for content, words in (
        ("{", "is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ("[" * 99_999, "is not valid JSON"),
    ):
        (folder / "config.json").write_text(content)
        with pytest.raises(FileError, match=words):
            BertEncoder.from_safetensors(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileError, match=r"config.json: No such file"):
        BertEncoder.from_safetensors(folder)


@safetensors_only
def test_a_dtype_that_is_not_supported_is_no_files_fault(tmp_path):
    with pytest.raises(TypeError, match="int8 is not supported"):
        BertEncoder.from_safetensors(save(tmp_path / "model", weights_of(BASE)), dtype="int8")


@safetensors_only
def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch):
    folder = save(tmp_path / "model", weights_of(BASE))
    monkeypatch.setitem(sys.modules, "safetensors", None)

    with pytest.raises(ImportError, match=r"pip install 'tokenizers>=0\.20' 'safetensors>=0\.4\.3'"):
        BertEncoder.from_safetensors(folder)
