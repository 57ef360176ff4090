"""`cupynorm embed` and what it does: rows in their texts' order, clear ends, and nothing lost of an ended run."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import pty
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cupynorm
from cupynorm import embedding
from cupynorm.bert import text_files
from cupynorm.embedding import TextEncoder, embed_file, read_texts
from cupynorm.encoder import EncoderConfig
from cupynorm.npy.paths import FileError
from cupynorm.runtime import devices
from tests.bert.test_encoder import BERT_JSON, Reference, save, weights_of

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "whale", "in", "the", "sea", "saw", "ships", "and", "sky"]
CONFIG = EncoderConfig(hidden=24, heads=4, layers=2, ffn=40, vocabulary=50, positions=16, types=3, eps=1e-6)
LENGTHS = [3, 1, 9, 14, 2, 2, 7, 1, 5, 11, 3, 4]
TEXTS = [
    " ".join(np.random.default_rng(seed).choice(WORDS[4:], length)) for seed, length in enumerate(LENGTHS)
]
CONTENT = "\n".join(TEXTS) + "\n"


def make_model(folder, seed=0, words=WORDS):
    """Write a model of random weights, with a tokenizer of whole words."""
    save(folder, weights_of(CONFIG, seed), BERT_JSON)
    vocabulary = {word: at for at, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=WORDS[1]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    # what a folder's tokenizer does to others' batches is not wanted here
    made.enable_padding(length=12)
    made.enable_truncation(4)
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(autouse=True)
def _no_device(monkeypatch):
    """What is not asked for a device runs on the CPU, also where there is a GPU; commands that are started, too."""

    def refuse():
        raise devices.NoDeviceError("none for these tests")

    monkeypatch.setattr(devices, "present_device", refuse)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, and windows and batches so small that every file takes several."""
    monkeypatch.setattr(embedding, "WINDOW", 5)
    monkeypatch.setattr(embedding, "BATCH_TOKENS", 20)
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def ids_of(text):
    return np.array([2, *(WORDS.index(word) for word in text.split()), 3])


def expected_of(texts, seed=0, pooling="mean"):
    reference = Reference(CONFIG, weights_of(CONFIG, seed))
    return np.stack([reference.embed(ids_of(text), pooling=pooling) for text in texts])


