"""Storage of `torch.distributed.checkpoint` (DCP) on 3FS, or on a plain directory.

`ThreeFSWriter` and `ThreeFSReader` are passed to DCP's `save`, `async_save` and `load`. Only this
package imports torch.
"""

from threefs.checkpoint.distributed.folder import latest_checkpoint
from threefs.checkpoint.distributed.reader import ThreeFSReader
from threefs.checkpoint.distributed.writer import ThreeFSWriter

__all__ = ["ThreeFSReader", "ThreeFSWriter", "latest_checkpoint"]
