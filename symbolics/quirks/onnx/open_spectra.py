"""DFTs whose length is no constant."""

from __future__ import annotations

from symbolics.graph.spectra import spectra_of_open_lengths
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "spectra_of_open_lengths"]

QUIRK = Quirk(
    upstream="onnx",
    seen="1.23.2",
    wrong="the inference of shapes gives the result of a DFT whose length is no constant the size of the input; onnxruntime infers it by that, "
    "plans its memory so, and refuses to run where that is wrong",
    cure="spectrum and spectra_of_open_lengths in symbolics/graph/spectra.py",
)
