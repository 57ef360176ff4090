"""KernelSpec: a checked call in the kernels' terms, whatever op it is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupynorm._values import NamedTuple
from cupynorm.runtime import compiler

if TYPE_CHECKING:
    from typing import Protocol

    from cupynorm.lower.mirrors import Struct

    class Numbered(Protocol):
        """A plan, as far as the name of its kernel depends on it."""

        @property
        def template(self) -> tuple[Any, ...]:
            """The template arguments that are numbers."""


class KernelSpec(NamedTuple):
    """All that is needed to compile a call's kernel and to explain its launch, on any device.

    text: the source of the module. name: the kernel's name expression, in which {types}, {numbers} and attributes of
    {plan} are still to be filled in. types: the template arguments that are types. params: the kernel's one parameter.
    problem: what a plan is chosen from; each family of kernels has a class of its own.
    """

    text: str
    name: str
    types: str
    params: Struct
    problem: Any

    def expression(self, plan: Numbered) -> str:
        """Write the kernel's name with its template arguments, as NVRTC's demangler would."""
        numbers = ", ".join(map(compiler.template_argument, plan.template))
        return self.name.format(types=self.types, numbers=numbers, plan=plan)
