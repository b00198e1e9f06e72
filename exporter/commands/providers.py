"""--provider, of the commands that run a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

__all__ = ["check_providers", "placement_option", "provider_of", "provider_option"]


def _providers(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> list[Any] | None:
    return [provider_of(text) for text in given] or None


def provider_of(text: str) -> Any:
    """NAME or NAME,OPTION=VALUE,... as `exporter.inference_session` takes a provider."""
    name, *pairs = text.split(",")
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{text!r} is not NAME or NAME,OPTION=VALUE,... (openvino,precision=bfloat16)")
        options[key] = value
    return (name, options) if options else name


def check_providers(providers: list[Any] | None) -> None:
    """See that these are here, before a run: where one is not, sizes of inputs have nothing to do with it.

    Raises:
        RunError, ArgumentError: One is not, or does not take its options.
    """
    if providers:
        from exporter.runtime.library import check_onnxruntime  # loads onnxruntime
        from exporter.runtime.providers import choose

        check_onnxruntime()
        choose(providers)


_NAMES = "cuda, openvino, openvino,precision=bfloat16. May be repeated."


def _option(help: str) -> Callable[[Any], Any]:
    return click.option(
        "--provider", "providers", multiple=True, metavar="NAME[,OPTION=VALUE]", callback=_providers, help=f"{help}: {_NAMES}"
    )


#: Of commands that run a file.
provider_option = _option("Run on this execution provider, what it lacks on the CPU")
#: Of commands that open one.
placement_option = _option("Also say which nodes this execution provider takes, and which are left to the CPU")
