"""Rules from recorded searches, on searches that are made up: what stays, what goes, and what the file says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cupynorm import cli
from cupynorm.ops.softmax import SOFTMAX
from cupynorm.plan import choose as choosing
from cupynorm.plan import rule_file
from cupynorm.plan import rules as planner_rules
from cupynorm.plan.config import Plan
from cupynorm.plan.limits import RECORDED
from cupynorm.plan.rule_file import DATA, content_of, kinds_of
from cupynorm.tools import bench, evidence, explain, rule_moves, rule_plans, search, ship
from cupynorm.tools.results import Measured, Point, Report, Timing
from cupynorm.tools.shipped import Shipped
from tests import command_runner

H200 = RECORDED["h200"]
FILE = "benchmarks/h200/search.json"
# Three rules for short rows, each of which decides two widths: aligned softmax of halves, and what holds longer rows.
SHORT, MIDDLE, LONG = "short", "middle", "long"
COLS = {SHORT: (128, 256), MIDDLE: (512, 1024), LONG: (2048, 4096)}
ENDS = {SHORT: 512, MIDDLE: 2048, LONG: 8192}


def rule(name: str, row_bytes: int, thread_bytes: int, block: int) -> dict[str, Any]:
    return {
        "id": name,
        "rule": "registers",
        "table": "aligned",
        "parameters": 0,
        "bytes": 2,
        "row_bytes": row_bytes,
        "thread_bytes": thread_bytes,
        "block": block,
        "resident_threads": 1024,
        "source": "plans",
    }


@pytest.fixture
def content() -> rule_plans.Content:
    """Few rules of softmax's alone."""
    told = content_of("90")
    others = [
        row
        for row in told["rules"]
        if (0, 2) in kinds_of(row) and row["rule"] in {"cached", "cluster", "cluster shared"}
    ]
    few = [
        rule(SHORT, ENDS[SHORT], 16, 64),
        rule(MIDDLE, ENDS[MIDDLE], 32, 128),
        rule(LONG, ENDS[LONG], 32, 256),
        rule("end", 16384, 64, 512),
    ]
    return rule_plans.read({**told, "rules": [*few, *others], "crossovers": []}, "few.json")


Share = Callable[[int, str], float]  # (columns, what leads to a plan) -> its share of the copy rate


def recorded(content: rule_plans.Content, share: Share, widths: tuple[int, ...] = ()) -> search.Search:
    """A search in which a plan takes what `share` says."""
    found = []
    for cols in widths or tuple(each for of_rule in COLS.values() for each in of_rule):
        point = Point("softmax", "float16", 49152, cols)
        how = rule_plans.contenders(content, bench.lowered(point).problem, H200)
        shares = {plan: (share(cols, text),) * 3 for plan, text in how.items()}
        found.append(search.Shares(point, shares, how, {}))
    about = {
        "schema": 1,
        "kind": search.KIND,
        "date": "2026-11-23T10:00:00+00:00",
        "device": {"name": "NVIDIA H200"},
        "versions": {},
        "limits": dataclasses.asdict(H200),
        "digest": "of kernels",
        "rules": content.file,
    }
    return search.Search(about, found, FILE)


def of_plans(content: rule_plans.Content, favoured: Callable[[int], str], by: float) -> Share:
    """One rule is faster at each width than all others, by as much."""
    return lambda cols, how: (
        0.9 + by * (how in {f"rule {favoured(cols)}", f"{favoured(cols)} for longer rows"})
    )


def decides(cols: int) -> str:
    return next(name for name, widths in COLS.items() if cols <= widths[-1])


def names(shipped: Shipped) -> list[str]:
    return [row["id"] for row in shipped.told["rules"] if row["id"] in {SHORT, MIDDLE, LONG}]


def row_of(shipped: Shipped, name: str) -> dict[str, Any]:
    (row,) = (row for row in shipped.told["rules"] if row["id"] == name)
    return row


def test_each_width_is_held_by_the_rule_that_is_meant(content) -> None:
    for name, widths in COLS.items():
        for cols in widths:
            problem = bench.lowered(Point("softmax", "float16", 49152, cols)).problem
            chosen = content.choose(problem, H200)
            assert chosen is not None
            assert chosen.rule == name


