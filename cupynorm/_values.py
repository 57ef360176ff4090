"""dataclass and NamedTuple whose methods are not compiled at import: 0.05 ms a class instead of 0.2 to 0.9.

For modules that every process imports. Instances behave like the standard library's, and take a little longer to make.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN202, ANN204, ARG001  names and types are the standard library's

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["NamedTuple", "dataclass", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass, replace
    from typing import NamedTuple
else:
    import dataclasses
    from _collections import _tuplegetter

    def _bound(cls, names, defaults, given, named):
        """Return the values of a call in the order of the names; TypeError as from a function of such parameters."""
        if len(given) == len(names) and not named:
            return given
        values = {**defaults, **dict(zip(names, given, strict=False)), **named}
        # with all names, and as many values, there is none that is unknown
        if len(values) == len(names) >= len(given) and named.keys().isdisjoint(names[: len(given)]):
            try:
                return [values[name] for name in names]
            except KeyError:
                pass
        raise TypeError(
            f"{cls.__qualname__} takes {', '.join(names)}: got {len(given)} values and {list(named)}"
        )

    def _init(self, *given, **named):
        cls = type(self)
        names = cls.__match_args__
        # as dataclasses.replace() calls it, thousands of times
        if not given and named.keys() == cls._all and not cls._slotted:
            self.__dict__.update(named)
            return
        if not named and len(given) == len(names) and not cls._slotted:
            self.__dict__.update(zip(names, given, strict=True))
            return
        for name, value in zip(names, _bound(cls, names, cls._defaults, given, named), strict=True):
            object.__setattr__(self, name, value)

    def replace(value, /, **changes):
        """Return what dataclasses.replace() does, of a class that dataclass() below made, in a fifth of the time."""
        cls = type(value)
        if cls._slotted or not changes.keys() <= cls._all:
            return dataclasses.replace(value, **changes)  # which says what is wrong
        made = object.__new__(cls)
        made.__dict__.update(value.__dict__)
        made.__dict__.update(changes)
        return made

    def _values(self):
        return tuple([getattr(self, name) for name in self._compared])

    def _eq(self, other):
        return _values(self) == _values(other) if type(other) is type(self) else NotImplemented

    def _hash(self):
        return hash(_values(self))

    def _repr(self):
        fields = [f"{name}={getattr(self, name)!r}" for name in self._shown]
        return f"{type(self).__qualname__}({', '.join(fields)})"

    def _setattr(self, name, _):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def _delattr(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    FROZEN = {
        "__eq__": _eq,
        "__hash__": _hash,
        "__repr__": _repr,
        "__setattr__": _setattr,
        "__delattr__": _delattr,
    }

    OWN = {"__init__", "__repr__"}  # a class may write them itself
    COMPARING = {"__eq__", "__hash__"}

    class _Fields:
        """__dataclass_fields__ of a class, which the standard library makes when somebody first asks for it.

        It takes two thirds of the time that the class takes, and serves dataclasses.replace(), fields() and the like.
        """

        def __init__(self, annotations, defaults):
            self.annotations, self.defaults = annotations, defaults

        def __get__(self, _, cls):
            alike = type(cls.__name__, (), {"__annotations__": self.annotations, **self.defaults})
            alike.__doc__ = cls.__doc__  # else the standard library writes one
            made = dataclasses.dataclass(init=False, repr=False, eq=False)(alike)
            cls.__dataclass_params__ = made.__dataclass_params__
            cls.__dataclass_fields__ = made.__dataclass_fields__
            return made.__dataclass_fields__

    def dataclass(*, frozen=False, slots=False, eq=True, repr=True):  # noqa: A002
        """Return what dataclasses.dataclass does, where it is frozen or eq and repr are off."""

        def made(cls):
            annotations, members = cls.__annotations__, cls.__dict__
            names = tuple(annotations)
            defaults = {name: members[name] for name in names if name in members}
            fields = {name: each for name, each in defaults.items() if type(each) is dataclasses.Field}
            added = {"__dataclass_fields__": _Fields(annotations, defaults)}
            defaults = defaults | {name: each.default for name, each in fields.items()}
            defaults = {name: each for name, each in defaults.items() if each is not dataclasses.MISSING}
            if slots:
                hidden = {*names, "__dict__", "__weakref__"}
                kept = {name: each for name, each in members.items() if name not in hidden}
                cls = type(cls)(cls.__name__, cls.__bases__, {**kept, "__slots__": names})
            else:
                for name in fields:
                    delattr(cls, name)
                added |= defaults
            added |= {
                "__match_args__": names,
                "_defaults": defaults,
                "_all": set(names),
                "_slotted": slots,
                "_compared": tuple([name for name in names if name not in fields or fields[name].compare]),
                "_shown": tuple([name for name in names if name not in fields or fields[name].repr]),
            }
            methods = {"__init__": _init, **(FROZEN if frozen else {})}
            for name in methods.keys() - OWN.intersection(members):
                if eq or name not in COMPARING:
                    added[name] = methods[name]
            for name, each in added.items():
                setattr(cls, name, each)
            return cls

        return made

    class _Named(type):
        def __new__(cls, name, bases, members):
            names = tuple(members.get("__annotations__", ()))
            defaults = {each: members.pop(each) for each in names if each in members}
            members |= {each: _tuplegetter(at, "") for at, each in enumerate(names)}
            members |= {
                "_fields": names,
                "__match_args__": names,
                "_field_defaults": defaults,
                "_shown": names,
            }
            return super().__new__(cls, name, bases, {**members, "__slots__": ()})

    class NamedTuple(tuple, metaclass=_Named):  # noqa: SLOT001  the metaclass defines them
        """A class as typing.NamedTuple makes it."""

        def __new__(cls, *given, **named):
            return tuple.__new__(cls, _bound(cls, cls._fields, cls._field_defaults, given, named))

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def _replace(self, **changes):
            cls = type(self)
            if not changes.keys() <= set(cls._fields):
                return cls(**(self._asdict() | changes))  # which says what is wrong
            return tuple.__new__(cls, ({**self._asdict(), **changes}).values())

        def __getnewargs__(self):
            return tuple(self)

        __repr__ = _repr
