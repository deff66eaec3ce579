//! Scrub of the targets of a node: reads every committed chunk, has damaged ones repaired, and
//! compares the replica with its predecessor.
//!
//! Each target has one task. The targets of a node take turns, one read at a time, so the rate is
//! that of the node. Nothing waits for a scrub: its reads run on the threads of the target, and the
//! pauses between them are longer while clients use the node (`threefs_core::scrub::Pace`).
//!
//! | module | content |
//! |---|---|
//! | `verify` | reads of one chunk, and the repair of a damaged one |
//! | `compare` | comparison with the predecessor |

mod compare;
mod verify;

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use threefs_core::chunk::ChunkMeta;
use threefs_core::ids::ChunkId;
use threefs_core::scrub::{Pace, Step};
use tokio::sync::oneshot;

use crate::scrub::{Scrub, unix_now_s};
use crate::target::Target;
use compare::Suspects;
use verify::Chunk;

/// Chunks between two records of the progress, and in one comparison.
const PAGE: usize = 64;
/// Interval in which the progress is recorded.
const RECORD_INTERVAL: Duration = Duration::from_secs(30);
/// Interval in which damaged chunks are read again between passes: another replica may have
/// returned.
const RECHECK_INTERVAL: Duration = Duration::from_secs(600);
/// Damaged chunks that are read again each time.
const RECHECK_CHUNKS: usize = 16;
/// Time between the two comparisons of a chunk that differs.
const CONFIRM_AFTER: Duration = Duration::from_secs(60);
/// Pause while the target does not serve.
const NOT_SERVING_PAUSE: Duration = Duration::from_secs(1);

/// Limits of a node's scrubs.
pub(crate) struct Limits {
    pace: Pace,
    /// The target whose turn it is holds this; the number of requests at the end of the last turn.
    turn: tokio::sync::Mutex<u64>,
    /// Time between the two comparisons of a chunk that differs.
    confirm_after: Duration,
}

impl Limits {
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        let (pace, turn) = (Pace { bytes_per_second }, tokio::sync::Mutex::default());
        Self { pace, turn, confirm_after: CONFIRM_AFTER }
    }
}

/// Task of one target.
struct Scrubber {
    target: Weak<Target>,
    scrub: Arc<Scrub>,
    limits: Arc<Limits>,
    suspects: Suspects,
    recorded: tokio::time::Instant,
}

/// The target was dropped or its store has failed: the task ends.
struct Ended;

/// Scrubs a target for its lifetime.
pub(crate) async fn run(target: Weak<Target>, scrub: Arc<Scrub>, limits: Arc<Limits>) {
    let suspects = Suspects::default();
    let recorded = tokio::time::Instant::now();
    let mut scrubber = Scrubber { target, scrub, limits, suspects, recorded };
    while scrubber.step().await.is_ok() {}
}

impl Scrubber {
    async fn step(&mut self) -> Result<(), Ended> {
        match self.scrub.step() {
            _ if !self.target()?.is_up_to_date() => {
                tokio::time::sleep(NOT_SERVING_PAUSE).await;
                Ok(())
            }
            Step::Wait(seconds) => {
                let pause = Duration::from_secs(seconds).min(RECHECK_INTERVAL);
                let requested =
                    tokio::time::timeout(pause, self.scrub.requested.notified()).await.is_ok();
                if requested || pause < RECHECK_INTERVAL { Ok(()) } else { self.recheck().await }
            }
            Step::Verify(after) => self.verify_page(after).await,
        }
    }

    /// Verifies the next chunks of the pass.
    async fn verify_page(&mut self, after: Option<ChunkId>) -> Result<(), Ended> {
        let metas = self.metas(after, ChunkId::MAX, PAGE).await?;
        let is_last = metas.len() < PAGE;
        let last = metas.last().map(|meta| meta.chunk);
        let end = last.filter(|_| !is_last).unwrap_or(ChunkId::MAX);
        let existing = metas.iter().filter(|meta| meta.committed.exists());
        let mut chunks: BTreeSet<ChunkId> = existing.map(|meta| meta.chunk).collect();
        // Recorded chunks that are gone since are read as well, which ends their report.
        chunks.extend(self.scrub.progress().damaged(after, end, usize::MAX));
        for chunk in chunks {
            self.verify_chunk(chunk).await?;
        }
        self.compare(after, end).await?;
        if let Some(last) = last {
            self.scrub.progress().advance(last);
        }
        if is_last {
            self.confirm_all().await?;
            self.finish().await;
        } else if self.recorded.elapsed() >= RECORD_INTERVAL {
            self.scrub.record().await;
            self.recorded = tokio::time::Instant::now();
        }
        Ok(())
    }

    /// Ends the pass. The record is written first: what callers have seen is known after a crash.
    async fn finish(&self) {
        let now = unix_now_s();
        let mut finished = self.scrub.progress().record();
        finished.finish(now, self.scrub.interval_s);
        self.scrub.write(finished).await;
        let status = {
            let mut progress = self.scrub.progress();
            progress.finish(now, self.scrub.interval_s);
            progress.status(0, self.scrub.interval_s)
        };
        if let (Some(pass), Ok(target)) = (status.last, self.target()) {
            tracing::info!(
                target = %target.id(),
                chunks = pass.chunks,
                bytes = pass.bytes,
                damaged = pass.damaged,
                repaired = pass.repaired,
                different = pass.different,
                not_repaired = status.damaged,
                "scrub completed"
            );
        }
    }

    /// Verifies one chunk and has it repaired if it is damaged.
    async fn verify_chunk(&mut self, chunk: ChunkId) -> Result<(), Ended> {
        match self.read_chunk(chunk).await? {
            Chunk::Intact { bytes } => self.scrub.progress().verified(chunk, bytes),
            Chunk::Damaged => self.repair(chunk).await?,
        }
        Ok(())
    }

    /// Reads damaged chunks again.
    async fn recheck(&mut self) -> Result<(), Ended> {
        let mut after = None;
        loop {
            let chunks = self.scrub.progress().damaged(after, ChunkId::MAX, RECHECK_CHUNKS);
            let Some(last) = chunks.last().copied() else { break };
            for chunk in chunks {
                self.verify_chunk(chunk).await?;
            }
            after = Some(last);
        }
        if after.is_some() {
            self.scrub.record().await;
        }
        Ok(())
    }

    /// Chunks of the store.
    async fn metas(
        &self,
        after: Option<ChunkId>,
        last: ChunkId,
        limit: usize,
    ) -> Result<Vec<ChunkMeta>, Ended> {
        self.on_worker(move |target| target.store.metas(after, last, limit)).await
    }

    /// Runs a store operation on a thread of the target.
    async fn on_worker<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&Target) -> T + Send + 'static,
    ) -> Result<T, Ended> {
        let target = self.target()?;
        let (sender, reply) = oneshot::channel();
        let worker = Arc::clone(&target);
        target.workers.run(move || {
            let _ = sender.send(operation(&worker));
        });
        drop(target);
        reply.await.map_err(|_| Ended)
    }

    fn target(&self) -> Result<Arc<Target>, Ended> {
        let target = self.target.upgrade().ok_or(Ended)?;
        if target.has_failed() { Err(Ended) } else { Ok(target) }
    }
}

#[cfg(test)]
#[path = "scrubber_test.rs"]
mod tests;