def write(folder, content=CONTENT, name="in.txt"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def run(model, folder, content=CONTENT, name="in.txt", **options):
    embed_file(model, write(folder, content, name), folder / "out.npy", **options)
    return np.load(folder / "out.npy")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def start(folder, *arguments, before="", stderr=subprocess.PIPE):
    """Run the command in a process of its own, after `before`."""
    program = (
        "import os, signal, sys; from cupynorm import cli, embedding; from cupynorm.bert import resume\n"
        # a job in a shell's background ignores it, and so would what it starts
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"embedding.WINDOW, embedding.BATCH_TOKENS = 5, 20\n{before}\n"
        f"sys.argv = ['cupynorm', *{[str(each) for each in arguments]!r}]\ncli.main()"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(cupynorm.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
    )


def embed(folder, model, *options, **keywords):
    return start(folder, "embed", "in.txt", "-o", "out.npy", "--model", model, *options, **keywords)


def test_each_text_has_the_papers_embedding_in_its_row(model, folder):
    y = run(model, folder)

    assert y.dtype == np.float32
    np.testing.assert_allclose(y, expected_of(TEXTS), atol=2e-5)
    assert names(folder) == ["in.txt", "out.npy"]


def test_a_file_gets_the_rows_of_the_function(model, folder):
    direct = TextEncoder.load(model).embed(TEXTS)

    np.testing.assert_array_equal(run(model, folder), direct)


def test_windows_and_batches_change_no_more_than_rounding(model, folder, monkeypatch):
    small = run(model, folder)
    for window, batch in ((1, 1), (3, 1000), (1000, 1), (1000, 1000)):
        monkeypatch.setattr(embedding, "WINDOW", window)
        monkeypatch.setattr(embedding, "BATCH_TOKENS", batch)
        np.testing.assert_allclose(run(model, folder, force=True), small, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("in.txt", "\n".join(TEXTS), None),
        ("in.txt", "\r\n".join(TEXTS) + "\r\n", None),
        ("in.txt", b"\xef\xbb\xbf" + "\n".join(TEXTS).encode(), None),
        ("in", "\n".join(TEXTS), None),
        ("in.jsonl", "\n".join(json.dumps({"id": 1, "text": each}) for each in TEXTS) + "\n\n", None),
        ("in.JSONL", "\n\n".join(json.dumps({"body": each, "text": 3}) for each in TEXTS), "body"),
        ("in.csv", "id,text\n" + "".join(f'1,"{each}"\n\n' for each in TEXTS), None),
        ("in.csv", "\ufefftitle,id\r\n" + "".join(f"{each},2\r\n" for each in TEXTS), "title"),
    ],
)
def test_texts_come_from_lines_objects_and_columns(model, folder, name, content, field):
    np.testing.assert_array_equal(
        run(model, folder, content, name, field=field), TextEncoder.load(model).embed(TEXTS)
    )


def test_a_cell_may_have_lines_and_a_text_any_character(folder):
    rows = write(folder, 'text,n\n"a\n""whale""",1\nthe \u2028 sea\x0c,2\n', "in.csv")
    lines = write(folder, "a \u2028 whale\x0b\n\n the sea ")

    assert list(read_texts(rows)) == [("line 3", 'a\n"whale"'), ("line 4", "the \u2028 sea\x0c")]
    assert list(read_texts(lines)) == [
        ("line 1", "a \u2028 whale\x0b"),
        ("line 2", ""),
        ("line 3", " the sea "),
    ]


@pytest.mark.parametrize("kind", sorted(text_files.UNREAD))
def test_a_file_that_would_be_taken_for_lines_is_refused_by_its_name(folder, kind):
    with pytest.raises(FileError, match=rf"in{kind}: .*; .jsonl, .ndjson, .csv and files of lines are read"):
        read_texts(write(folder, CONTENT, f"in{kind}"))


def test_ndjson_is_jsonl(folder):
    path = write(folder, '{"text": "a whale"}\n\n{"text": "sea"}\n', "in.ndjson")

    assert list(read_texts(path)) == [("line 1", "a whale"), ("line 3", "sea")]


def test_a_cell_may_be_long_and_the_csv_modules_limit_stays(folder):
    limit = csv.field_size_limit()
    text = "whale " * 50_000

    assert [each for _, each in read_texts(write(folder, f"text\n{text}\n", "in.csv"))] == [text]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("device", ["cuda", None, 0])
def test_a_device_that_is_none_is_named_and_not_the_model(model, device):
    with pytest.raises((TypeError, ValueError), match=rf"^device is {device!r}.*: use auto, cpu or gpu"):
        TextEncoder.load(model, device=device)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_and_normalize_are_those_asked_for(model, folder, pooling, normalize):
    y = run(model, folder, pooling=pooling, normalize=normalize)

    lengths = np.linalg.norm(y, axis=1, keepdims=True)
    np.testing.assert_allclose(y / lengths, expected_of(TEXTS, pooling=pooling), atol=2e-5)
    assert np.allclose(lengths, 1, atol=1e-6) is normalize


MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]


def tell(folder, modules, pooling):
    told = [
        {"idx": at, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(told))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean", True)),
        (MODULES[:2], {"pooling_mode_cls_token": True}, ("cls", False)),
        (MODULES[:2], {"pooling_mode": "cls", "include_prompt": True}, ("cls", False)),
    ],
)
def test_a_folder_says_how_it_is_pooled(tmp_path, modules, pooling, expected):
    folder = make_model(tmp_path / "model")
    tell(folder, modules, pooling)

    loaded = TextEncoder.load(folder)
    assert (loaded.pooling, loaded.normalize) == expected
    asked = TextEncoder.load(folder, pooling="mean", normalize=True)
    assert (asked.pooling, asked.normalize) == ("mean", True)


