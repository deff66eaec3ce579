//! Hole punching: zeroes a range of a file and frees its space.
//!
//! A written chunk continues to exist, if only with one byte, so a chunk that must exist and does
//! not is always lost data (`absent`). Chunks are changed by updates in the chain's order, like
//! writes.

use std::sync::Arc;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_core::chunk::ContentChange;
use tokio::task::JoinSet;

use crate::Client;
use crate::error::{ClientError, OperationName};
use crate::files::FileHandle;
use crate::routing::{ChunkLocation, ChunkRange};
use crate::window::task_result;

/// Maximum number of chunks punched concurrently.
const UPDATES_IN_FLIGHT_MAX: usize = 16;

/// How a part of a chunk is zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Punch {
    /// The part is beyond the stored data.
    Leave,
    /// Write zeros.
    Zeros { offset: u32, length: u32 },
    /// Truncate the chunk; it reads as zeros behind its end.
    End { length: u32 },
    /// Replace the chunk by one zero byte.
    Empty,
}

/// `stored_bytes`: the chunk's length. Data behind the part must be kept, even if written
/// concurrently, so the chunk is truncated only if the part extends to the maximum chunk size.
fn punch(offset: u32, length: u32, stored_bytes: u32, chunk_bytes: u32) -> Punch {
    let end = offset + length;
    match (offset, end) {
        _ if offset >= stored_bytes => Punch::Leave,
        (0, end) if end >= chunk_bytes => Punch::Empty,
        (_, end) if end >= chunk_bytes => Punch::End { length: offset },
        _ => Punch::Zeros { offset, length: end.min(stored_bytes) - offset },
    }
}

impl Client {
    /// Zeroes the bytes `offset .. end`. `end` is at most the file's length.
    ///
    /// # Errors
    /// Any [`ClientError`]; any part may then be zeroed, and the call may be retried.
    pub async fn punch_hole(
        &self,
        file: &FileHandle,
        offset: u64,
        end: u64,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        file.check_writable()?;
        let what: OperationName = Arc::from(format!("punch a hole in `{}`", file.path));
        let Some(length) = end.checked_sub(offset).filter(|length| *length > 0) else {
            return Ok(());
        };
        let ranges = self.locate(&what, file, offset, length, deadline).await?;
        let mut tasks: JoinSet<Result<(), ClientError>> = JoinSet::new();
        let mut outcome = Ok(());
        for range in ranges {
            if tasks.len() >= UPDATES_IN_FLIGHT_MAX
                && let Some(finished) = tasks.join_next().await
            {
                outcome = outcome.and(task_result(finished));
            }
            if outcome.is_err() {
                break;
            }
            let (client, what) = (self.clone(), Arc::clone(&what));
            tasks.spawn(async move { client.punch_chunk(&what, range, deadline).await });
        }
        // Await all of them: a late copy of a dropped one could follow a later write.
        while let Some(finished) = tasks.join_next().await {
            outcome = outcome.and(task_result(finished));
        }
        outcome
    }

    async fn punch_chunk(
        &self,
        what: &OperationName,
        ChunkRange { location, offset, length }: ChunkRange,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let Some(stored_bytes) = self.stored_length(what, location, deadline).await? else {
            return Ok(());
        };
        let zeros = |length: u32| Bytes::from(vec![0; length as usize]);
        let (change, payload) = match punch(offset, length, stored_bytes, location.chunk_bytes) {
            Punch::Leave => return Ok(()),
            Punch::Zeros { offset, length } => (ContentChange::Write { offset }, zeros(length)),
            Punch::End { length } => (ContentChange::Truncate { length }, Bytes::new()),
            Punch::Empty => (ContentChange::Replace, zeros(1)),
        };
        self.update(what, location, change, payload, deadline).await.map(drop)
    }

    /// The length of a chunk, if it exists.
    async fn stored_length(
        &self,
        what: &OperationName,
        location: ChunkLocation,
        deadline: Deadline,
    ) -> Result<Option<u32>, ClientError> {
        let after = location.chunk.index.checked_sub(1);
        let (chain, inode) = (location.chain, location.chunk.inode);
        let (chunks, _) = self.first_chunks_after(what, chain, inode, after, 1, deadline).await?;
        let chunk = chunks.first().filter(|chunk| chunk.index == location.chunk.index);
        Ok(chunk.map(|chunk| chunk.length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_chunk_is_zeroed_and_data_behind_it_is_kept() {
        assert_eq!(punch(0, 100, 0, 100), Punch::Leave);
        assert_eq!(punch(50, 50, 50, 100), Punch::Leave);
        assert_eq!(punch(0, 100, 100, 100), Punch::Empty);
        assert_eq!(punch(0, 100, 7, 100), Punch::Empty);
        assert_eq!(punch(40, 60, 100, 100), Punch::End { length: 40 });
        assert_eq!(punch(40, 20, 100, 100), Punch::Zeros { offset: 40, length: 20 });
        // A writer may extend the chunk concurrently, so it is not truncated.
        assert_eq!(punch(40, 20, 50, 100), Punch::Zeros { offset: 40, length: 10 });
        assert_eq!(punch(0, 60, 50, 100), Punch::Zeros { offset: 0, length: 50 });
    }
}
