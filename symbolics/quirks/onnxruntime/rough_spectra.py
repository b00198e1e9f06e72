"""DFT and STFT in float32, over lengths that are no powers of two."""

from __future__ import annotations

from symbolics.graph.spectra import spectra_in_doubles
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "spectra_in_doubles"]

QUIRK = Quirk(
    upstream="onnxruntime",
    seen="1.32",
    wrong="its DFT and STFT over a length that is no power of two lose digits in float32 (1e-4 of the largest number at 1000 points, where "
    "PyTorch has 3e-7); there are none for float16",
    cure="spectra_in_doubles, and wide= of spectrum, in symbolics/graph/spectra.py",
)
