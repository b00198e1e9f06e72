"""The native library; everything else about the distribution is in pyproject.toml.

It is optional: without a compiler the installation succeeds, and exporter.inference_session says what is missing.
"""

from __future__ import annotations

import sys

from setuptools import Extension, setup

ABI = "0x030A0000"  # Python 3.10 and every later one

flags = ["/O2", "/std:c11"] if sys.platform == "win32" else ["-O2", "-std=gnu11", "-fvisibility=hidden"]

setup(
    ext_modules=[
        Extension(
            "exporter.runtime.native._native",
            ["exporter/runtime/native/native.c"],
            define_macros=[("Py_LIMITED_API", ABI)],
            depends=[
                f"exporter/runtime/native/native_{part}.h" for part in ("abi", "tensors", "inputs", "outputs", "contexts", "run", "device")
            ],
            py_limited_api=True,
            extra_compile_args=flags,
            export_symbols=["RegisterCustomOps"],
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
