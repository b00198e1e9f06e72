"""What C and Python must agree on."""

from __future__ import annotations

import re

from exporter.runtime.kernel_plans import KernelPlan
from tests.processes import ROOT


def test_the_plan_is_read_in_its_order():
    source = (ROOT / "exporter/runtime/native/kernels.c").read_text()
    (enum,) = re.findall(r"enum \{([^}]*PLAN_[^}]*)\}", source)
    assert tuple(name.strip().removeprefix("PLAN_").lower() for name in enum.split(",")) == KernelPlan._fields
    read = set(re.findall(r"PLAN_(\w+)", source.replace(enum, "")))
    assert {name.upper() for name in KernelPlan._fields} - read == set(), "a field that make_kernel() does not read"