@pytest.mark.parametrize(("by", "stays"), [(0.02, True), (0.005, False)])
def test_a_rule_stays_where_it_is_faster_by_more_than_the_noise(content, by, stays) -> None:
    shipped = ship.ship(content, [recorded(content, of_plans(content, decides, by))])

    assert (MIDDLE in names(shipped)) is stays
    assert len({SHORT, MIDDLE, LONG} & set(shipped.left_out)) == (0 if stays else 2)


def test_a_rule_that_is_faster_at_one_width_stays(content) -> None:
    def share(cols: int, how: str) -> float:
        return 0.93 if (cols, how) == (1024, f"rule {MIDDLE}") else 0.9

    assert names(ship.ship(content, [recorded(content, share)])) == [MIDDLE]


def test_neighbours_become_one_rule(content) -> None:
    def share(cols: int, how: str) -> float:
        """The middle rule's plan is the best for its own rows and for longer ones, up to the last."""
        best = {SHORT: f"rule {SHORT}", MIDDLE: f"rule {MIDDLE}", LONG: f"{MIDDLE} for longer rows"}
        return 0.95 if how == best[decides(cols)] or (cols, how) == (4096, f"rule {LONG}") else 0.9

    shipped = ship.ship(content, [recorded(content, share, (128, 256, 512, 1024, 2048, 4096))])

    # its end has moved to the longest row where it was faster, and its name with it
    (new,) = shipped.changed.values()
    assert shipped.changed == {MIDDLE: new}
    assert row_of(shipped, new)["row_bytes"] in {4096, 8192}
    assert shipped.all.after > shipped.all.before


def test_what_was_not_measured_is_kept_and_named(content) -> None:
    shipped = ship.ship(content, [recorded(content, lambda *_: 0.9, COLS[SHORT])])

    assert names(shipped) == [MIDDLE, LONG]
    assert set(shipped.not_measured) > {
        LONG,
        next(row["id"] for row in content.rows if row["rule"] == "cached"),
    }
    assert row_of(shipped, LONG) == content.by_name[LONG]


def test_a_rule_that_was_measured_once_is_kept(content) -> None:
    shipped = ship.ship(content, [recorded(content, lambda *_: 0.9, (128,))])

    assert names(shipped) == [SHORT, MIDDLE, LONG]


def test_a_rule_whose_plan_cannot_run_is_left_out(content) -> None:
    def share(cols: int, how: str) -> float:
        return 0.0 if how == f"rule {MIDDLE}" else 0.9

    assert MIDDLE not in names(ship.ship(content, [recorded(content, share)]))


def test_a_point_where_nothing_ran_does_not_count(content) -> None:
    shipped = ship.ship(content, [recorded(content, lambda cols, _: 0.9 * (cols != 512))])

    assert (shipped.all.points, shipped.unknown) == (5, 0)


def test_a_point_whose_plan_was_not_timed_does_not_count(content) -> None:
    found = recorded(content, lambda *_: 0.9)
    other = dict.fromkeys(found.points[0].plans, (0.9,) * 3)
    other.pop(next(iter(other)))
    points = [dataclasses.replace(found.points[0], plans=other), *found.points[1:]]

    shipped = ship.ship(content, [dataclasses.replace(found, points=points)])

    assert (shipped.all.points, shipped.unknown) == (5, 1)


def test_a_rule_says_what_it_earns_and_where_that_was_measured(content) -> None:
    shipped = ship.ship(content, [recorded(content, of_plans(content, decides, 0.02))])

    row = row_of(shipped, MIDDLE)
    assert (row["share"], row["share_without"]) == (0.92, 0.9)
    assert row["at"] in {"softmax float16 49152 x 512", "softmax float16 49152 x 1024"}
    assert shipped.told["sources"][row["source"]] == {
        "device": "NVIDIA H200",
        "date": "2026-11-23",
        "file": FILE,
        "note": "docs/add-gpu-data.md",
        "what": "each rule beside its neighbours and the planner without it, at 6 points",
    }
    used = {row["source"] for row in (*shipped.told["rules"], *shipped.told["crossovers"])}
    assert set(shipped.told["sources"]) == used.union(*shipped.told["sections"].values())


def test_the_same_searches_give_the_same_file(content) -> None:
    found = [recorded(content, of_plans(content, decides, 0.02))]

    assert ship.ship(content, found).text == ship.ship(content, found).text


