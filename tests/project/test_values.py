"""Values that are quick to define are those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import typing
from typing import Any

import pytest

from cupynorm import _values


@_values.dataclass(frozen=True)
class Ours:
    """Ours."""

    a: int
    b: float = 2.0
    c: tuple[int, ...] = ()

    @property
    def sum(self) -> float:
        return self.a + self.b


@dataclasses.dataclass(frozen=True)
class Theirs:
    """Theirs."""

    a: int
    b: float = 2.0
    c: tuple[int, ...] = ()


@_values.dataclass(slots=True, eq=False, repr=False)
class Slots:
    """Neither frozen nor compared."""

    a: int
    b: int = 3


class OurTuple(_values.NamedTuple):
    """Ours."""

    a: int
    b: float = 2.0

    @property
    def sum(self) -> float:
        return self.a + self.b


class TheirTuple(typing.NamedTuple):
    """Theirs."""

    a: int
    b: float = 2.0


def text(value: object) -> str:
    return repr(value).replace("Ours", "Theirs").replace("OurTuple", "TheirTuple")


@pytest.mark.parametrize(
    ("given", "named"),
    [((1,), {}), ((1, 3.0), {}), ((), {"a": 1}), ((1,), {"c": (2,)}), ((1, 2.0, (3,)), {})],
)
def test_a_dataclass(given: Any, named: Any) -> None:
    ours, theirs = Ours(*given, **named), Theirs(*given, **named)

    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)  # type: ignore[call-overload]
    assert dataclasses.astuple(ours) == dataclasses.astuple(theirs)  # type: ignore[call-overload]
    assert text(ours) == text(theirs)
    assert [each.name for each in dataclasses.fields(ours)] == ["a", "b", "c"]  # type: ignore[arg-type]
    assert ours == Ours(*given, **named) != Ours(7)
    assert hash(ours) == hash(Ours(*given, **named))
    assert ours != theirs
    assert dataclasses.replace(ours, b=9.0) == Ours(ours.a, 9.0, ours.c)  # type: ignore[type-var]
    assert pickle.loads(pickle.dumps(ours)) == copy.deepcopy(ours) == copy.copy(ours) == ours  # noqa: S301
    assert ours.sum == ours.a + ours.b


@pytest.mark.parametrize("kind", [Ours, Theirs, OurTuple, TheirTuple, Slots])
@pytest.mark.parametrize(
    ("given", "named"), [((), {}), ((), {"b": 1}), ((1,), {"a": 1}), ((1,), {"x": 1}), ((1, 2, 3, 4), {})]
)
def test_a_call_that_does_not_fit(kind: Any, given: Any, named: Any) -> None:
    with pytest.raises(TypeError):
        kind(*given, **named)


@pytest.mark.parametrize("kind", [Ours, Theirs])
def test_what_is_frozen(kind: Any) -> None:
    value = kind(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'a'"):
        value.a = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'a'"):
        del value.a
    assert value.a == 1


def test_slots() -> None:
    value = Slots(1)
    value.b = 5

    assert (value.a, value.b, Slots(1, b=2).b) == (1, 5, 2)
    assert not hasattr(value, "__dict__")
    assert value != Slots(1, 5)
    assert dataclasses.replace(value, a=4).b == 5  # type: ignore[type-var]


@pytest.mark.parametrize(("given", "named"), [((1,), {}), ((1, 3.0), {}), ((), {"a": 1}), ((1,), {"b": 4.0})])
def test_a_tuple(given: Any, named: Any) -> None:
    ours, theirs = OurTuple(*given, **named), TheirTuple(*given, **named)

    assert ours == theirs == tuple(theirs)
    assert hash(ours) == hash(theirs)
    assert text(ours) == text(theirs)
    assert ours._asdict() == theirs._asdict()
    assert ours._replace(b=7.0) == theirs._replace(b=7.0)
    assert type(ours._replace(a=2)) is OurTuple
    assert OurTuple._fields == TheirTuple._fields
    assert pickle.loads(pickle.dumps(ours)) == copy.deepcopy(ours) == ours  # noqa: S301
    assert (ours.a, ours.b, ours.sum) == (*theirs, sum(theirs))
    with pytest.raises(AttributeError):
        ours.a = 3  # type: ignore[misc]
    assert not hasattr(ours, "__dict__")


def test_a_match() -> None:
    match Ours(1, 5.0), OurTuple(2):
        case Ours(a, b), OurTuple(c, d):
            assert (a, b, c, d) == (1, 5.0, 2, 2.0)
        case _:
            pytest.fail("no match")


def test_a_replaced_value_is_that_of_the_standard_library() -> None:
    value = Ours(1, b=3.0)

    assert _values.replace(value, a=2) == dataclasses.replace(value, a=2) == Ours(2, 3.0)
    assert value == Ours(1, 3.0)
    with pytest.raises(TypeError):
        _values.replace(value, d=4)
