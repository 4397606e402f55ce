"""SGLang and its dependencies can be installed with the versions in `constraints-sglang.txt`."""

import importlib.util
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (scripts/setup_sglang_cpu.sh)", allow_module_level=True)

PINNED = Path(__file__).parents[2] / "constraints-sglang.txt"


def test_no_pin_contradicts_what_another_package_asks_for():
    """SGLang is installed without its dependencies here, so pip would not notice."""
    lines, asked = PINNED.read_text().splitlines(), []
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, version in pairs}
    assert pinned["sglang"] == distribution("sglang").version
    for package in distributions():
        if pinned.get(canonicalize_name(package.name)) == package.version:
            asked += [(package.name, Requirement(each)) for each in package.requires or []]
    assert len(asked) > 100
    for name, wanted in asked:
        version = pinned.get(canonicalize_name(wanted.name))
        if version and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            assert wanted.specifier.contains(version, prereleases=True), f"{name} wants {wanted}, pinned is {version}"
