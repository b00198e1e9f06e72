"""Execution providers by name: those that onnxruntime was built with, and plugin libraries that pip packages bring.

onnxruntime 1.22 and newer loads a plugin library (``register_execution_provider_library``), which then lists its devices
(``get_ep_devices``); a session takes devices (``SessionOptions.add_provider_for_devices``). Here a short name does all of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from symbolics.errors import ArgumentError, RunError
from symbolics.text import cause, shown
from symbolics.users import warn

__all__ = ["CPU", "Choice", "add_devices", "choose", "installed", "is_cpu_alone", "precision_of", "said_of"]

#: onnxruntime's name of its own provider for the CPU.
CPU = "CPUExecutionProvider"
_DEVICES = ("cpu", "gpu", "npu")


def _openvino(options: dict[str, Any], precision: str | None) -> dict[str, Any]:
    """OpenVINO computes in bfloat16 where the processor can, unless it is told: errors of 2e-3. Here float32 is what one gets unasked."""
    if "load_config" in options:
        return options
    hint = {None: "f32", "float32": "f32", "bfloat16": "bf16"}[precision]
    return {**options, "load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": hint}})}


class _Plugin(NamedTuple):
    """A provider that a package brings as a plugin library.

    Attributes:
        package: To install by pip.
        module: To import.
        library: The module's function that returns the library's path.
        provider: onnxruntime's name of it.
        options: (options, precision) -> onnxruntime's options; None: it has no choice of precision.
        processor: Whose processors alone it has devices on; "" where it does not depend on that.
    """

    package: str
    module: str
    provider: str
    library: str = "get_library_path"
    options: Callable[[dict[str, Any], str | None], dict[str, Any]] | None = None
    processor: str = ""


_PLUGINS = {
    "openvino": _Plugin(
        "onnxruntime-ep-openvino", "onnxruntime_ep_openvino", "OpenVINOExecutionProvider", options=_openvino, processor="Intel"
    ),
    "webgpu": _Plugin("onnxruntime-ep-webgpu", "onnxruntime_ep_webgpu", "WebGpuExecutionProvider"),
    "qnn": _Plugin("onnxruntime-qnn", "onnxruntime_qnn", "QNNExecutionProvider"),
    "ggml": _Plugin("onnxruntime-ggml", "onnxruntime_ggml", "ggml", "library_path"),
}

_registering = threading.Lock()
_registered: set[str] = set()  # providers of plugins, which onnxruntime counts among those that it has from then on
_added: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


class Choice(NamedTuple):
    """Providers as a session takes them.

    Attributes:
        providers: For onnxruntime.InferenceSession; None where devices are given.
        devices: For `add_devices`: devices of one provider and its options.
        names: The short names of those other than the CPU.
    """

    providers: list[Any] | None
    devices: list[tuple[list[Any], dict[str, str]]]
    names: tuple[str, ...] = ()


def choose(providers: Sequence[Any] | None) -> Choice:
    """What a session is made with.

    Args:
        providers: Names, or (name, options): onnxruntime's ("CUDAExecutionProvider"), or short ("cuda", "openvino"). An option ``precision`` of
            OpenVINO is "float32" (default) or "bfloat16"; ``device`` of a plugin is "cpu", "gpu" or "npu". None: the CPU. In a list of several,
            onnxruntime's own names that this onnxruntime was built without are left out, as onnxruntime does.

    Raises:
        ArgumentError: There is no provider of that name here, or it has no such option.
        RunError: Its package has no device on this machine, or its library cannot be loaded.

    Warns:
        PythonopWarning: A name was left out.
    """
    import onnxruntime

    built_in = {_short(name): name for name in onnxruntime.get_available_providers() if name not in _registered}
    chosen: list[tuple[str, dict[str, Any]]] = []
    entries = _listed(providers) or [CPU]
    for entry in entries:
        name, options = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, {})
        if not isinstance(name, str) or not isinstance(options, Mapping):
            raise ArgumentError(f"providers= lists names, or (name, options), not {shown(repr(entry))}")
        if len(entries) > 1 and name in onnxruntime.get_all_providers() and _short(name) not in built_in and not _is_there(_short(name)):
            warn(f"providers=: this onnxruntime has no {name}: what stands behind it in the list runs in its place ({_offer(built_in)})")
            continue
        chosen.append((_short(name), dict(options)))
    known = {**dict.fromkeys(_PLUGINS), **dict.fromkeys(built_in)}
    for name, _ in chosen:
        if name not in known:
            raise ArgumentError(f"there is no execution provider {shown(name)}: {_offer(built_in)}")
    names = tuple(name for name, _ in chosen if name != "cpu")
    if all(name in built_in for name, _ in chosen):
        own = [(built_in[name], _options(name, options)) for name, options in chosen]
        return Choice([each if each[1] else each[0] for each in own], [], names)
    if beside := next((name for name, _ in chosen if name in built_in and built_in[name] != CPU), None):
        plugin = next(name for name, _ in chosen if name not in built_in)
        raise ArgumentError(
            f"providers={providers!r}: {plugin} is a plugin, beside which onnxruntime takes the CPU alone, not {beside}: name one"
        )
    return Choice(None, [_devices(name, options) for name, options in chosen if name not in built_in], names)


def is_cpu_alone(providers: Sequence[Any] | None) -> bool:
    """Whether a session of these providers has no other than onnxruntime's own for the CPU."""
    return all(_short(entry if isinstance(entry, str) else entry[0]) == "cpu" for entry in providers or ())