def test_points_of_all_searches_count(content) -> None:
    """At points that both have, the difference of two plans is the mean of theirs."""
    earns = dataclasses.replace(
        recorded(content, of_plans(content, decides, 0.04), COLS[MIDDLE]), file="b.json"
    )
    nothing = recorded(content, lambda *_: 0.9)

    assert names(ship.ship(content, [nothing])) == []
    assert names(ship.ship(content, [nothing, earns])) == [MIDDLE]


def test_another_architecture_has_a_file_of_its_own(content) -> None:
    found = recorded(content, lambda *_: 0.9)
    limits = {**dataclasses.asdict(H200), "compute_capability": "100"}
    other = dataclasses.replace(found, about={**found.about, "limits": limits})

    assert ship.ship(content, [other]).told["architecture"] == "100"
    with pytest.raises(ValueError, match="the searches are of 100, 90: give those of one architecture"):
        ship.ship(content, [found, other])


def test_a_shipped_file_is_written_as_it_is_read() -> None:
    for file in Path(DATA).glob("*.json"):
        assert rule_plans.text_of(json.loads(file.read_text("utf-8"))) == file.read_text("utf-8")


def test_rules_that_were_made_stay_as_they_are_when_they_are_made_again(content) -> None:
    """Each rule down the list loses less than the noise, and two of them more: the second run may not go on."""

    def share(cols: int, how: str) -> float:
        down = how.count(",") + 1 if how.startswith(f"without {decides(cols)}") else 3
        return 0.916 - 0.008 * (0 if how.startswith("rule") else down)

    not_in_sweep = (136, 248, 520, 1016, 2056)  # whose mean would not allow it either
    found = [recorded(content, share, not_in_sweep)]
    first = ship.ship(content, found)
    again = ship.ship(rule_plans.read(first.told, "few.json"), found)

    assert first.left_out == [SHORT]
    assert again.text == first.text


def test_what_lies_between_two_measured_rows_stays_with_its_rule(content) -> None:
    """The next rule is faster from 1024 columns on: the middle one, which had all up to there, ends just before."""

    def share(cols: int, how: str) -> float:
        best = f"without {MIDDLE}" if cols == COLS[MIDDLE][1] else f"rule {decides(cols)}"
        return 0.95 if how == best else 0.9

    shipped = ship.ship(content, [recorded(content, share)])

    (new,) = shipped.changed.values()
    assert shipped.changed == {MIDDLE: new}
    assert row_of(shipped, new)["row_bytes"] == 2 * COLS[MIDDLE][1] - 2


def test_a_rule_that_says_why_it_has_to_stay_stays(content) -> None:
    nothing = [recorded(content, lambda *_: 0.9)]
    rows = [{**row, "keep": "by hand"} if row["id"] == MIDDLE else row for row in content.rows]
    kept = rule_plans.read({**content.told, "rules": rows}, "kept.json")

    shipped = ship.ship(kept, nothing)

    assert MIDDLE not in names(ship.ship(content, nothing))
    assert row_of(shipped, MIDDLE)["row_bytes"] == ENDS[MIDDLE]
    assert shipped.kept == {MIDDLE: "by hand"}
    assert f"kept: {MIDDLE}: by hand" in list(shipped.lines())


def test_rows_longer_than_all_measured_and_small_batches_keep_their_plans() -> None:
    """The last rule of a list that was measured up to a part of it only is not left out, however little it earns."""
    content = rule_plans.read(content_of("90"), "sm_90.json")
    last = content.lists["registers", "aligned", (2, 2)][-1]
    shipping = ship.Shipping(content, evidence_of(content, "layer_norm", "float16", (512, 1024, 2048)))
    move = ship.Move((last["id"],))
    effect = shipping.effect(move)

    assert last["row_bytes"] > 2048 * 2
    assert effect is not None
    assert not shipping.take(move, effect)


def evidence_of(
    content: rule_plans.Content, op: str, dtype: str, widths: tuple[int, ...]
) -> list[evidence.Evidence]:
    """Points where all plans are as fast."""
    found = []
    for cols in widths:
        point = Point(op, dtype, 8192, cols)
        problem = bench.lowered(point).problem
        shares = dict.fromkeys(rule_plans.contenders(content, problem, H200), 0.9)
        found.append(evidence.Evidence(point, problem, H200, shares, "made up"))
    return found


