"""The sections of data/sm_NN.json: numbers that are no rules, a class for each section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynorm.plan.sections.many_blocks import Clusters, FusedClusters, SmallBatch, Split
from cupynorm.plan.sections.one_block import (
    LateExponential,
    NarrowFused,
    Rounds,
    Staged,
    Streamed,
    Tile,
    Tiled,
)
from cupynorm.plan.sections.register_model import RegisterModel
from cupynorm.plan.sections.tilings import Apart, ColumnSums, Rings, Stretches

if TYPE_CHECKING:
    from typing import Any


SECTIONS: dict[str, Any] = {
    "tile": Tile,
    "narrow_fused": NarrowFused,
    "tiled": Tiled,
    "staged": Staged,
    "streamed": Streamed,
    "rounds": Rounds,
    "late_exponential": LateExponential,
    "clusters": Clusters,
    "fused_clusters": FusedClusters,
    "column_sums": ColumnSums,
    "apart": Apart,
    "stretches": Stretches,
    "rings": Rings,
    "small_batch": SmallBatch,
    "split": Split,
    "registers": RegisterModel,
}
