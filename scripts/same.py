"""Compares two commits: the machine code of all kernels, and all plans. Needs NVRTC, no GPU.

A commit that only moves code passes both. Kernels may differ within bounds, and are then to be timed on a device.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ADAPTER = Path("tests", "same_adapter.py")
WORKING_TREE = "."
# A cut into structs moves the compiler's choices by 1.2 % at most, in both directions, and no time was seen to follow.
MOST_INSTRUCTIONS = 1015  # for 1000

Record = dict[str, Any]


# --- the two commits -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tree(revision: str) -> Iterator[Path]:
    """Give the folder of a revision, copied for a while; . is the working tree, a name with a slash another folder."""
    if revision == WORKING_TREE or ("/" in revision and Path(revision).is_dir()):
        yield ROOT if revision == WORKING_TREE else Path(revision).resolve()
        return
    name = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if not name:
        sys.exit(
            f"same: {revision} is no revision of this repository; a folder has a slash in its name: ./{revision}"
        )
    with tempfile.TemporaryDirectory(prefix="same-") as folder:
        packed = subprocess.run(["git", "archive", name], cwd=ROOT, capture_output=True, check=True)  # noqa: S607
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)  # noqa: S607
        if not Path(folder, ADAPTER).exists():  # older than this tool
            shutil.copyfile(ROOT / ADAPTER, Path(folder, ADAPTER))
        yield Path(folder)


def ask(folder: Path, question: str, answer: Path, cache: Path, *options: str) -> None:
    """Let a commit answer, by its own code, into a file."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "CUPYNORM_TUNED": "0"}
    script = ROOT / "scripts" / "same_answers.py"
    command = [sys.executable, script, question, answer, "--cache", cache, *options]
    if subprocess.run(command, cwd=folder, env=environment, check=False).returncode:
        sys.exit(f"same: {question} of {folder} are not known")


