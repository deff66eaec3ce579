"""Environment variables: types, ranges, and suggestions for misspelled names."""

from pathlib import Path

import pytest
from hfreduce import SettingError
from hfreduce._native import Settings, settings_table


def test_defaults():
    settings = Settings.read({})
    assert (settings.liveness_seconds, settings.chunk_bytes, settings.key()) == (10.0, None, None)


def test_values_are_read():
    settings = Settings.read(
        {
            "HFREDUCE_LIVENESS_SECONDS": "0.5",
            "HFREDUCE_CHUNK_BYTES": "65536",
            "HFREDUCE_TRANSPORT": "tcp",
            "HFREDUCE_STREAMS": "8",
            "HFREDUCE_DETERMINISM": "wide, stable",
            "HFREDUCE_PRIORITY": "high",
            "FLYER_JOB": "a/b",
        }
    )
    assert (settings.liveness_seconds, settings.chunk_bytes, settings.job) == (0.5, 65536, "a/b")
    assert (settings.peer_memory, settings.determinism) == (False, "stable,wide")
    assert (settings.streams, Settings.read({}).streams) == (8, None)
    assert (settings.priority, Settings.read({}).priority) == ("high", "normal")


def test_values_that_are_not_utf8_are_refused_only_where_they_are_used():
    assert Settings.read({"FLYER_NOTE": "\udcff", "OTHER": "\udcff"}).job == ""
    with pytest.raises(SettingError, match="HFREDUCE_STREAMS"):
        Settings.read({"HFREDUCE_STREAMS": "\udcff"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HFREDUCE_LIVENESS_SECONDS", "soon"),
        ("HFREDUCE_LIVENESS_SECONDS", "-1"),
        ("HFREDUCE_LIVENESS_SECONDS", "inf"),
        ("HFREDUCE_CONNECT_SECONDS", "0"),
        ("HFREDUCE_CHUNK_BYTES", "100"),
        ("HFREDUCE_CHUNK_BYTES", "1e6"),
        ("HFREDUCE_TRANSPORT", "rdma"),
        ("HFREDUCE_STREAMS", "0"),
        ("HFREDUCE_STREAMS", "17"),
        ("HFREDUCE_STREAMS", "auto"),
        ("HFREDUCE_DETERMINISM", "stable,stable"),
        ("HFREDUCE_PRIORITY", "16"),
        ("HFREDUCE_ADDRESS", "10.0.0/8"),
        ("HFREDUCE_REGISTERED_BYTES", "much"),
        ("HFREDUCE_PINNED_BYTES", "1"),
        ("HFREDUCE_ISA", "avx3"),
    ],
)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(SettingError, match=rf"{name}='{value}': expected"):
        Settings.read({name: value})


def test_an_unknown_name_suggests_the_nearest_one():
    with pytest.warns(UserWarning, match="did you mean HFREDUCE_KEY_FILE"):
        Settings.read({"HFREDUCE_KEYFILE": "x"})


def test_the_page_has_the_table_of_settings():
    page = Path(__file__).parents[3] / "docs/concepts/collectives.md"
    assert settings_table() in page.read_text(encoding="utf-8")


def test_a_key_file_is_read_and_checked(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(b"k" * 32 + b"\n")
    assert Settings.read({"HFREDUCE_KEY_FILE": str(file)}).key() == b"k" * 32
    file.write_bytes(b"short")
    with pytest.raises(SettingError, match="16 to 4096 bytes, not 5"):
        Settings.read({"HFREDUCE_KEY_FILE": str(file)}).key()
    with pytest.raises(SettingError, match="absent"):
        Settings.read({"HFREDUCE_KEY_FILE": str(tmp_path / "absent")}).key()
