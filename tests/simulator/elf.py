"""How many bytes of thread-local memory compiled code needs, which is what stands for a kernel's shared memory.

ELF of 64 bits, in this machine's byte order.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

SYMBOLS, RELOCATIONS = 2, 4  # types of sections
THREAD_LOCAL_SEGMENT = 7
THREAD_LOCAL = 0x400  # a flag of sections
RESERVED = 0xFF00  # indices of sections from here on mean something else


class Section(NamedTuple):
    """A section's header."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int

    def within(self, image: bytes) -> bytes:
        """Return the section's bytes."""
        return image[self.offset : self.offset + self.size]


def segment_bytes(image: bytes) -> int:
    """Return the size of a library's thread-local segment."""
    (table,) = struct.unpack_from("=Q", image, 32)
    size, count = struct.unpack_from("=HH", image, 54)
    for at in range(table, table + size * count, size):
        if struct.unpack_from("=I", image, at)[0] == THREAD_LOCAL_SEGMENT:
            return int(struct.unpack_from("=Q", image, at + 40)[0])
    return 0


def thread_local_bytes(image: bytes, names: list[str], beside: str) -> dict[str, int]:
    """Return the bytes that each of these functions of an object file needs, with all that it calls, and `beside` too.

    Every function and every variable must have a section of its own.
    """
    (table,) = struct.unpack_from("=Q", image, 40)
    size, count = struct.unpack_from("=HH", image, 58)
    count = count or Section(*struct.unpack_from("=IIQQQQIIQQ", image, table)).size
    sections = [Section(*struct.unpack_from("=IIQQQQIIQQ", image, table + size * i)) for i in range(count)]
    (symbols,) = (each for each in sections if each.type == SYMBOLS)
    strings = sections[symbols.link].within(image)
    place, found = [], {}
    wanted = {name.encode() for name in (*names, beside)}
    for name, _, _, section, _, _ in struct.iter_unpack("=IBBHQQ", symbols.within(image)):
        place.append(section)
        text = strings[name : strings.index(0, name)]
        if text in wanted:
            found[text.decode()] = section
    needs: dict[int, set[int]] = {}
    for each in sections:
        if each.type == RELOCATIONS:
            of = {place[info >> 32] for _, info, _ in struct.iter_unpack("=QQq", each.within(image))}
            needs.setdefault(each.info, set()).update(to for to in of if 0 < to < RESERVED)
    return {name: _sum(sections, _reached(needs, {found[name], found[beside]})) for name in names}


def _reached(needs: dict[int, set[int]], first: set[int]) -> set[int]:
    reached, left = first, [*first]
    while left:
        new = needs.get(left.pop(), set()) - reached
        reached |= new
        left += new
    return reached


def _sum(sections: list[Section], chosen: set[int]) -> int:
    at, alignment = 0, 1
    for each in (sections[i] for i in chosen):
        if each.flags & THREAD_LOCAL:
            at += -at % max(each.alignment, 1) + each.size
            alignment = max(alignment, each.alignment)
    return at + -at % alignment
