"""Tests of another module, to be run once more under other circumstances."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def tests_in(path: Path, names: Iterable[str] | None = None, without: Iterable[str] = ()) -> dict[str, Any]:
    """The tests of the module there; those of these names only, where names are given."""
    spec = importlib.util.spec_from_file_location(f"again_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {key: value for key, value in vars(module).items() if key.startswith("test_")}
    unknown = {*(names or ()), *without} - found.keys()
    assert not unknown, f"{path.name} has no {unknown}"
    wanted = found.keys() if names is None else set(names)
    return {key: value for key, value in found.items() if key in wanted and key not in without}