def test_the_encoder_may_lie_in_a_folder_of_its_own(tmp_path):
    make_model(tmp_path / "model").rename(tmp_path / "0_Transformer")
    tell(tmp_path, [("0_Transformer", "Transformer"), *MODULES[1:]], {"pooling_mode": "mean"})

    np.testing.assert_allclose(TextEncoder.load(tmp_path).embed(TEXTS), expected_of(TEXTS), atol=2e-5)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (
            [*MODULES[:2], ("2_Dense", "Dense")],
            {"pooling_mode": "mean"},
            "modules.json: lists Transformer, Pooling, Dense",
        ),
        (MODULES[:1], {}, "lists Transformer: only"),
        (MODULES, {"pooling_mode_max_tokens": True}, "config.json: pools by max_tokens: only mean or cls"),
        (
            MODULES,
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "pools by mean_tokens, cls_token",
        ),
        (MODULES, {}, "pools by nothing"),
    ],
)
def test_a_folder_with_other_parts_is_refused(tmp_path, modules, pooling, words):
    folder = make_model(tmp_path / "model")
    tell(folder, modules, pooling)

    with pytest.raises(FileError, match=words):
        TextEncoder.load(folder)


@pytest.mark.parametrize("content", ["{", "{}", "[1]", '[{"path": ""}]'])
def test_a_modules_file_that_is_none_is_named(tmp_path, content):
    folder = make_model(tmp_path / "model")
    (folder / "modules.json").write_text(content)

    with pytest.raises(FileError, match=r"modules.json: (is not a|is not valid JSON|does not hold a)"):
        TextEncoder.load(folder)


def test_long_texts_are_cut_only_when_that_is_asked_for(model):
    loaded = TextEncoder.load(model)
    longest, long = " ".join(["whale"] * 14), " ".join(["whale"] * 15)

    np.testing.assert_allclose(loaded.embed([longest]), expected_of([longest]), atol=2e-5)
    with pytest.raises(ValueError, match=r"text 1 has 17 tokens, the most possible is 16"):
        loaded.embed(["sea", long])
    np.testing.assert_array_equal(loaded.embed([long], truncate=True), loaded.embed([longest]))
    np.testing.assert_array_equal(
        loaded.embed([longest], truncate=True, max_tokens=5), loaded.embed(["whale whale whale"])
    )
    with pytest.raises(ValueError, match="5 tokens, the most possible is 4"):
        loaded.embed(["a whale saw"], max_tokens=4)


@pytest.mark.parametrize("text", ["", "  \t ", "\n"])
def test_a_text_without_words_is_an_error_or_zeros(model, text):
    loaded = TextEncoder.load(model)

    with pytest.raises(ValueError, match="text 1 is empty: it holds no words"):
        loaded.embed(["a", text])
    y = loaded.embed(["a", text, "sea"], empty="zeros")
    assert (y[1] == 0).all()
    np.testing.assert_allclose(y[::2], expected_of(["a", "sea"]), atol=2e-5)


def test_unknown_words_are_words(model):
    assert np.isfinite(TextEncoder.load(model).embed(["\U0001f40b", "café 日本語"])).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dtype": "bf16"}, TypeError, "dtype is 'bf16' .*: use .*float32"),
        ({"dtype": None}, TypeError, "dtype is None.*: use .*float32"),
        ({"pooling": "max"}, ValueError, "pooling is 'max': use mean or cls"),
        ({"pooling": 1}, TypeError, "pooling is 1 .*: use mean or cls"),
        ({"normalize": "no"}, TypeError, "normalize is 'no': use True or False"),
        ({"device": None}, TypeError, "device is None: use auto, cpu or gpu"),
    ],
)
def test_bad_options_of_load(model, options, error, words):
    with pytest.raises(error, match=words):
        TextEncoder.load(model, **options)


