"""Environment variables: types, ranges, and suggestions for misspelled names."""

import pytest
from hfreduce import SettingError
from hfreduce.settings import NAMES, Settings


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
    assert (settings.transport, settings.determinism) == ("tcp", "stable,wide")
    assert (settings.streams, Settings.read({}).streams) == (8, None)
    assert (settings.priority, Settings.read({}).priority) == ("high", "normal")


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
        ("HFREDUCE_PRIORITY", "1"),
    ],
)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(SettingError, match=rf"{name}='{value}': expected"):
        Settings.read({name: value})


def test_an_unknown_name_suggests_the_nearest_one():
    with pytest.warns(UserWarning, match="did you mean HFREDUCE_KEY_FILE"):
        Settings.read({"HFREDUCE_KEYFILE": "x"})


def test_every_name_is_documented():
    assert all(name.startswith("HFREDUCE_") and text for name, text in NAMES.items())


def test_a_key_file_is_read_and_checked(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(b"k" * 32 + b"\n")
    assert Settings(key_file=str(file)).key() == b"k" * 32
    file.write_bytes(b"short")
    with pytest.raises(SettingError, match="16 to 4096 bytes, not 5"):
        Settings(key_file=str(file)).key()
    with pytest.raises(SettingError, match="absent"):
        Settings(key_file=str(tmp_path / "absent")).key()
