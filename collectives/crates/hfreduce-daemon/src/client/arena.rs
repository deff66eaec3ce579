//! Reception of the arena, in which a rank stages buffers for its daemon.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use fabric::arena::Arena;
use fabric::deadline::Deadline;
use fabric::shm::{self, Segment};

/// Why the arena is not available.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error("{0}")]
    None(io::Error),
    #[error("it sent no descriptor")]
    Missing,
    #[error("mapping its {bytes} bytes of shared memory: {error}")]
    Map { bytes: usize, error: io::Error },
}

/// Receives the arena from the daemon, over a blocking socket.
pub(crate) fn receive_arena(
    stream: &UnixStream,
    deadline: Deadline,
) -> Result<Arc<Arena>, MemoryError> {
    let mut size = [0; 8];
    let fds = shm::receive_descriptors(stream, &mut size, deadline).map_err(MemoryError::None)?;
    let bytes = usize::try_from(u64::from_le_bytes(size)).unwrap_or(usize::MAX);
    let fd = fds.into_iter().next().ok_or(MemoryError::Missing)?;
    let segment = Segment::open(fd, bytes).map_err(|error| MemoryError::Map { bytes, error })?;
    Ok(Arc::new(Arena::of(segment)))
}
