"""Prints the extra that fits the NVIDIA driver: cuda13, cuda12, or none. Needs nothing but Python."""

import ctypes

CUDA_12, CUDA_13 = 12000, 13000  # as cuDriverGetVersion counts
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def extra() -> str:
    """Return the extra for this machine's driver and its first device."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "none"
    version, device, major, minor = (ctypes.c_int() for _ in range(4))
    if (
        cuda.cuInit(0)
        or cuda.cuDriverGetVersion(ctypes.byref(version))
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
    ):
        return "none"  # a driver without a device, or a stub of one
    cuda.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, device)
    if version.value >= CUDA_13 and (major.value, minor.value) >= (7, 5):  # CUDA 13 has dropped Volta
        return "cuda13"
    return "cuda12" if version.value >= CUDA_12 else "none"


if __name__ == "__main__":
    print(extra())
