"""Plans of rows whose elements lie apart, as tests force them."""

from __future__ import annotations

import dataclasses

from cupynorm.plan.config import IN_REGISTERS, PLAIN, Plan


def tiling_apart(
    vector: int,
    elements: int,
    lanes: int,
    block: int,
    ctas: int = 1,
    *,
    variant: str = "",
    waits: int = IN_REGISTERS,
) -> Plan:
    """Return a plan. ctas: blocks that share a row. variant: "" for block, or cluster where there are several."""
    return dataclasses.replace(
        PLAIN,
        variant=variant or ("cluster" if ctas > 1 else "block"),
        vector=vector,
        vectors=elements,
        group=block // lanes,
        across=lanes,
        block=block,
        ctas_per_row=ctas,
        waits=waits,
    )
