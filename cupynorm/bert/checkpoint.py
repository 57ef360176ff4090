"""Reads Hugging Face's folders of BERT models: config.json and model.safetensors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupynorm import _install
from cupynorm._dtypes import dtype_of
from cupynorm.bert.config import EncoderConfig
from cupynorm.npy.paths import FileError

Array = np.ndarray[Any, Any]

ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_python": "none"}
# Hugging Face's name of each field of EncoderConfig.
FIELDS = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "ffn": "intermediate_size",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "types": "type_vocab_size",
    "eps": "layer_norm_eps",
}
FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}  # safetensors' names


def read_config(folder: Path, dtype: str) -> EncoderConfig:
    """Read config.json. Raises FileError if it does not describe a BERT encoder."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise FileError(
            f"{folder}: is not a folder: give the one that holds config.json and model.safetensors"
        )
    found = read_json(path)
    kind = found.get("model_type")
    if kind != "bert":
        raise FileError(f"{path}: is a model of type {kind!r}: only BERT encoders ('bert') are supported")
    told: dict[str, tuple[Any, list[Any]]] = {
        "hidden_act": (found.get("hidden_act"), list(ACTIVATIONS)),
        "position_embedding_type": (found.get("position_embedding_type") or "absolute", ["absolute"]),
        "is_decoder": (found.get("is_decoder") or False, [False]),
        "add_cross_attention": (found.get("add_cross_attention") or False, [False]),
    }
    for name, (value, known) in told.items():
        if value not in known:
            raise FileError(
                f"{path}: {name} is {value!r}, but only {', '.join(map(str, known))} is supported"
            )
    missing = [name for name in FIELDS.values() if name not in found]
    if missing:
        raise FileError(f"{path}: has no {', '.join(missing)}")
    values: dict[str, Any] = {name: found[theirs] for name, theirs in FIELDS.items()}
    values["approximate"] = ACTIVATIONS[found["hidden_act"]]
    dtype_of(dtype)  # raises here, so that a wrong dtype is not reported as a fault of the file
    try:
        return EncoderConfig(**values, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise FileError(f"{path}: {error}") from None


def read_json(path: Path, kind: type = dict) -> Any:
    """Return the object (or list) that a JSON file holds. Raises FileError."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(found, kind):
        raise FileError(f"{path}: does not hold a JSON {'object' if kind is dict else kind.__name__}")
    return found


def read_weights(path: Path, config: EncoderConfig) -> dict[str, Array]:
    """Return a file's tensors by BERT's names, without a prefix. None is read if the header does not fit."""
    try:
        import safetensors  # noqa: PLC0415  optional
    except ImportError as error:
        raise ImportError(
            f"reading weights needs the package safetensors: {_install.pip_install('text')}"
        ) from error
    if not path.is_file():
        raise FileError(f"{path}: does not exist{_instead(path.parent)}")
    try:
        with safetensors.safe_open(path, "numpy") as file:
            names = [*file.keys()]
            prefix = "bert." if any(name.startswith("bert.") for name in names) else ""
            bare = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
            ours = {
                name: _renamed(each)
                for name, each in bare.items()
                if each.startswith(("embeddings.", "encoder."))
            }
            _check_layers(path, config, ours.values())
            known = config.shapes()  # other tensors, such as position ids, are not weights
            ours = {name: each for name, each in ours.items() if each in known}
            _check_dtypes(path, {name: file.get_slice(name).get_dtype() for name in ours})
            weights = {each: file.get_tensor(name) for name, each in ours.items()}
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise FileError(f"{path}: is not a safetensors file, or is damaged ({error})") from error
    _warn_of_weights_that_are_not_finite(path, weights)
    return weights


def _check_layers(path: Path, config: EncoderConfig, names: Iterable[str]) -> None:
    """Raise FileError unless the file has tensors of as many layers as config.json says."""
    numbered = (name.removeprefix("encoder.layer.") for name in names if name.startswith("encoder.layer."))
    layers = len({each.partition(".")[0] for each in numbered})
    if layers != config.layers:
        raise FileError(f"{path}: has tensors of {layers} layers, but config.json says {config.layers}")


def _check_dtypes(path: Path, dtypes: Mapping[str, str]) -> None:
    """Raise FileError for tensors of other types than floats of 16, 32 or 64 bits, such as float8."""
    others = [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in FLOATS]
    if others:
        raise FileError(
            f"{path}: {_some(others)}: weights may be {', '.join(FLOATS.values())}; "
            "convert them with the library that quantised them"
        )
    if "BF16" in dtypes.values():
        dtype_of("bfloat16")  # raises ImportError, or TypeError, where ml_dtypes is missing


def _warn_of_weights_that_are_not_finite(path: Path, weights: Mapping[str, Array]) -> None:
    """Warn once, naming the tensors, of NaN or infinite weights: every embedding would be NaN."""
    # A sum needs one pass and no temporary. Only if it is not finite is each element looked at: it may have overflowed.
    bad = [name for name, each in weights.items() if not np.isfinite(each.sum(dtype=np.float64))]
    bad = [name for name in bad if not np.isfinite(weights[name].astype(np.float64)).all()]
    if bad:
        warnings.warn(
            f"{path}: {_some(bad)} hold NaN or infinity: results will be NaN",
            RuntimeWarning,
            stacklevel=4,
        )


def _some(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _renamed(name: str) -> str:
    """Return a tensor's current name. Weights from TensorFlow have gamma and beta instead of weight and bias."""
    if "LayerNorm." in name:
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    return name


def _instead(folder: Path) -> str:
    """Return a hint if the folder holds weights in another format."""
    for name, what in {
        "model.safetensors.index.json": "weights in several files are not supported",
        "pytorch_model.bin": "pickled weights are never loaded",
    }.items():
        if (folder / name).exists():
            return f", but {name}: {what}"
    return ""
