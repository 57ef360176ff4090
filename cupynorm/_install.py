"""Commands that install packages: cupynorm is on no package index, so messages name the packages of its extras."""

from __future__ import annotations

# By CUDA's major.
NVRTC = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc==13.*"}
HEADERS = {12: "nvidia-cuda-runtime-cu12", 13: "nvidia-cuda-runtime==13.*"}
ML_DTYPES = "ml_dtypes>=0.5"
# As pyproject.toml has them: a test compares.
EXTRAS = {
    "cuda12": ("cupy-cuda12x>=14.2,<15", NVRTC[12], HEADERS[12], ML_DTYPES),
    "cuda13": ("cupy-cuda13x>=14.2,<15", NVRTC[13], HEADERS[13], ML_DTYPES),
    "text": ("tokenizers>=0.20", "safetensors>=0.4.3"),
    "plot": ("matplotlib>=3.9",),
    "numba": ("numba>=0.61",),
}


def pip_install(*wanted: str) -> str:
    """Return the command that installs requirements, or what an extra of cupynorm consists of."""
    needs = [need for each in wanted for need in EXTRAS.get(each, (each,))]
    return " ".join(["pip install", *(_quoted(need) for need in needs)])


def _quoted(requirement: str) -> str:
    """Quote what a shell would read otherwise."""
    return f"'{requirement}'" if set(requirement) & set("<>*=[; ") else requirement
