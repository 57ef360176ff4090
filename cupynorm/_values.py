"""dataclass and NamedTuple whose methods are not compiled at import: 0.05 ms a class instead of 0.2 to 0.9.

For modules that every process imports. Instances behave like the standard library's, and take a little longer to make.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN202, ANN204, ARG001  names and types are the standard library's

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["NamedTuple", "dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
    from typing import NamedTuple
else:
    import dataclasses
    from _collections import _tuplegetter

    def _bound(cls, names, defaults, given, named):
        """Return the values of a call in the order of the names; TypeError as from a function of such parameters."""
        if len(given) == len(names) and not named:
            return given
        values = defaults | dict(zip(names, given, strict=False)) | named
        if (
            len(given) > len(names)
            or not named.keys() <= set(names[len(given) :])
            or len(values) < len(names)
        ):
            raise TypeError(
                f"{cls.__qualname__} takes {', '.join(names)}: got {len(given)} values and {list(named)}"
            )
        return [values[name] for name in names]

    def _init(self, *given, **named):
        cls = type(self)
        names = cls.__match_args__
        # as dataclasses.replace() calls it, thousands of times
        if named.keys() == cls._all and not cls._slotted:
            self.__dict__.update(named)
            return
        for name, value in zip(names, _bound(cls, names, cls._defaults, given, named), strict=True):
            object.__setattr__(self, name, value)

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

    def dataclass(*, frozen=False, slots=False, eq=True, repr=True):  # noqa: A002
        """Return what dataclasses.dataclass does, where it is frozen or eq and repr are off."""

        def made(cls):
            cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
            fields = cls.__dataclass_fields__.values()
            cls._defaults = {
                each.name: each.default for each in fields if each.default is not dataclasses.MISSING
            }
            cls._all, cls._slotted = set(cls.__match_args__), slots
            cls._compared = tuple([each.name for each in fields if each.compare])
            cls._shown = tuple([each.name for each in fields if each.repr])
            methods = {"__init__": _init, **(FROZEN if frozen else {})}
            for name in methods.keys() - OWN.intersection(cls.__dict__):
                if eq or name not in COMPARING:
                    setattr(cls, name, methods[name])
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
            return type(self)(**(self._asdict() | changes))

        def __getnewargs__(self):
            return tuple(self)

        __repr__ = _repr
