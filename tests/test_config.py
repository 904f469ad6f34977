"""Environment variables: their values, and how wrong ones are refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from mpdist.config import NO_SETTINGS, Config, unknown_variables, variable
from mpdist.errors import UsageError


def test_nothing_set_gives_the_defaults() -> None:
    assert Config.read({}) == Config()
    assert Config.read({"MPDIST_UNKNOWN": "x"}) == Config()
    assert variable("ranks_per_node") == "MPDIST_RANKS_PER_NODE"


def test_misspelt_variable_is_told_with_the_nearest() -> None:
    (line,) = unknown_variables({"MPDIST_TIMOUT": "5", "MPDIST_DEBUG": "1", "HOME": "/"})
    assert line == "environment variable MPDIST_TIMOUT is not known and does nothing: did you mean MPDIST_TIMEOUT?"
    (line,) = unknown_variables({"MPDIST_XYZZY": ""})
    assert "there are MPDIST_TIMEOUT, MPDIST_REPORT_AFTER" in line


def test_variables_that_are_no_settings_are_not_taken_for_misspelt_ones() -> None:
    settings = {variable(field.name): "" for field in fields(Config)}
    assert unknown_variables(settings | {f"MPDIST_{name}": "" for name in NO_SETTINGS}) == []


def test_what_steers_the_algorithms_is_read(tmp_path: Path) -> None:
    config = Config.read(
        {
            "MPDIST_ALGORITHM": "hierarchical",
            "MPDIST_TUNING": "/some/where.json",
            "MPDIST_SHARED_MEMORY": "off",
            "MPDIST_SHARED_MEMORY_DIR": str(tmp_path),
            "MPDIST_RANKS_PER_NODE": "3",
        }
    )
    assert config.algorithm == "hierarchical"
    assert config.tuning == "/some/where.json"
    assert config.shared_memory is False
    assert config.shared_memory_dir == str(tmp_path)
    assert config.ranks_per_node == 3


@pytest.mark.parametrize(
    ("value", "word"),
    [
        *(("auto", "auto"), ("Probe", "probe"), ("0", "no"), ("off", "no"), ("", "no"), ("1", "yes"), ("TRUE", "yes")),
        *(("send", "send"), ("recv, Broadcast", "recv,broadcast")),
    ],
)
def test_what_mpi_gets_of_a_gpu_is_one_word_or_operations(value: str, word: str) -> None:
    assert Config.read({"MPDIST_CUDA_AWARE": value}).cuda_aware == word


@pytest.mark.parametrize("name", ["auto", "native", "shared", "hierarchical"])
def test_every_algorithm_is_taken(name: str) -> None:
    assert Config.read({"MPDIST_ALGORITHM": name}).algorithm == name


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("MPDIST_ALGORITHM", "fast", "one of auto, native, shared, hierarchical"),
        ("MPDIST_ALGORITHM", "", "one of auto, native, shared, hierarchical"),
        ("MPDIST_ALGORITHM", "Shared", "one of auto, native, shared, hierarchical"),
        ("MPDIST_SHARED_MEMORY", "maybe", "0, 1, true, false, yes, no, on or off"),
        ("MPDIST_RANKS_PER_NODE", "-1", "a whole number >= 0"),
        ("MPDIST_RANKS_PER_NODE", "two", "a whole number >= 0"),
        ("MPDIST_RANKS_PER_NODE", "1.5", "a whole number >= 0"),
        ("MPDIST_SHARED_MEMORY_DIR", "/nowhere/at/all", "a folder that exists"),
        ("MPDIST_CUDA_AWARE", "sometimes", "auto, 0, 1, probe, or operations with commas between: send, recv"),
        ("MPDIST_CUDA_AWARE", "send,probe", "auto, 0, 1, probe, or operations"),
        ("MPDIST_TIMEOUT", "inf", "a number of seconds >= 0"),
        ("MPDIST_TIMEOUT", "nan", "a number of seconds >= 0"),
    ],
)
def test_a_wrong_value_is_refused_with_the_valid_ones(name: str, value: str, valid: str) -> None:
    with pytest.raises(UsageError, match=rf"{name}='{value}' is not valid: it must be .*{valid}"):
        Config.read({name: value})
