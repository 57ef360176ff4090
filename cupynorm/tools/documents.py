"""JSON documents, in which numbers that JSON does not have are null."""

from __future__ import annotations

import json
import math
from typing import Any


def text(value: Any, indent: int) -> str:
    """Return a document of dicts, lists and tuples, with null for nan and infinities."""
    return json.dumps(_finite(value), indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