@pytest.mark.parametrize(
    ("texts", "options", "error", "words"),
    [
        ("whale", {}, TypeError, "texts is one string"),
        (["a", 3], {}, TypeError, "text 1 is a int"),
        (["a", None], {}, TypeError, "text 1 is a NoneType"),
        (["\ud83d"], {}, ValueError, "text 0 is not valid text: it holds a lone surrogate"),
        (b"whale", {}, TypeError, "texts is one string"),
        (3, {}, TypeError, r"texts is 3 \(an int\): give a list"),
        (["a"], {"max_tokens": 17}, ValueError, "max_tokens is 17: it must be 3 to 16"),
        (["a"], {"max_tokens": 4.5}, TypeError, "max_tokens is 4.5: give an integer"),
        (["a"], {"max_tokens": True}, TypeError, "max_tokens is True: give an integer"),
        (["a"], {"max_tokens": "5"}, TypeError, "max_tokens is '5': give an integer"),
        (["a"], {"truncate": 1}, TypeError, "truncate is 1: use True or False"),
        (["a"], {"empty": None}, TypeError, "empty is None: use error or zeros"),
        (["a"], {"empty": []}, TypeError, r"empty is \[\] \(a list\): use error or zeros"),
        (["a"], {"max_tokens": 2, "truncate": True}, ValueError, "max_tokens is 2"),
        (["a"], {"empty": "skip"}, ValueError, "empty is 'skip'"),
    ],
)
def test_what_is_no_text_is_refused(model, texts, options, error, words):
    with pytest.raises(error, match=words):
        TextEncoder.load(model).embed(texts, **options)


def test_another_models_tokenizer_is_found_out(tmp_path):
    folder = make_model(tmp_path / "model", words=[*WORDS, *(f"w{at}" for at in range(60))])

    with pytest.raises(
        ValueError, match="text 1 has token 59, and the vocabulary 50: tokenizer.json is another model's"
    ):
        TextEncoder.load(folder).embed(["a", "w0 w46 sea"])


def test_no_texts_give_no_rows(model, folder):
    assert TextEncoder.load(model).embed([]).shape == (0, 24)
    assert run(model, folder, "").shape == (0, 24)
    assert names(folder) == ["in.txt", "out.npy"]


def test_the_report_says_what_was_done(model, folder):
    seen = []
    source = write(folder, "\n".join([*TEXTS, "a " * 40]))

    report = embed_file(
        model, source, folder / "out.npy", truncate=True, progress=lambda *each: seen.append(each)
    )

    assert (report.texts, report.tokens, report.columns) == (13, sum(LENGTHS) + 2 * 12 + 16, 24)
    assert (report.truncated, report.resumed, report.pooling, report.normalize) == (1, 0, "mean", True)
    assert report.as_dict()["texts_per_second"] == pytest.approx(13 / report.seconds)
    assert seen == sorted(seen)
    assert len(seen) > 3
    assert seen[-1] == (13, 13)