def precision_of(providers: Sequence[Any] | None) -> str | None:
    """The ``precision`` that is asked for, where it is another than float32."""
    wanted = [entry[1].get("precision") for entry in providers or () if isinstance(entry, tuple)]
    return next((str(each) for each in wanted if each not in (None, "float32")), None)


def said_of(providers: Sequence[Any]) -> str:
    """Providers as a person reads them: "openvino (precision=bfloat16)"."""
    pairs = [(entry, {}) if isinstance(entry, str) else entry for entry in providers]
    return ", ".join(
        name + (f" ({', '.join(f'{key}={value}' for key, value in options.items())})" if options else "") for name, options in pairs
    )


def add_devices(options: Any, choice: Choice) -> None:
    """Give session options the devices of a choice, once."""
    known = _added.setdefault(options, [])
    for devices, wanted in choice.devices:
        if (key := ([(each.ep_name, each.device.type) for each in devices], wanted)) not in known:
            options.add_provider_for_devices(devices, wanted)
            known.append(key)


def installed() -> tuple[dict[str, str], dict[str, str]]:
    """The plugins whose packages are installed: the devices of those that offer some here, and why the others offer none."""
    found, idle = {}, {}
    for name, plugin in _PLUGINS.items():
        if _is_there(name):
            try:
                found[name] = ", ".join(each.device.type.name for each in _of(name, plugin))
            except RunError as error:
                idle[name] = str(error)
    return found, idle


def _listed(providers: Any) -> list[Any]:
    if providers is None:
        return []
    if isinstance(providers, (str, tuple)) and (isinstance(providers, str) or (len(providers) == 2 and isinstance(providers[1], Mapping))):
        raise ArgumentError(f"providers= is a list: providers=[{providers!r}]")
    return list(providers)


def _is_there(plugin: str) -> bool:
    return plugin in _PLUGINS and importlib.util.find_spec(_PLUGINS[plugin].module) is not None


def _short(name: str) -> str:
    """openvino of OpenVINOExecutionProvider."""
    return name.removesuffix("ExecutionProvider").lower()


def _options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options as onnxruntime takes them: a precision is one by the provider's own name for it."""
    precision = options.pop("precision", None)
    plugin = _PLUGINS.get(name)
    if plugin is None or plugin.options is None:
        if precision is not None:
            raise ArgumentError(f"the execution provider {name} has no choice of precision=: leave it out")
        return options
    if precision is not None and precision not in ("float32", "bfloat16"):
        raise ArgumentError(f'precision={shown(str(precision))}: {name} has "float32" and "bfloat16"')
    return plugin.options(options, precision)


def _devices(name: str, options: dict[str, Any]) -> tuple[list[Any], dict[str, str]]:
    found = _of(name, _PLUGINS[name])
    kinds = [each.device.type.name.lower() for each in found]
    wanted = options.pop("device", None)
    if wanted is None:
        wanted = min(kinds, key=_DEVICES.index)
    if wanted not in kinds:
        raise ArgumentError(f"device={shown(str(wanted))}: {name} has {', '.join(dict.fromkeys(kinds))} on this machine")
    return [found[kinds.index(wanted)]], {key: str(value) for key, value in _options(name, options).items()}


def _of(name: str, plugin: _Plugin) -> list[Any]:
    """The devices of a plugin, whose library is registered once a process."""
    import onnxruntime

    if not hasattr(onnxruntime, "register_execution_provider_library"):
        raise RunError(f"onnxruntime {onnxruntime.__version__} has no plugins: install onnxruntime 1.22 or newer for {name}")
    with _registering:
        devices = [each for each in onnxruntime.get_ep_devices() if each.ep_name == plugin.provider]
        if devices:
            return devices
        try:
            module = importlib.import_module(plugin.module)
        except ImportError as error:
            raise RunError(f"the execution provider {name} needs a package: pip install {plugin.package} ({cause(error)})") from None
        try:
            onnxruntime.register_execution_provider_library(plugin.provider, getattr(module, plugin.library)())
            _registered.add(plugin.provider)
        except Exception as error:  # whatever its own code raises
            if "already registered" not in str(error):
                raise RunError(f"{plugin.package} is installed, but onnxruntime cannot load its library: {cause(error)}") from error
        devices = [each for each in onnxruntime.get_ep_devices() if each.ep_name == plugin.provider]
    if not devices:
        vendors = ", ".join(dict.fromkeys(each.device.vendor for each in onnxruntime.get_ep_devices())) or "unknown"
        why = f" (it needs a processor of {plugin.processor}, and this is of {vendors})" if plugin.processor else ""
        raise RunError(f"{plugin.package} is installed, but offers no device on this machine{why}: choose another provider")
    return devices


def _offer(built_in: Mapping[str, str]) -> str:
    more = [
        name if _is_there(name) else f"{name} (pip install {plugin.package})" for name, plugin in _PLUGINS.items() if name not in built_in
    ]
    return f"here are {', '.join(sorted(built_in))}; plugins are {', '.join(more)}"
