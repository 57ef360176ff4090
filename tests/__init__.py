"""Tests. CUPYNORM_SLOW=1 runs the exhaustive ones."""

import os

SLOW = os.environ.get("CUPYNORM_SLOW") == "1"