def test_the_command_reports_and_shows_a_bar_on_a_terminal_only(model, folder):
    write(folder)

    done = embed(folder, model)
    assert (done.returncode, done.stdout) == (0, "")
    assert "12 texts, 86 tokens -> 24 columns on cpu: " in done.stderr
    assert done.stderr.endswith("wrote out.npy\n")
    assert "\r" not in done.stderr
    told = json.loads(embed(folder, model, "--force", "--json", "--dtype", "float64").stdout)
    assert (told["schema"], told["texts"], told["dtype"], told["output"]) == (1, 12, "float64", "out.npy")
    ours, theirs = pty.openpty()
    try:
        embed(folder, model, "--force", stderr=theirs)
        assert "embed  [" in os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("in.txt", "a whale\n\nsea\n", "in.txt: line 2 is empty: it holds no words"),
        ("in.txt", "sea\n" + "a " * 15 + "\n", "in.txt: line 2 has 17 tokens, the most possible is 16"),
        ("in.txt", b"sea\nsky \xff\n", "in.txt: line 2 is not UTF-8"),
        ("in.txt", "sea\n".encode("utf-16"), "in.txt: line 1 is not UTF-8"),
        ("in.jsonl", '{"text": "a"}\n{"text": \n', "in.jsonl: line 2 is not valid JSON"),
        ("in.jsonl", "[" * 99_999, "in.jsonl: line 1 is not valid JSON"),
        ("in.jsonl", '{"text": "a"}\n["a"]\n', "line 2 is not an object with a text as 'text'"),
        ("in.jsonl", '{"text": 3}\n', "line 1 is not an object with a text"),
        ("in.jsonl", '{"other": "a"}\n', "line 1 is not an object with a text"),
        ("in.jsonl", '{"text": "\\ud83d"}\n', "line 1 is not valid text: it holds a lone surrogate"),
        ("in.csv", "", "in.csv: has no column 'text', it has none"),
        ("in.csv", "a,b\n1,2\n", "has no column 'text', it has a, b"),
        ("in.csv", "a,text\n1,sea\n2\n", "in.csv: line 3 has 1 columns, 'text' is number 2"),
        ("in.csv", 'text\n"sea\n', "in.csv: line 2 is not valid CSV"),
        ("in.csv", 'text\n""\n', "in.csv: line 2 is empty"),
    ],
)
def test_a_text_that_is_no_good_is_named_and_nothing_is_left(model, folder, name, content, words):
    with pytest.raises(FileError) as raised:
        run(model, folder, content, name)

    assert words in str(raised.value)
    assert names(folder) == [name]


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--field", "text"), 2, "Error: --field: in.txt is read as lines, which have no field 'text'"),
        (("--max-tokens", "17"), 2, "Error: --max-tokens: max_tokens is 17"),
        (("--max-tokens", "0"), 2, "--max-tokens"),
        (("--pooling", "max"), 2, "--pooling"),
        (("--dtype", "int8"), 2, "--dtype"),
        (("--model", "nowhere"), 4, "nowhere: is not a folder"),
        (("--model", "empty"), 4, "empty/config.json: No such file"),
        (("--model", "in.txt"), 4, "in.txt: is not a folder"),
        (("-o", "old.npy"), 4, "old.npy: exists already: --force"),
        (("-o", "in.txt", "--force"), 4, "in.txt: is the input as well"),
        (("-o", "nowhere/out.npy"), 4, "nowhere/out.npy.part: No such file"),
    ],
)
def test_wrong_usage_and_files_are_one_line_and_leave_nothing(model, folder, options, status, words):
    write(folder)
    write(folder, "precious", "old.npy")
    (folder / "empty").mkdir()

    done = embed(folder, model, *options)

    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert names(folder) == ["empty", "in.txt", "old.npy"]
    assert (folder / "old.npy").read_text() == "precious"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "config.json: No such file"),
        ("config.json", "{", "config.json: is not valid JSON"),
        ("model.safetensors", None, "model.safetensors: does not exist"),
        ("model.safetensors", "no", "model.safetensors: is not a safetensors file"),
        ("tokenizer.json", None, "tokenizer.json: does not exist"),
        ("tokenizer.json", "{}", "tokenizer.json: is not a tokenizer"),
    ],
)
def test_a_model_that_is_no_good_is_status_4(tmp_path, folder, file, content, words):
    model = make_model(tmp_path / "model")
    write(folder)
    (model / file).unlink()
    if content is not None:
        (model / file).write_text(content)

    done = embed(folder, model)

    assert done.returncode == 4
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert names(folder) == ["in.txt"]


