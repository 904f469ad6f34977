"""Tests of another module, to be run once more under other circumstances."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def loaded_from(path: Path, without: Iterable[str] = ()) -> dict[str, Any]:
    """The tests of the module there, but those of these names."""
    spec = importlib.util.spec_from_file_location(f"again_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {key: value for key, value in vars(module).items() if key.startswith("test_")}
    assert found.keys() >= set(without), f"{path.name} has no {set(without) - found.keys()}"
    return {key: value for key, value in found.items() if key not in without}
