//! Punching holes: bytes of a file become zeros and give their space back.
//!
//! A chunk that was written stays in existence, if only with one byte: so a chunk that must exist
//! and does not is always lost data (`absent`). Chunks change as by writes, in their chain's order.

use std::sync::Arc;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_core::chunk::ContentChange;
use threefs_core::layout::ChunkSpan;
use tokio::task::JoinSet;

use crate::Client;
use crate::batch::joined;
use crate::chunks::What;
use crate::error::ClientError;
use crate::files::FileHandle;
use crate::ranges::place;

/// Chunks that are punched at once.
const UPDATES_IN_FLIGHT_MAX: usize = 16;

/// How a part of a chunk becomes zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Punch {
    /// Nothing is there.
    Leave,
    /// Zeros are written.
    Zeros { offset: u32, length: u32 },
    /// The chunk ends here, and reads as zeros from there on.
    End { length: u32 },
    /// All but one zero byte goes.
    Empty,
}

/// `stored`: the chunk's length. What lies behind the part must stay, whoever writes it meanwhile,
/// so the chunk is cut only if the part goes to the end of what a chunk can hold.
fn punch(offset: u32, length: u32, stored: u32, chunk_bytes: u32) -> Punch {
    let end = offset + length;
    match (offset, end) {
        _ if offset >= stored => Punch::Leave,
        (0, end) if end >= chunk_bytes => Punch::Empty,
        (_, end) if end >= chunk_bytes => Punch::End { length: offset },
        _ => Punch::Zeros { offset, length: end.min(stored) - offset },
    }
}

impl Client {
    /// Makes the bytes from `offset` on and before `end` zeros. `end` is at most the file's length.
    ///
    /// # Errors
    /// Any [`ClientError`]; any part may then be zeros, and it may be done again.
    pub async fn punch_hole(
        &self,
        file: &FileHandle,
        offset: u64,
        end: u64,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let what: What = Arc::from(format!("punch a hole in `{}`", file.path));
        let Some(length) = end.checked_sub(offset).filter(|length| *length > 0) else {
            return Ok(());
        };
        let chains = self.chains(&what, &file.layout, deadline).await?;
        let spans = file.layout.spans(offset, length)?;
        let mut tasks: JoinSet<Result<(), ClientError>> = JoinSet::new();
        let mut outcome = Ok(());
        for span in spans {
            if tasks.len() >= UPDATES_IN_FLIGHT_MAX
                && let Some(ended) = tasks.join_next().await
            {
                outcome = outcome.and(joined(ended));
            }
            if outcome.is_err() {
                break;
            }
            let (client, what, at) =
                (self.clone(), Arc::clone(&what), place(file, &chains, span.index));
            tasks.spawn(async move { client.punch_chunk(&what, at, span, deadline).await });
        }
        // All of them: a copy of one that is dropped could come after what is written next.
        while let Some(ended) = tasks.join_next().await {
            outcome = outcome.and(joined(ended));
        }
        outcome
    }

    async fn punch_chunk(
        &self,
        what: &What,
        place: crate::chunks::Place,
        span: ChunkSpan,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let Some(stored) = self.stored_length(what, place, deadline).await? else { return Ok(()) };
        let zeros = |length: u32| Bytes::from(vec![0; length as usize]);
        let (change, payload) = match punch(span.offset, span.length, stored, place.chunk_bytes) {
            Punch::Leave => return Ok(()),
            Punch::Zeros { offset, length } => (ContentChange::Write { offset }, zeros(length)),
            Punch::End { length } => (ContentChange::Truncate { length }, Bytes::new()),
            Punch::Empty => (ContentChange::Replace, zeros(1)),
        };
        self.update(what, place, change, payload, deadline).await.map(drop)
    }

    /// The length of a chunk, if it exists.
    async fn stored_length(
        &self,
        what: &What,
        place: crate::chunks::Place,
        deadline: Deadline,
    ) -> Result<Option<u32>, ClientError> {
        let after = place.chunk.index.checked_sub(1);
        let (chain, inode) = (place.chain, place.chunk.inode);
        let (chunks, _) = self.first_chunks_after(what, chain, inode, after, 1, deadline).await?;
        let found = chunks.first().filter(|chunk| chunk.index == place.chunk.index);
        Ok(found.map(|chunk| chunk.length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_chunk_becomes_zeros_and_what_lies_behind_it_stays() {
        assert_eq!(punch(0, 100, 0, 100), Punch::Leave);
        assert_eq!(punch(50, 50, 50, 100), Punch::Leave);
        assert_eq!(punch(0, 100, 100, 100), Punch::Empty);
        assert_eq!(punch(0, 100, 7, 100), Punch::Empty);
        assert_eq!(punch(40, 60, 100, 100), Punch::End { length: 40 });
        assert_eq!(punch(40, 20, 100, 100), Punch::Zeros { offset: 40, length: 20 });
        // A writer may make the chunk longer meanwhile, so it is not cut.
        assert_eq!(punch(40, 20, 50, 100), Punch::Zeros { offset: 40, length: 10 });
        assert_eq!(punch(0, 60, 50, 100), Punch::Zeros { offset: 0, length: 50 });
    }
}