def test_a_missing_source_a_folder_and_a_pipe_are_named(model, folder):
    os.mkfifo(folder / "pipe")
    for name, words in {
        "missing.txt": "No such file",
        ".": "not a regular file",
        "pipe": "not a regular file",
    }.items():
        with pytest.raises(FileError, match=words):
            embed_file(model, folder / name, folder / "out.npy")


@pytest.mark.parametrize("package", ["tokenizers", "safetensors"])
def test_without_a_package_its_extra_is_named(model, folder, package):
    write(folder)

    done = embed(folder, model, before=f"sys.modules[{package!r}] = None")

    assert done.returncode == 1
    assert "pip install 'tokenizers>=0.20' 'safetensors>=0.4.3'" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(folder) == ["in.txt"]


# Where a run is killed, and how many texts are then done: before the first window there is nothing to go on from.
POINTS = {
    "the file is there": ("resume.Part._ready", "before", 0),
    "the note is there": ("resume.Part._count", "after", 0),
    "it has its room": ("resume.Part._begin", "after", 0),
    "the first rows are written": ("resume.Part.write", "after", 0),
    "the first rows are counted": ("resume.Part.append", "after", 5),
    "the second rows are written": ("resume.Part.write", "after second", 5),
    "the second rows are counted": ("resume.Part.append", "after second", 10),
    "all is written": ("resume.Part.sync", "after", 12),
}


def kill(point, when, number=signal.SIGKILL):
    """Text of a program that sends this process a signal before, after, or after the second call of a function."""
    return (
        f"real, calls = {point}, []\n"
        "def call(*arguments):\n"
        f"    if {when!r} == 'before': os.kill(os.getpid(), {int(number)})\n"
        "    result = real(*arguments)\n"
        "    calls.append(0)\n"
        f"    if len(calls) == {2 if when == 'after second' else 1}: os.kill(os.getpid(), {int(number)})\n"
        "    return result\n"
        f"{point} = call\n"
    )


@pytest.mark.parametrize("where", POINTS)
def test_a_killed_run_is_continued_to_the_same_bits(model, folder, where):
    whole = run(model, folder)
    (folder / "out.npy").unlink()
    point, when, done = POINTS[where]

    killed = embed(folder, model, before=kill(point, when))
    assert killed.returncode == -signal.SIGKILL
    assert not (folder / "out.npy").exists()
    assert embedding.unfinished(folder / "out.npy") == ((done, 12) if done else None)

    told = json.loads(embed(folder, model, "--json").stdout)
    assert told["resumed"] == done
    np.testing.assert_array_equal(np.load(folder / "out.npy"), whole)
    assert names(folder) == ["in.txt", "out.npy"]