@pytest.mark.parametrize(("form", "dtype"), [("softmax", "float16"), ("add_layer_norm/sum", "float32")])
def test_what_is_remembered_of_a_plan_is_what_the_planner_says(form: str, dtype: str) -> None:
    """A planner that has answered for many files of rules is right about each, whichever rule is left out."""
    content = rule_plans.read(content_of("90"), "sm_90.json")
    every = [bench.lowered(Point(form, dtype, 8192, cols)).problem for cols in (96, 1000, 4096, 20000)]
    planners = [(problem, rule_plans.Planner(problem, H200)) for problem in every]
    remembered = 0

    for name in list(content.by_name)[::4]:
        less = content.but([name])
        for problem, planner in planners:
            known = sum(map(len, planner.known.values()))
            assert planner.choose(less)[0] == less.choose(problem, H200)
            remembered += sum(map(len, planner.known.values())) == known

    assert remembered > 100


# ---- the sweep, and rules for several kinds


def test_a_larger_tolerance_leaves_out_more_and_says_how_the_sweep_fell(content) -> None:
    found = [recorded(content, of_plans(content, decides, 0.02))]

    shipped = ship.ship(content, found, tolerance=0.1)

    assert len(names(shipped)) < 3
    assert shipped.sweep.after < shipped.sweep.before
    assert shipped.sweep.worst == pytest.approx(0.02)
    assert f"sweep: {shipped.sweep.points} points, " in "\n".join(shipped.lines())


def test_a_point_of_the_sweep_that_was_not_searched_keeps_its_plan(content) -> None:
    point = Point("softmax", "float16", 8192, 1536)
    chosen = content.choose(bench.lowered(point).problem, H200)
    assert chosen is not None
    assert chosen.rule == LONG
    timings = {"cupynorm": Timing(1.0, 1.0, 1.0), "copy": Timing(0.9, 0.9, 0.9)}
    found = [recorded(content, lambda *_: 0.9)]

    def shipped(plan: Plan) -> Shipped:
        measured = Measured(point, 1, timings, plan.as_dict())
        return ship.ship(content, found, sweep=Report({}, [measured]))

    assert (shipped(chosen.plan).all.points, shipped(chosen.plan).sweep.points) == (7, 1)
    old_names = dataclasses.replace(
        chosen.plan, block=1024
    )  # a plan that is none of this version stands for its point
    assert shipped(old_names).sweep.points == 1
    kept = rule_plans.read(shipped(chosen.plan).told, "kept").choose(bench.lowered(point).problem, H200)
    assert kept is not None
    assert kept.plan == chosen.plan


def test_searches_of_a_point_are_compared_by_what_both_timed() -> None:
    one, two, three = (
        Plan("warp", 8, 4, 32, 1, False, 1, 0, 1, 1, 0, 9, n, 0, 0, 1, 1, 1.0) for n in (32, 64, 96)
    )

    together = evidence.together([{one: 0.8, two: 0.4}, {one: 1.0, two: 1.0, three: 0.5}], one)

    assert together == pytest.approx({one: 0.9, two: 0.9 * 0.75, three: 0.9 * 0.5})


def test_narrow_rows_that_come_together_are_evidence_for_those_with_gaps() -> None:
    shipping = rule_plans.read(content_of("90"), "sm_90.json")
    problem = bench.lowered(Point("softmax", "float16", 49152, 49)).problem
    assert shipping.choose(problem, H200).plan.kernel == "row_tiled"

    (found,) = evidence.gather(shipping, [recorded(shipping, lambda *_: 1.0, (49,))])

    assert shipping.choose(found.problem, H200).rule in shipping.by_name


def test_rules_of_two_kinds_with_the_same_numbers_become_one(content) -> None:
    twin = {**content.by_name[MIDDLE], "id": "twin", "parameters": 1}
    longer = {**content.by_name[LONG], "id": "longer twin", "parameters": 1, "block": 512}
    both = rule_plans.read({**content.told, "rules": [*content.rows, twin, longer]}, "both")

    shipped = ship.ship(both, [recorded(content, of_plans(content, decides, 0.02))])

    ((gone, kept),) = shipped.merged.items()
    (row,) = (row for row in shipped.told["rules"] if row["id"] == kept)
    assert (gone, row["parameters"], row["bytes"]) == ("twin", [0, 1], 2)
    assert kept == "middle-p01-b2-to-2048"
    rules = planner_rules.parse(shipped.told, "merged")
    assert [each.id for each in rules.register_rules["aligned", (1, 2)]] == [kept, "longer twin"]


