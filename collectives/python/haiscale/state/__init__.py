"""State of a job by full name and global box: a checkpoint of any layout loads in any other.

    state, writer = TrainingState(model, optimizer, data=order), ThreeFSWriter(files)
    step = state.load(ThreeFSReader(files), "/ckpt/llama/step-40")
    state.save_async(writer, f"/ckpt/llama/step-{step}", step)

Files are those of `torch.distributed.checkpoint`; the project's writer and reader are in
`threefs.checkpoint.distributed`. `boxes` finds names and parts of a model's tensors, `optimizers`
those of states, `training` saves and loads, `contents` has a digest of a checkpoint.
"""

from haiscale.state.contents import digest
from haiscale.state.errors import StateMismatchError
from haiscale.state.training import TrainingState

__all__ = ["StateMismatchError", "TrainingState", "digest"]
