//! Reads of one chunk, and the repair of a damaged one.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use threefs_chunkstore::Verified;
use threefs_core::error::StoreError;
use threefs_core::ids::ChunkId;
use threefs_core::replica::Event;
use threefs_core::scrub::Repair;

use super::{Ended, Scrubber};

/// Bytes of one read. A chunk may be replaced between two reads; each verifies what is current.
const READ_BYTES: u32 = 1 << 20;
/// A read that takes longer gives the turn to another target.
const TURN_MAX: Duration = Duration::from_secs(10);
/// Maximum wait for a repair.
const REPAIR_TIMEOUT: Duration = Duration::from_secs(60);

/// Result of the verification of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    /// All bytes match their checksums, or the chunk was removed.
    Intact { bytes: u64 },
    /// Bytes do not match their checksums, or cannot be read.
    Damaged,
}

impl Scrubber {
    /// Reads a whole chunk.
    pub(super) async fn read_chunk(&self, chunk: ChunkId) -> Result<Chunk, Ended> {
        let (mut offset, mut bytes) = (0_u32, 0_u64);
        loop {
            match self.read(chunk, offset).await? {
                Ok(verified) => {
                    bytes += u64::from(verified.bytes);
                    offset = offset.saturating_add(READ_BYTES);
                    if offset >= verified.chunk_length {
                        return Ok(Chunk::Intact { bytes });
                    }
                }
                Err(StoreError::NotFound { .. }) => return Ok(Chunk::Intact { bytes }),
                Err(error) => {
                    tracing::warn!("scrub: {chunk}: {error}");
                    return Ok(Chunk::Damaged);
                }
            }
        }
    }

    /// Reads one part of a chunk when it is this target's turn, then pauses.
    async fn read(
        &self,
        chunk: ChunkId,
        offset: u32,
    ) -> Result<Result<Verified, StoreError>, Ended> {
        let mut requests_before = self.limits.turn.lock().await;
        let started = Instant::now();
        let read = self.on_worker(move |target| target.store.verify(chunk, offset, READ_BYTES));
        tokio::pin!(read);
        let Ok(result) = tokio::time::timeout(TURN_MAX, &mut read).await else {
            drop(requests_before);
            return read.await;
        };
        let result = result?;
        let duration = started.elapsed();
        let requests = self.target()?.context.requests.load(Relaxed);
        let busy = std::mem::replace(&mut *requests_before, requests) != requests;
        let bytes = result.as_ref().map_or(0, |verified| u64::from(verified.bytes));
        tokio::time::sleep(self.limits.pace.pause(bytes, duration, busy)).await;
        Ok(result)
    }

    /// Has the replica restore a damaged chunk, and waits for the result.
    pub(super) async fn repair(&self, chunk: ChunkId) -> Result<(), Ended> {
        let mut repairs = self.scrub.repairs.subscribe();
        let recorded = self.scrub.progress().damage_detected(chunk);
        self.target()?.handle(Event::DamageFound { chunk });
        if !recorded {
            tracing::error!("scrub: {chunk} is damaged, and too many others are to record it");
            return Ok(());
        }
        let result = async {
            while self.scrub.progress().repair_of(chunk) == Some(Repair::Started) {
                if repairs.changed().await.is_err() {
                    return;
                }
            }
        };
        if tokio::time::timeout(REPAIR_TIMEOUT, result).await.is_err() {
            // The replica does not serve, or its queue is full.
            self.scrub.progress().not_repaired(chunk);
        }
        Ok(())
    }
}