def test_crossovers_that_are_the_same_for_several_numbers_of_parameters_become_one() -> None:
    def crossovers(*least: int | None) -> list[dict[str, Any]]:
        rows = [{"what": "cached", "parameters": i, "bytes": 4, "from": each} for i, each in enumerate(least)]
        return [row for row in rows if row["from"] is not None]

    def of_any(least: int) -> dict[str, Any]:
        return {"what": "cached", "bytes": 4, "from": least}

    for told, expected in (
        (crossovers(6, 6, 6), [of_any(6)]),
        (crossovers(4, 6, 6), [*crossovers(4), of_any(6)]),
        (crossovers(4, 5, 6), crossovers(4, 5, 6)),
        (crossovers(None, 6, 6), crossovers(None, 6, 6)),  # rows without parameters have none
    ):
        assert rule_moves.for_any_parameters(told) == expected


def test_rules_that_cannot_be_in_the_order_of_both_lists_do_not_become_one(content) -> None:
    first = {**content.by_name[SHORT], "id": "first", "parameters": 1, "row_bytes": 100}
    second = {**content.by_name[MIDDLE], "id": "second", "parameters": 1}
    both = rule_plans.read({**content.told, "rules": [*content.rows, first, second]}, "both")
    wide = {**both.by_name[MIDDLE], "parameters": [0, 1]}
    short = {**both.by_name[SHORT], "parameters": [0, 1]}

    merged = both.but(["second"], {MIDDLE: wide}, {"second": MIDDLE})

    assert [row["id"] for row in merged.lists["registers", "aligned", (1, 2)]] == ["first", MIDDLE]
    with pytest.raises(ValueError, match="no order of the rules"):
        _ = merged.but(["end"], {SHORT: short}, {"end": SHORT}).rows


# ---- what does not depend on the number of rows


def test_a_rule_that_keeps_the_order_of_summation_stays() -> None:
    """A rule for few rows has the vectors and threads of the one for many: it is not left out before that."""
    content = rule_plans.read(content_of("90"), "sm_90.json")
    point = Point("layer_norm", "float16", 49152, 1000)
    problem = bench.lowered(point).problem
    many, few = "ragged-p2-b2-to-2048", "ragged-p2-b2-to-2048-2"
    found = [content.choose(dataclasses.replace(problem, rows=rows), H200) for rows in (49152, 1000)]
    assert [each.rule for each in found if each] == [many, few]
    shares = dict.fromkeys(rule_plans.contenders(content, problem, H200), (0.9,) * 3)
    seen = evidence.Evidence(
        point, problem, H200, {plan: each[0] for plan, each in shares.items()}, "made up"
    )
    shipping = ship.Shipping(content, [seen])

    def left_out(name: str) -> bool:
        effect = shipping.effect(ship.Move((name,)))
        return effect is not None and shipping.take(ship.Move((name,)), effect)

    assert not left_out(few)
    assert left_out(many)
    assert left_out(few)


def test_order_of_summation_says_who_has_which_elements() -> None:
    plan = Plan("warp", 8, 4, 32, 1, False, 1, 0, 1, 1, 0, 9, 64, 0, 0, 12, 12, 1.0)

    assert ship.order_of_summation(plan) == ship.order_of_summation(dataclasses.replace(plan, block=128))
    assert ship.order_of_summation(plan) != ship.order_of_summation(dataclasses.replace(plan, group=16))


# ---- the command


@pytest.fixture
def files(content, tmp_path) -> tuple[Path, Path]:
    """A recorded search and the rules that it is of."""
    found = recorded(content, of_plans(content, decides, 0.02))
    searched, rules = tmp_path / "search.json", tmp_path / "few.json"
    searched.write_text(search._text(found.about, found.points))
    rules.write_text(rule_plans.text_of(content.told))
    return searched, rules


def invoke(*arguments: object) -> Any:
    return command_runner().invoke(cli.cli, ["tune", *map(str, arguments)])


