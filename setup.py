"""The native libraries, and builds whose bytes are the same each time; everything else about the distribution is in pyproject.toml.

The libraries are optional: without a compiler the installation succeeds, and exporter.inference_session says what is missing.
With PYTHONOP_PURE=1 a wheel has none of them and is for every platform: `make wheel` builds it for those that have neither a wheel nor a compiler.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ABI = "0x030B0000"  # Python 3.11 and every later one

#: The date of every file in a wheel and in an archive of the sources: the first that a zip can have.
DATE = os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")

os.umask(0o022)  # of what setuptools writes itself

threads = ["-pthread"] if sys.platform == "linux" else []  # glibc before 2.34 has locks of its own in a library of their own
if sys.platform == "win32":
    flags = ["/O2", "/std:c11"]
else:
    flags = ["-O3", "-std=gnu11", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off"]  # the last: round as the operators do
    if "-g" not in os.environ.get("CFLAGS", "").split():
        flags.append("-g0")  # what is for debuggers names the folder of the build


class Build(build):
    """A build that takes nothing over from an earlier one: modules that are gone since stood in it."""

    def run(self) -> None:
        """Build anew."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class Libraries(build_ext):
    """Libraries that do not say where the Python that built them stood: some builds of Python have every extension look there for others."""

    def build_extensions(self) -> None:
        """Compile and link them."""
        for command in ("linker_so", "linker_so_cxx"):
            if flags := getattr(self.compiler, command, None):
                setattr(self.compiler, command, [flag for flag in flags if not flag.startswith("-Wl,-rpath")])
        super().build_extensions()


class Sources(sdist):
    """An archive of the sources that says nothing of the machine: no user, no dates, files in order."""

    def make_archive(
        self, base_name: Any, format: str, root_dir: Any = None, base_dir: Any = None, owner: Any = None, group: Any = None
    ) -> str:
        """Write ``base_name.tar.gz`` of the folder ``base_dir``."""
        if format != "gztar":
            return str(super().make_archive(base_name, format, root_dir, base_dir, owner, group))

        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = int(DATE)
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        name = f"{base_name}.tar.gz"
        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(DATE)) as zipped,
            tarfile.open(fileobj=zipped, mode="w") as archive,
        ):
            for path in (Path(base_dir), *sorted(Path(base_dir).rglob("*"))):
                archive.add(path, path.as_posix(), recursive=False, filter=plain)
        return name


commands: dict[str, type[Command]] = {"build": Build, "build_ext": Libraries, "sdist": Sources}


def library(name: str, *sources: str, headers: Sequence[str]) -> Extension:
    """A custom-op library of onnxruntime that Python imports, too: it is found and installed as a module."""
    return Extension(
        name,
        sorted(str(path) for pattern in sources for path in Path().glob(pattern)),
        define_macros=[("Py_LIMITED_API", ABI)],
        depends=sorted(str(path) for pattern in headers for path in Path().glob(pattern)),
        py_limited_api=True,
        extra_compile_args=flags,
        extra_link_args=threads,
        export_symbols=["RegisterCustomOps"],
        optional=True,
    )


libraries = [
    library("exporter.runtime.native._native", "exporter/runtime/native/*.c", headers=["exporter/runtime/native/*.h"]),
    library("exporter.cpu.native._cpu", "exporter/cpu/native/*.c", headers=["exporter/cpu/native/*.h", "exporter/runtime/native/*.h"]),
]
pure = os.environ.get("PYTHONOP_PURE") == "1" and "sdist" not in sys.argv  # the archive has the sources of C, always

setup(
    cmdclass=commands,
    ext_modules=[] if pure else libraries,
    options={} if pure else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