def test_a_run_killed_after_its_file_has_its_name_is_complete(model, folder):
    write(folder)

    embed(folder, model, before=kill("resume.Target.publish", "after"))
    assert names(folder) == ["in.txt", "out.npy", "out.npy.part.json"]
    assert embedding.unfinished(folder / "out.npy") is None

    assert embed(folder, model).returncode == 4
    assert embed(folder, model, "--force").returncode == 0
    np.testing.assert_allclose(np.load(folder / "out.npy"), expected_of(TEXTS), atol=2e-5)
    assert names(folder) == ["in.txt", "out.npy"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_keeps_what_is_done_and_says_so(model, folder, number, status):
    write(folder)

    done = embed(folder, model, before=kill("resume.Part.append", "after", number))

    assert done.returncode == status
    assert "5 of 12 texts are kept in out.npy.part: the same command goes on from there" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(folder) == ["in.txt", "out.npy.part", "out.npy.part.json"]
    assert "12 texts, 5 of an earlier run" in embed(folder, model).stderr
    assert names(folder) == ["in.txt", "out.npy"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_anything_is_done_leaves_nothing(model, folder, number, status):
    write(folder)

    done = embed(folder, model, before=kill("resume.Part.append", "before", number))

    assert done.returncode == status
    assert "kept" not in done.stderr
    assert names(folder) == ["in.txt"]


def stop_after_a_window(model, folder, **options):
    """Leave the part of a run that ended after its first window."""

    def stop(done, texts):
        if done > 5:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        embed_file(model, write(folder), folder / "out.npy", progress=stop, **options)
    assert names(folder) == ["in.txt", "out.npy.part", "out.npy.part.json"]


@pytest.mark.parametrize("other", ["texts", "model", "options", "empty"])
def test_the_part_of_another_run_is_left_alone_without_force(model, folder, tmp_path, other):
    stop_after_a_window(model, folder)
    before = (folder / "out.npy.part").read_bytes()
    texts, options = list(TEXTS), {}
    if other == "texts":
        texts[7] = "ships"
    elif other == "model":
        model = make_model(tmp_path / "other", seed=1)
    elif other == "options":
        options = {"pooling": "cls"}
    else:
        texts, options = ["", *texts[1:]], {"empty": "zeros"}

    with pytest.raises(
        FileError, match=r"out.npy.part: belongs to an unfinished run with other texts.*--force starts again"
    ):
        run(model, folder, "\n".join(texts), **options)
    assert (folder / "out.npy.part").read_bytes() == before

    y = run(model, folder, "\n".join(texts), force=True, **options)
    np.testing.assert_array_equal(
        y,
        TextEncoder.load(model, pooling=options.get("pooling")).embed(
            texts, empty=options.get("empty", "error")
        ),
    )
    assert names(folder) == ["in.txt", "out.npy"]


def test_force_goes_on_where_the_part_is_its_own(model, folder):
    stop_after_a_window(model, folder)

    report = embed_file(model, folder / "in.txt", folder / "out.npy", force=True)

    assert report.resumed == 5


def flip_a_bit(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda part, note: note.unlink(), "exists, without a note"),
        (lambda part, note: note.write_text("{"), "exists, without a note"),
        (lambda part, note: note.write_text("[]"), "exists, without a note"),
        (
            lambda part, note: note.write_text(json.dumps({**json.loads(note.read_text()), "done": 13})),
            "a note that is damaged",
        ),
        (
            lambda part, note: note.write_text(json.dumps({**json.loads(note.read_text()), "done": "5"})),
            "a note that is damaged",
        ),
        (lambda part, note: os.truncate(part, 400), "became shorter"),
        # more rows than were written: they are zeros
        (
            lambda part, note: note.write_text(json.dumps({**json.loads(note.read_text()), "done": 7})),
            "does not hold the rows that its note describes",
        ),
        (lambda part, note: flip_a_bit(part, 140), "does not hold the rows that its note describes"),
        (
            lambda part, note: note.write_text(
                json.dumps({k: v for k, v in json.loads(note.read_text()).items() if k != "written"})
            ),
            "does not hold the rows that its note describes",
        ),
    ],
)
def test_a_part_that_was_harmed_is_not_trusted(model, folder, harm, words):
    stop_after_a_window(model, folder)
    harm(folder / "out.npy.part", folder / "out.npy.part.json")
    there = names(folder)

    with pytest.raises(FileError, match=words):
        run(model, folder)
    assert names(folder) == there

    np.testing.assert_array_equal(run(model, folder, force=True), TextEncoder.load(model).embed(TEXTS))
    assert names(folder) == ["in.txt", "out.npy"]


def test_a_file_that_is_nobodys_part_is_left_alone(model, folder):
    (folder / "out.npy.part").write_bytes(b"precious")

    with pytest.raises(FileError, match="without a note that says what it is"):
        run(model, folder)

    assert (folder / "out.npy.part").read_bytes() == b"precious"


