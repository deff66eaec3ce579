"""threefs.errors: processes, such as the ranks of a job, send them to each other."""

import errno
import pickle

import pytest
import threefs
from threefs import errors

KINDS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling(kind):
    error = kind("no room for 4 KiB", path="/run/a")
    error.add_note("shard 3")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "no room for 4 KiB"
    assert vars(copy) == vars(error)
    assert copy.args == error.args
    assert getattr(copy, "errno", None) == getattr(error, "errno", None)


def test_all_fields_of_an_error_survive_pickling():
    error = threefs.Unavailable("no reply", deadline_seconds=2.5, who="meta")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.deadline_seconds, copy.who, copy.errno) == (2.5, "meta", errno.ETIMEDOUT)
