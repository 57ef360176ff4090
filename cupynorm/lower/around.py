"""What is computed around a row op, in terms of views: masks, sums, quantisation, a user's functions."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynorm._dtypes import LEAST_NORMAL
from cupynorm._values import NamedTuple
from cupynorm.call.arguments import Call, view
from cupynorm.call.extras import CheckedExtras
from cupynorm.call.masks import Mask
from cupynorm.call.view import View
from cupynorm.host.philox import Dropout
from cupynorm.lower.expressions import DeviceFunction, Expression
from cupynorm.lower.tracing import traced
from cupynorm.runtime import devices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynorm.lower.row_groups import RowGroups

Function = Expression | DeviceFunction


class Label(NamedTuple):
    """An operand: 1 in the column of a row's label, else 0.

    labels: integers of x's leading shape. A label that is no column matches none; nan: it makes its row nan.
    """

    labels: View
    nan: bool = False


class Counted(NamedTuple):
    """A mask that keeps the rows whose label is another than `ignored`, which labels' dtype holds."""

    labels: View
    ignored: int


class Labelled(NamedTuple):
    """That an op is given, of each row, the element in its label's column, and that `part` is taken away there.

    labels: integers of x's leading shape. ignored: a label of rows that do not count, which labels' dtype holds; there
    must be a Counted of the same, too. LabelledLoad and LabelledStore of kernels/io/labels.cuh.
    """

    labels: View
    ignored: int | None
    part: float = 1.0


class RowSums(NamedTuple):
    """Sums over rows that are taken in the same pass: row_summed of kernels/row/summed.cuh.

    partial: for each sum where those of each group of rows go, [groups, cols]. of_load, of_store: how many numbers
    `load` gives behind an element's, and `store` behind the results; each is added up, those of load first.
    """

    partial: tuple[View, ...]
    groups: RowGroups
    of_load: int
    of_store: int


Operand = View | float | Dropout | Label


class Around(NamedTuple):
    """What is computed around an op, in terms of views: results go to outs, what was loaded to `loaded`.

    An operand is an array stretched to x's shape, a number, a label, or a dropout, which is 1 where it keeps and 0
    where it drops. scales: where those of rows are written, which their results are divided by; 0: nowhere. counted:
    which rows are kept at all; there is no other mask then.

    Without outs nothing is stored: the op saves numbers of each row, and blocks that share a row leave their messages
    in `room`, of room_bytes() of plan/config.py; 0: there is none, and no `split`. `load` gives as many numbers as an
    element of the op has fields, and those of which there are sums; `loaded` gets the first.
    """

    outs: tuple[View, ...]
    load: Function | None = None
    load_operands: tuple[Operand, ...] = ()
    mask: Mask | None = None
    loaded: View | None = None
    store: Function | None = None
    store_operands: tuple[Operand, ...] = ()
    scales: int = 0
    counted: Counted | None = None
    labelled: Labelled | None = None
    sums: RowSums | None = None
    room: int = 0

    @property
    def is_direct(self) -> bool:
        """Whether the op is given x as it is."""
        return self.load is None and self.mask is None and self.loaded is None and self.counted is None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """All of them."""
        return (*self.load_operands, *self.store_operands)

    def reordered(self, order: Sequence[int]) -> Around:
        """Return the same with x's leading axes in this order, but for the mask."""

        def one(each: Operand) -> Operand:
            if isinstance(each, Label):
                return each._replace(labels=each.labels.reordered(order))
            return each.reordered(order) if isinstance(each, View) else each

        def of(operands: Sequence[Operand]) -> tuple[Operand, ...]:
            return tuple(map(one, operands))

        return self._replace(
            outs=tuple(each.reordered(order) for each in self.outs),
            loaded=None if self.loaded is None else self.loaded.reordered(order),
            load_operands=of(self.load_operands),
            store_operands=of(self.store_operands),
            counted=None
            if self.counted is None
            else self.counted._replace(labels=self.counted.labels.reordered(order)),
            labelled=None
            if self.labelled is None
            else self.labelled._replace(labels=self.labelled.labels.reordered(order)),
        )


@functools.cache
def _adding(*, bias: bool, dropout: bool) -> Function:
    """Return dropout(x + bias) + alpha * residual, of x, residual, alpha, bias, and a dropout with its factor."""

    def add(x: Any, residual: Any, alpha: Any, *others: Any) -> Any:
        of_bias, kept, factor = (*others[:bias], *(None,) * (not bias), *others[bias:], *(None, None))[:3]
        total = x if of_bias is None else x + of_bias
        if kept is not None:
            total = np.where(kept != 0, total * factor, 0.0)
        return total + alpha * residual

    count = 3 + bias + 2 * dropout
    return traced(add, count)


@functools.cache
def scaling(*, scale: bool, bias: bool) -> Function:
    """Return x * scale + bias, of x and of those of both that there are."""

    def of(x: Any, *others: Any) -> Any:
        if scale:
            x = x * others[0]
        return x + others[scale] if bias else x

    return traced(of, 1 + scale + bias)


@functools.cache
def _dividing() -> Function:
    """Return y / scale."""
    return traced(lambda y, scale: y / scale, 2)


def masked(what: Around, mask: Mask) -> Around:
    """Return the same where the op is given what a mask makes of x."""
    bias = mask.views().get("bias")
    scaled = mask.scale != 1
    operands: list[Operand] = [mask.scale] * scaled
    operands += [] if bias is None else [bias]
    load = scaling(scale=scaled, bias=bias is not None)
    return what._replace(mask=mask, load=load, load_operands=tuple(operands))


def around(call: Call, fused: CheckedExtras) -> Around:
    """Say of checked extras what is computed."""
    shape, out = call.x.shape, view(call.out, "out")
    if fused.quantize is not None:
        out = out._replace(dtype=fused.quantize.dtype)  # the array itself may hold bits only
    what = Around((out,))
    if fused.mask is not None:
        what = masked(what, fused.mask)
    operands: list[Operand]
    if fused.add is not None:
        residual, shift, alpha, drop, _ = fused.add
        operands = [view(residual, "residual"), alpha]
        operands += [] if shift is None else [view(shift, "bias").broadcast_to(shape)]
        operands += [] if drop is None else [drop, drop.factor]
        what = what._replace(
            load=_adding(bias=shift is not None, dropout=drop is not None),
            load_operands=tuple(operands),
            loaded=None if fused.total is None else view(fused.total, "sum"),
        )
    if fused.quantize is not None:
        scale = fused.quantize.scale
        if fused.quantize.per_row:
            what = what._replace(scales=view(fused.scales, "scales").pointer)
        else:
            given: Operand
            if devices.is_device_array(scale):
                store, given = _dividing(), view(scale.reshape(()), "quantize.scale").broadcast_to(shape)
            elif LEAST_NORMAL < (inverse := 1 / fused.quantize.host_scale) < 1 / LEAST_NORMAL:
                store, given = scaling(scale=True, bias=False), inverse
            else:
                store, given = _dividing(), fused.quantize.host_scale
            what = what._replace(store=store, store_operands=(given,))
    return what
