"""Where cupynorm keeps files between processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def folder() -> Path:
    """Return CUPYNORM_CACHE_DIR, else cupynorm in the user's folder for caches. Nothing is made there yet.

    A user without a home gets a path that is not absolute; nobody should keep anything there.
    """
    from pathlib import Path  # noqa: PLC0415  10 ms, which `import cupynorm` need not wait for

    chosen = os.environ.get("CUPYNORM_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))  # noqa: PTH100, PTH111  no home: Path raises
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # noqa: PTH117  XDG: a relative one is to be ignored
        base = os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(base, "cupynorm")
