"""All that was measured on an architecture, and how it is looked up. The numbers are in data/sm_NN.json."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from cupynorm._values import NamedTuple
from cupynorm.plan.rule_file import (
    SCHEMA,
    TABLES,
    Table,
    by_bytes,
    content_of,
    crossovers_of,
    file_of,
    lists_of,
    planned_by,
    query_of,
)
from cupynorm.plan.sections import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from cupynorm.plan.problem import Problem
    from cupynorm.plan.rule_file import Kind, List
    from cupynorm.plan.rule_types import (
        CachedRule,
        ClusterRule,
        Crossover,
        FixedRule,
        RegisterRule,
        Rule,
        SharedRule,
        TilingRule,
    )
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


class Rules(NamedTuple):
    """All that was measured on one architecture. file: its file in the package."""

    architecture: str
    file: str
    tile: Tile
    narrow_fused: NarrowFused
    tiled: Tiled
    staged: Staged
    streamed: Streamed
    rounds: Rounds
    late_exponential: LateExponential
    clusters: Clusters
    fused_clusters: FusedClusters
    column_sums: ColumnSums
    stretches: Stretches
    rings: Rings
    apart: Apart
    small_batch: SmallBatch
    split: Split
    registers: RegisterModel
    crossovers: Mapping[tuple[str, Kind | int | None], tuple[Crossover, ...]]
    register_rules: Mapping[tuple[str, Kind], Sequence[RegisterRule]]
    fixed_rules: Mapping[tuple[str, Kind], Sequence[FixedRule]]
    cached_rules: Mapping[Kind, Sequence[CachedRule]]
    cluster_rules: Mapping[Kind, Sequence[ClusterRule | SharedRule | TilingRule]]

    def crossover(
        self, what: str, kind: Kind | int | None, access_bytes: int | None = None
    ) -> Crossover | None:
        """Return the first crossover of a kind, for accesses of so many bytes; None if there is none.

        kind: affine parameters and bytes of an element, the bytes alone, or None where it is the same for all.
        """
        found = self.crossovers.get((what, kind), ())
        return next((each for each in found if each.access_bytes in {None, access_bytes}), None)

    def crossover_for(self, what: str, problem: Problem) -> Crossover | None:
        """Return the crossover of a problem's kind, else that of the bytes of its elements."""
        return self.crossover(what, problem.kind) or self.crossover(what, problem.element_bytes)

    def is_better(self, what: str, problem: Problem) -> bool:
        """Say whether a row is beyond the crossover of its kind, or of the bytes of its elements."""
        found = self.crossover_for(what, problem)
        if found is None:
            return False
        return found.least <= problem.row_bytes <= found.most and problem.band_share <= found.kept

    def every_rule(self) -> Iterator[Rule]:
        """Yield all rules. Raises TypeError for names that no rule has."""
        tables: tuple[Any, ...] = (
            self.register_rules,
            self.fixed_rules,
            self.cached_rules,
            self.cluster_rules,
        )
        for table in tables:
            for key in table:
                yield from table[key]

    def register_rule(self, table: str, problem: Problem) -> RegisterRule | None:
        """Return the first rule of a table that can hold a row; None if none can, or where there is no such table."""
        rules = self.register_rules.get((table, problem.kind), ())
        return next((rule for rule in rules if problem.row_bytes <= rule.row_bytes), None)

    def has_register_rules(self, table: str, kind: Kind) -> bool:
        """Say whether there is such a table."""
        return (table, kind) in self.register_rules

    def but(
        self,
        lists: Mapping[List, Sequence[Mapping[str, Any]]],
        crossovers: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rules:
        """Return the same with other rows of a file in these lists, and all other crossovers if they are given."""
        changed: dict[str, Any] = {}
        for each, rows in lists.items():
            name, key = query_of(each)
            table = changed.setdefault(name, Table(getattr(self, name)))
            if rows:
                table[key] = list(rows)
            else:  # as where the file has no such rule
                table.pop(key, None)
        if crossovers is not None:
            changed["crossovers"] = crossovers_of(crossovers)
        return self._replace(**changed)


def rules_of(architecture: str) -> Rules:
    """Return the rules of a compute capability such as "90"; those of the measured architecture where it has none."""
    return _read(planned_by(architecture))


@functools.cache
def _read(architecture: str) -> Rules:
    return parse(content_of(architecture), file_of(architecture))


def parse(told: Mapping[str, Any], file: str) -> Rules:
    """Turn a file's content into rules. Raises ValueError for another schema, TypeError for unknown sections."""
    if told["schema"] != SCHEMA:
        raise ValueError(f"the rules have schema {told['schema']}, {SCHEMA} is expected")
    sections = {
        name: made(**{key: by_bytes(value) for key, value in told[name].items()})
        for name, made in SECTIONS.items()
    }
    tables: dict[str, Any] = {name: Table() for name in TABLES.values()}
    for row in told["rules"]:
        for each in lists_of(row):
            name, key = query_of(each)
            tables[name].setdefault(key, []).append(row)
    return Rules(
        architecture=told["architecture"],
        file=file,
        **sections,
        crossovers=crossovers_of(told["crossovers"]),
        **tables,
    )