@pytest.mark.parametrize("force", [False, True])
def test_what_a_link_leads_to_is_never_a_part(model, folder, force):
    (folder / "other").write_bytes(b"precious")
    (folder / "out.npy.part").symlink_to("other")

    with pytest.raises(FileError, match=r"out.npy.part: "):
        run(model, folder, force=force)

    assert (folder / "other").read_bytes() == b"precious"


def test_two_processes_do_not_write_one_file(model, folder):
    stop_after_a_window(model, folder)
    fcntl = pytest.importorskip("fcntl")
    with (folder / "out.npy.part").open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for force in (False, True):
            with pytest.raises(FileError, match="another process is writing it"):
                run(model, folder, force=force)

    assert embedding.unfinished(folder / "out.npy") == (5, 12)
    assert run(model, folder).shape == (12, 24)


@pytest.mark.parametrize("done", [0, 5])
@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_a_disk_that_fills_up_keeps_what_is_done_only(model, folder, monkeypatch, call, done):
    if done:
        stop_after_a_window(model, folder)

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(FileError, match="No space left on device"):
        run(model, folder)

    monkeypatch.undo()
    assert embedding.unfinished(folder / "out.npy") == ((5, 12) if done else None)
    assert names(folder) == (["in.txt", "out.npy.part", "out.npy.part.json"] if done else ["in.txt"])


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_what_replaces_a_private_file_is_private_while_it_is_written(model, folder, mode):
    write(folder, "old", "out.npy").chmod(mode)
    seen, before = [], os.umask(0)

    def look(done, texts):
        seen.append(stat.S_IMODE((folder / "out.npy.part").stat().st_mode))

    try:
        embed_file(model, write(folder), folder / "out.npy", force=True, progress=look)
    finally:
        os.umask(before)

    assert set(seen) == {mode}
    assert stat.S_IMODE((folder / "out.npy").stat().st_mode) == mode


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc tells which file is synchronised")
def test_rows_are_on_the_disk_before_they_are_counted(model, folder, monkeypatch):
    events, real = [], os.fsync

    def fsync(descriptor):
        real(descriptor)
        left = embedding.unfinished(folder / "out.npy")
        events.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, left[0] if left else 0))

    monkeypatch.setattr(os, "fsync", fsync)
    run(model, folder)

    part, note = "out.npy.part", "out.npy.part.json.new"
    expected = [(note, 0), (part, 0), (note, 0), (part, 5), (note, 5), (part, 10), (note, 10), (part, 12)]
    assert events[: len(expected)] == expected


def test_an_output_made_meanwhile_is_left_alone(model, folder):
    def make(done, texts):
        (folder / "out.npy").write_bytes(b"precious")

    with pytest.raises(FileError, match=r"out.npy: .*was created by another process in the meantime"):
        embed_file(model, write(folder), folder / "out.npy", progress=make)

    assert (folder / "out.npy").read_bytes() == b"precious"
    assert embedding.unfinished(folder / "out.npy") == (12, 12)
    assert embed_file(model, folder / "in.txt", folder / "out.npy", force=True).resumed == 12
    assert np.load(folder / "out.npy").shape == (12, 24)


def test_a_half_precision_model_is_near(model, folder):
    exact = run(model, folder)
    for dtype in ("float16", "float64"):
        y = run(model, folder, dtype=dtype, force=True)
        assert y.dtype == (np.float64 if dtype == "float64" else np.float32)
        assert (y * exact).sum(axis=1).min() > 0.999


def test_lines_come_from_a_pipe_and_rows_go_into_one(model, folder):
    root = str(Path(cupynorm.__file__).parents[1])
    line = f"{sys.executable} -m cupynorm embed - -o - --model {model} --device cpu"
    done = subprocess.run(
        line.split(),
        input=CONTENT.encode(),
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )

    assert done.returncode == 0, done.stderr
    expected = TextEncoder.load(model).embed(TEXTS)
    np.testing.assert_allclose(
        np.load(io.BytesIO(done.stdout)), expected, atol=1e-6
    )  # windows are others here
    assert names(folder) == []