def test_the_command_writes_the_file_and_says_what_has_become_of_rules(files, tmp_path) -> None:
    searched, rules = files
    out = tmp_path / "sm_90.json"

    result = invoke("--ship", searched, "--data", rules, "--out", out)

    assert result.exit_code == 0, result.output
    first, *lines = result.stdout.splitlines()
    assert first.endswith(" now")
    assert lines[0].startswith("all: 6 points, share of the copy rate 0.9")
    assert "nan" not in result.stdout
    assert lines[-1] == f"written: {out}"
    kept = [row["id"] for row in json.loads(out.read_text())["rules"]]
    assert {SHORT, MIDDLE, LONG} <= set(kept)
    told = json.loads(invoke("--ship", searched, "--data", rules, "--out", out, "--json").stdout)
    assert (told["schema"], told["rules"], told["all"]["points"], told["unknown"]) == (1, len(kept), 6, 0)
    planner_rules.parse(json.loads(out.read_text()), "out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is not JSON"),
        ("{}", "is no file of rules such as cupynorm/plan/data/sm_90.json: KeyError: 'schema'"),
    ],
)
def test_what_is_no_file_of_rules_is_refused(files, tmp_path, text: str, message: str) -> None:
    searched, rules = files
    rules.write_text(text)

    result = invoke("--ship", searched, "--data", rules, "--out", tmp_path / "out.json")

    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out.json").exists()


def test_a_file_that_is_no_search_is_refused(files, tmp_path) -> None:
    _, rules = files

    result = invoke("--ship", rules, "--out", tmp_path / "out.json")

    assert result.exit_code == 2
    assert "a file that `cupynorm tune --search` has written is expected" in result.stderr
    missing = invoke("--ship", tmp_path / "none.json", "--out", tmp_path / "out.json")
    assert missing.exit_code == 4


# ---- what explain says of it


@pytest.fixture
def shipped_rules(content, monkeypatch) -> Shipped:
    """Rules from a search in place of those of the package."""
    shipped = ship.ship(content, [recorded(content, of_plans(content, decides, 0.02))])
    monkeypatch.setattr(rule_file, "content_of", lambda _: shipped.told)
    monkeypatch.setattr(choosing, "rules_of", lambda _: planner_rules.parse(shipped.told, "made up"))
    return shipped


def test_explain_says_what_a_rule_earns(shipped_rules) -> None:
    found = explain.explain(SOFTMAX, (49152, 512), "float16", device="h200")

    assert found.rule is not None
    assert (found.rule.id, found.rule.share) == (MIDDLE, 0.92)
    assert found.rule.source["file"] == FILE
    assert found.without is not None
    assert (found.without.share, found.without.why.split()[:2]) == (0.9, ["rule", LONG])
    assert found.without.plan != found.plan
    told = found.as_dict()
    assert told["without"]["plan"]["variant"] == found.without.plan.variant


def test_explain_says_nothing_of_rules_where_none_decided(shipped_rules) -> None:
    forced = explain.explain(SOFTMAX, (49152, 512), "float16", device="h200", plan="uncached")
    few = explain.explain(SOFTMAX, (1, 1 << 20), "float16", device="h200")

    assert (forced.rule, forced.without) == (few.rule, few.without) == (None, None)


def test_the_command_prints_what_a_rule_earns(shipped_rules) -> None:
    arguments = ["explain", "softmax", "--shape", "49152,512", "--dtype", "float16", "--device", "h200"]

    result = command_runner().invoke(cli.cli, arguments)

    at = row_of(shipped_rules, MIDDLE)["at"]
    assert f"middle: share 0.920 at {at} (NVIDIA H200, 2026-11-23, {FILE})" in result.stdout
    assert "share 0.900 there; rule long of plan/data/sm_90.json)" in result.stdout
    told = json.loads(command_runner().invoke(cli.cli, [*arguments, "--json"]).stdout)
    assert (told["rule"]["at"], told["without"]["share"]) == (at, 0.9)


def test_a_rule_of_the_package_may_not_have_been_measured_alone() -> None:
    found = explain.explain(SOFTMAX, (49152, 512), "float16", device="h200")

    assert found.rule is not None
    assert found.why.startswith(f"rule {found.rule.id} of ")
    assert set(found.rule.source) == {"device", "date", "file", "note", "what"}
