"""What devices allow, and how many blocks they hold at once: numbers only, no device needed."""

from __future__ import annotations

from cupynorm._values import dataclass

PLAIN_SHARED_BYTES = 48 << 10  # of a block, static and dynamic, that no kernel has to ask for
STATIC_SHARED_BYTES = 2048  # kept back of every opt-in limit for the kernels' own static shared memory


@dataclass(frozen=True)
class Limits:
    """What a device allows. Bytes and counts are for one multiprocessor (SM) where a name says so."""

    name: str
    compute_capability: str  # "90"
    sm_count: int
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int  # dynamic, with opt-in: what is left beside STATIC_SHARED_BYTES
    reserved_shared_bytes: int  # of each block, by the driver
    l2_bytes: int


# Read off such devices with deviceQuery's calls, or from the CUDA programming guide's table of technical
# specifications.
RECORDED: dict[str, Limits] = {
    "h200": Limits("h200", "90", 132, 2048, 32, 65536, 233472, 232448 - STATIC_SHARED_BYTES, 1024, 60 << 20),
    "h100": Limits("h100", "90", 132, 2048, 32, 65536, 233472, 232448 - STATIC_SHARED_BYTES, 1024, 50 << 20),
    "a100": Limits("a100", "80", 108, 2048, 32, 65536, 167936, 166912 - STATIC_SHARED_BYTES, 1024, 40 << 20),
    "t4": Limits("t4", "75", 40, 1024, 16, 65536, 65536, 65536 - STATIC_SHARED_BYTES, 0, 4 << 20),
    "rtx4090": Limits(
        "rtx4090", "89", 128, 1536, 24, 65536, 102400, 101376 - STATIC_SHARED_BYTES, 1024, 72 << 20
    ),
}


def active_blocks(limits: Limits, block: int, registers: int, shared_bytes: int) -> int:
    """Return how many blocks one SM holds at once, as the driver's occupancy query would say.

    registers are per thread; shared_bytes are static and dynamic together. Registers are given out to warps in units
    of 256, shared memory to blocks in units of 128 bytes (CUDA's occupancy calculator, compute capability 7.0 and
    newer).
    """
    warps = -(-block // 32)
    registers_per_warp = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = (
        limits.registers_per_sm // registers_per_warp // 4 * 4 // warps
    )  # four schedulers share them
    unit = 128 if int(limits.compute_capability) >= 80 else 256  # noqa: PLR2004
    shared = -(-(shared_bytes + limits.reserved_shared_bytes) // unit) * unit
    by_shared = limits.shared_bytes_per_sm // shared if shared else limits.blocks_per_sm
    return min(limits.blocks_per_sm, limits.threads_per_sm // (warps * 32), by_registers, by_shared)