def answers(
    revisions: Sequence[str], question: str, cache: Path, options: Sequence[str], scratch: Path
) -> list[Path]:
    """Ask both commits, one after the other: each takes all cores."""
    files = []
    for revision in revisions:
        files.append(scratch / f"{question}.{len(files)}.gz")
        start = time.monotonic()
        with tree(revision) as folder:
            ask(folder, question, files[-1], cache, *options)
        print(f"{question} of {revision}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return files


def lines(path: Path) -> Iterator[str]:
    """Read an answer line by line."""
    with gzip.open(path, "rt") as file:
        yield from file


# --- kernels ---------------------------------------------------------------------------------------------------------

IDENTICAL, ALLOWED, REFUSED = "identical", "allowed", "refused"
PLANNED = "planned otherwise"
COUNTS = ("instructions", "registers", "local_bytes", "shared_bytes", "resident_blocks")


class Verdict(NamedTuple):
    """What a comparison of two kernels comes to, and why."""

    what: str
    reasons: tuple[str, ...] = ()


def judge(before: Record, after: Record) -> Verdict:
    """Compare what the compiler made of a kernel in two commits."""
    if "error" in after or "error" in before:
        if "error" in after:
            return Verdict(REFUSED, (f"does not compile: {after['error']}",))
        return Verdict(ALLOWED, ("did not compile before",))
    if all(before[name] == after[name] for name in ("code", "block", *COUNTS)):
        return Verdict(IDENTICAL)
    if before["plan"] != after["plan"]:
        names = {**before["plan"], **after["plan"]}
        values = {name: [side["plan"].get(name) for side in (before, after)] for name in names}
        return Verdict(
            PLANNED, tuple(f"{name} {old} -> {new}" for name, (old, new) in values.items() if old != new)
        )
    reasons = []
    if after["local_bytes"] > before["local_bytes"]:
        reasons.append("keeps more in local memory: spills or a stack")
    if after["resident_blocks"] < before["resident_blocks"]:
        reasons.append("fewer blocks fit on a multiprocessor")
    if 1000 * after["instructions"] > MOST_INSTRUCTIONS * before["instructions"]:
        reasons.append(f"more than {MOST_INSTRUCTIONS / 1000 - 1:.1%} more instructions")
    return Verdict(REFUSED if reasons else ALLOWED, tuple(reasons))


def changes(before: Record, after: Record) -> str:
    """Say in one line what has changed in numbers."""
    if "error" in before or "error" in after:
        return ""
    found = []
    for name in COUNTS:
        if before[name] != after[name]:
            share = f" ({after[name] / before[name] - 1:+.1%})" if name == "instructions" else ""
            found.append(f"{name.replace('_', ' ')} {before[name]} -> {after[name]}{share}")
    return ", ".join(found) or "other machine code, the numbers are as before"


class Pair(NamedTuple):
    """A kernel in both commits. labels: all that launches it."""

    before: Record
    after: Record
    labels: list[str]
    calls: list[Record]
    verdict: Verdict


class Kernels(NamedTuple):
    """How the kernels of two commits compare. gone, new: labels that one of them alone has."""

    pairs: list[Pair]
    gone: list[str]
    new: list[str]

    def of(self, what: str) -> list[Pair]:
        """Return those with this verdict."""
        return [pair for pair in self.pairs if pair.verdict.what == what]


def compare_kernels(before: Iterator[str], after: Iterator[str]) -> Kernels:
    """Match the kernels of two commits by their labels. The same two under several labels are one pair."""
    old, new = ({each["label"]: each for each in map(json.loads, side)} for side in (before, after))
    pairs: dict[tuple[str, str, str], Pair] = {}
    for label in sorted(old.keys() & new.keys()):
        verdict = judge(old[label], new[label])
        kind = old[label]["key"], new[label]["key"], verdict.what
        pair = pairs.setdefault(kind, Pair(old[label], new[label], [], [], verdict))
        pair.labels.append(label)
        pair.calls.append(new[label]["call"])
    gone, added = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    return Kernels(list(pairs.values()), gone, added)


def disassembled(cache: Path, record: Record) -> Counter[str]:
    """Count a kernel's opcodes; none without a disassembler."""
    sys.path.insert(0, str(ROOT))
    from tests.build_gate import nvdisasm  # noqa: PLC0415  seconds, and only for what differs

    tool = nvdisasm()
    if tool is None or "error" in record:
        return Counter()
    with contextlib.closing(sqlite3.connect(cache / "kernels.sqlite")) as file:
        ((code,),) = file.execute("SELECT code FROM kernels WHERE key = ?", (record["key"],))
    with tempfile.NamedTemporaryFile(suffix=".bin") as raw:
        raw.write(zlib.decompress(code))
        raw.flush()
        command = [tool, "-b", f"SM{record['arch']}", raw.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", done.stdout)
    return Counter(opcode for opcode in found if opcode != "NOP")


def opcodes_changed(cache: Path, pair: Pair) -> str:
    """Say which opcodes there are more or fewer of."""
    before, after = (disassembled(cache, side) for side in (pair.before, pair.after))
    counts = {name: after[name] - before[name] for name in sorted(before.keys() | after.keys())}
    found = [f"{count:+d} {name}" for name, count in counts.items() if count]
    return ", ".join(found[:12]) + " ..." * (len(found) > 12) if found else "as many of each opcode"  # noqa: PLR2004


def report_kernels(found: Kernels, cache: Path, show: int) -> None:
    """Print what has changed, the refused ones first."""
    for what in (REFUSED, PLANNED, ALLOWED):
        pairs = found.of(what)
        for pair in pairs[:show]:
            more = f" (and {len(pair.labels) - 1} more)" if len(pair.labels) > 1 else ""
            print(f"{what}: {pair.labels[0]}{more}\n    {changes(pair.before, pair.after)}")
            if pair.verdict.reasons:
                print(f"    {'; '.join(pair.verdict.reasons)}")
            if what != PLANNED and "error" not in pair.after:
                print(f"    {opcodes_changed(cache, pair)}")
        if len(pairs) > show:
            print(f"{what}: {len(pairs) - show} more; --show {len(pairs)} shows all, --json FILE keeps them")
    for name, labels in (("before only", found.gone), ("after only", found.new)):
        for label in labels[:show]:
            print(f"{name}: {label}")
        if len(labels) > show:
            print(f"{name}: {len(labels) - show} more")
    counts = ", ".join(f"{len(found.of(what))} {what}" for what in (IDENTICAL, ALLOWED, PLANNED, REFUSED))
    both = [pair for pair in found.pairs if "error" not in pair.before and "error" not in pair.after]
    sums = [
        sum(side["instructions"] for side in sides)
        for sides in zip(*(pair[:2] for pair in both), strict=True)
    ]
    total = f"; instructions {sums[0]} -> {sums[1]}" if sums else ""
    print(
        f"kernels: {len(found.pairs)} in both, {counts}; {len(found.gone)} labels before only, "
        f"{len(found.new)} after only{total}"
    )
    if found.of(ALLOWED):
        print("kernels: those that are allowed are to be timed on a device; --json FILE lists them")


def as_json(found: Kernels) -> Record:
    """Return what is to be looked at or timed, for a program."""
    names = ("expression", "arch", "block", *COUNTS, "plan", "error")
    changed = [
        {
            "verdict": pair.verdict.what,
            "reasons": pair.verdict.reasons,
            "labels": pair.labels,
            "calls": pair.calls,
            **{
                side: {name: record[name] for name in names if name in record}
                for side, record in (("before", pair.before), ("after", pair.after))
            },
        }
        for pair in found.pairs
        if pair.verdict.what != IDENTICAL
    ]
    return {"changed": changed, "before_only": found.gone, "after_only": found.new}


# --- plans -----------------------------------------------------------------------------------------------------------


UNKNOWN = "none"  # in place of devices, where a commit's adapter cannot describe the call


class Difference(NamedTuple):
    """A call whose plan two commits differ in. fields: those that differ, each with its value before and after."""

    call: Record
    device: str
    fields: dict[str, tuple[Any, Any]]


def compare_plans(before: Iterator[str], after: Iterator[str]) -> tuple[int, list[Difference]]:
    """Return how many plans were compared, and those that differ. Both sides have the same calls, in the same order.

    Calls that one of the commits cannot describe are not compared.
    """
    count, found = 0, []
    for texts in zip(before, after, strict=True):
        call, old = map(json.loads, texts[0].split("\t"))
        again, new = map(json.loads, texts[1].split("\t"))
        if call != again:
            raise RuntimeError(f"the commits were asked for different calls: {call} and {again}")
        if UNKNOWN in old or UNKNOWN in new:
            continue
        count += len(old)
        for device, plan in old.items():
            there = new.get(device, {})
            names = sorted(plan.keys() | there.keys())
            values = {name: (plan.get(name), there.get(name)) for name in names}
            fields = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
            if fields:
                found.append(Difference(call, device, fields))
    return count, found


def report_plans(count: int, found: Sequence[Difference], show: int) -> None:
    """Print how many plans differ, grouped, and the first few."""
    groups: dict[tuple[str, ...], list[Difference]] = defaultdict(list)
    for each in found:
        groups[tuple(each.fields)].append(each)
    for fields, alike in sorted(groups.items(), key=lambda item: -len(item[1]))[:show]:
        forms = Counter(each.call["form"] for each in alike).most_common(4)
        devices = Counter(each.device for each in alike).most_common()
        print(f"{len(alike)} plans differ in {', '.join(fields)}")
        print("    " + ", ".join(f"{name} {number}" for name, number in (*forms, *devices)))
        for each in alike[:2]:
            values = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in each.fields.items())
            call = " ".join(f"{name}={value}" for name, value in each.call.items())
            print(f"    {each.device}: {call}: {values}")
    if len(groups) > show:
        print(f"{len(groups) - show} more groups; --show {len(groups)} shows all")
    print(f"plans: {count} compared, {len(found)} differ")


# --- the command -----------------------------------------------------------------------------------------------------


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="same", description=__doc__)
    parser.add_argument(
        "before", nargs="?", default="HEAD", help="a revision, or . for the working tree; HEAD"
    )
    parser.add_argument("after", nargs="?", default=WORKING_TREE, help="the same; the working tree")
    parser.add_argument(
        "--kernels", action="store_true", help="compare machine code; both without either option"
    )
    parser.add_argument("--plans", action="store_true", help="compare plans; both without either option")
    parser.add_argument(
        "--part", action="append", default=[], help="only kernels of parts that begin so: gate, sweep"
    )
    parser.add_argument(
        "--only", default="", help="only kernels and plans whose label this regular expression finds"
    )
    parser.add_argument(
        "--allow-plans", action="store_true", help="plans may differ; they are shown all the same"
    )
    parser.add_argument(
        "--json", type=Path, help="write the kernels that changed here, with what launches them"
    )
    parser.add_argument("--show", type=int, default=5, help="how many of each kind to print; 5")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / ".same", help="the folder of what was compiled; .same"
    )
    return parser.parse_args(given)


