"""CRC32C from Python."""

import numpy as np
import threefs


def test_the_known_vector_and_continuation() -> None:
    assert threefs.crc32c(b"123456789") == 0xE3069283
    assert threefs.crc32c(b"6789", threefs.crc32c(b"12345")) == 0xE3069283
    assert threefs.crc32c(b"") == 0
    assert threefs.crc32c(np.frombuffer(b"123456789", dtype=np.uint8)) == 0xE3069283