def same_kernels(asked: argparse.Namespace, scratch: Path) -> bool:
    """Compare machine code; say whether nothing is refused."""
    options = [*(f"--part={part}" for part in asked.part), f"--only={asked.only}"]
    files = answers((asked.before, asked.after), "kernels", asked.cache, options, scratch)
    found = compare_kernels(*map(lines, files))
    report_kernels(found, asked.cache, asked.show)
    if asked.json:
        asked.json.write_text(json.dumps(as_json(found), indent=1) + "\n", "utf-8")
    if not found.pairs:
        print("kernels: no label is in both commits")
        return False
    return not found.of(REFUSED) and (asked.allow_plans or not (found.gone or found.of(PLANNED)))


def same_plans(asked: argparse.Namespace, scratch: Path) -> bool:
    """Compare plans; say whether all are the same, or may differ."""
    files = answers((asked.before, asked.after), "plans", asked.cache, [f"--only={asked.only}"], scratch)
    count, found = compare_plans(*map(lines, files))
    report_plans(count, found, asked.show)
    return asked.allow_plans or not found


def main(given: Sequence[str] | None = None) -> int:
    """Compare what was asked for; return 1 if something is refused."""
    asked = arguments(given)
    asked.cache = asked.cache.resolve()
    both = asked.kernels == asked.plans
    with tempfile.TemporaryDirectory(prefix="same-") as scratch:
        results = [same_plans(asked, Path(scratch))] if both or asked.plans else []
        results += [same_kernels(asked, Path(scratch))] if both or asked.kernels else []
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
