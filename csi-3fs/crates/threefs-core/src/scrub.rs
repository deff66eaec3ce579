//! Scrub of a target: schedule and progress of its passes, their pace, and the comparison with the
//! predecessor. Pure; times are seconds since 1970, because progress outlives the process.
//!
//! A pass reads every committed chunk and verifies its checksums. A damaged chunk is repaired by the
//! replica (`replica::Event::DamageFound`), from another replica with the same version and the same
//! checksum. What no replica can provide stays in [`Progress::damaged`].

mod compare;
mod pace;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use serde::{Deserialize, Serialize};

pub use compare::{ChunkSummary, Difference, DifferenceKind, QueryStates, compare};
pub use pace::Pace;

use crate::ids::{ChunkId, StoreId};

/// Maximum number of damaged chunks that are recorded by name.
pub const DAMAGED_MAX: usize = 65_536;
/// Maximum number of damaged chunks in a [`ScrubStatus`].
pub const DAMAGED_LISTED_MAX: usize = 256;

/// Counts of one pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// When it started.
    pub started_unix_s: u64,
    /// When it ended; 0 while it runs.
    pub finished_unix_s: u64,
    /// Chunks that were read.
    pub chunks: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Damaged chunks.
    pub damaged: u64,
    /// Damaged chunks that were repaired.
    pub repaired: u64,
    /// Chunks that differed from the predecessor although both were intact.
    pub different: u64,
}

/// Start of a scrub, or query of its status. Answered by the service without the replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubRequest {
    /// Whether to start a pass, unless one is running.
    pub start: bool,
}

/// Status of the scrub of one target.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// The current pass.
    pub running: Option<Pass>,
    /// The last complete pass.
    pub last: Option<Pass>,
    /// Counts of all passes and of clients' reads since the store was created.
    pub total: Pass,
    /// When the next pass starts; `None` if scheduled passes are disabled.
    pub due_unix_s: Option<u64>,
    /// Bytes in use on the target.
    pub used_bytes: u64,
    /// Number of damaged chunks that are not repaired: a repair runs, or no replica could provide
    /// the content.
    pub damaged: u64,
    /// The first [`DAMAGED_LISTED_MAX`] of them.
    pub damaged_chunks: Vec<ChunkId>,
    /// Number of chunks that differ from the predecessor and that a sync must not replace.
    pub different: u64,
    /// The first [`DAMAGED_LISTED_MAX`] of them.
    pub different_chunks: Vec<ChunkId>,
}

/// A pass in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Running {
    pass: Pass,
    after: Option<ChunkId>,
}

/// Repair of a damaged chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Repair {
    /// The replica is fetching the content.
    Started,
    /// No other replica could provide the content.
    Failed,
}

/// Next step of a scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing to do for this number of seconds.
    Wait(u64),
    /// Verify the chunks after this one.
    Verify(Option<ChunkId>),
}

/// Persistent state of the scrub of one store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    store: StoreId,
    due_unix_s: u64,
    running: Option<Running>,
    last: Option<Pass>,
    total: Pass,
    damaged: Vec<(ChunkId, Repair)>,
    different: BTreeSet<ChunkId>,
    /// Index of `damaged`.
    #[serde(skip)]
    repairs: BTreeMap<ChunkId, Repair>,
}

impl Progress {
    /// State of a new store. The first pass starts within `interval_s`, at a time that depends on
    /// the store, so that stores created together are not scrubbed together.
    #[must_use]
    pub fn new(store: StoreId, now_unix_s: u64, interval_s: u64) -> Self {
        let spread = (store.0 % 4_096) as u64 * interval_s / 4_096;
        Self {
            store,
            due_unix_s: now_unix_s.saturating_add(spread),
            running: None,
            last: None,
            total: Pass::default(),
            damaged: Vec::new(),
            different: BTreeSet::new(),
            repairs: BTreeMap::new(),
        }
    }

    /// Continues from a recorded state; from a new one if the record is of another store.
    #[must_use]
    pub fn restore(record: Option<Self>, store: StoreId, now_unix_s: u64, interval_s: u64) -> Self {
        let Some(mut record) = record.filter(|record| record.store == store) else {
            return Self::new(store, now_unix_s, interval_s);
        };
        // An interrupted repair is repeated when the chunk is verified again.
        let damaged = record.damaged.drain(..).take(DAMAGED_MAX);
        record.repairs = damaged.map(|(chunk, _)| (chunk, Repair::Failed)).collect();
        record
    }

    /// The state to record.
    #[must_use]
    pub fn record(&self) -> Self {
        let damaged = self.repairs.iter().map(|(chunk, repair)| (*chunk, *repair)).collect();
        Self { damaged, repairs: BTreeMap::new(), ..self.clone() }
    }

    /// The next step; starts a pass that is due. `interval_s` is 0 if only requested passes run.
    pub fn step(&mut self, now_unix_s: u64, interval_s: u64) -> Step {
        if let Some(running) = self.running {
            return Step::Verify(running.after);
        }
        if interval_s == 0 {
            return Step::Wait(u64::MAX);
        }
        // After a clock was set back, or with a shorter interval than before.
        self.due_unix_s = self.due_unix_s.min(now_unix_s.saturating_add(interval_s));
        if now_unix_s < self.due_unix_s {
            return Step::Wait(self.due_unix_s - now_unix_s);
        }
        self.start(now_unix_s);
        Step::Verify(None)
    }

    /// Starts a pass, unless one is running.
    pub fn start(&mut self, now_unix_s: u64) {
        if self.running.is_none() {
            let pass = Pass { started_unix_s: now_unix_s, ..Pass::default() };
            self.running = Some(Running { pass, after: None });
        }
    }

    /// A chunk was verified, or is not there any more.
    pub fn verified(&mut self, chunk: ChunkId, bytes: u64) {
        self.repairs.remove(&chunk);
        self.count(|pass| (pass.chunks, pass.bytes) = (pass.chunks + 1, pass.bytes + bytes));
    }

    /// The pass has passed `chunk`.
    pub fn advance(&mut self, chunk: ChunkId) {
        if let Some(running) = &mut self.running {
            running.after = running.after.max(Some(chunk));
        }
    }

    /// The pass is complete.
    pub fn finish(&mut self, now_unix_s: u64, interval_s: u64) {
        let Some(running) = self.running.take() else { return };
        let mut pass = running.pass;
        pass.finished_unix_s = now_unix_s.max(pass.started_unix_s);
        self.due_unix_s = pass.started_unix_s.saturating_add(interval_s).max(now_unix_s);
        self.last = Some(pass);
    }

    /// A read of the chunk has detected damage. False if there are too many to record it.
    pub fn damage_detected(&mut self, chunk: ChunkId) -> bool {
        if self.repairs.len() >= DAMAGED_MAX && !self.repairs.contains_key(&chunk) {
            return false;
        }
        if self.repairs.insert(chunk, Repair::Started).is_none() {
            self.count(|pass| pass.damaged += 1);
        }
        true
    }

    /// The replica has restored the chunk.
    pub fn repaired(&mut self, chunk: ChunkId) {
        if self.repairs.remove(&chunk).is_some() {
            self.count(|pass| pass.repaired += 1);
        }
    }

    /// No replica could provide the chunk.
    pub fn not_repaired(&mut self, chunk: ChunkId) {
        if let Some(repair) = self.repairs.get_mut(&chunk) {
            *repair = Repair::Failed;
        }
    }

    /// The repair of a damaged chunk; `None` if the chunk is intact.
    #[must_use]
    pub fn repair_of(&self, chunk: ChunkId) -> Option<Repair> {
        self.repairs.get(&chunk).copied()
    }

    /// Damaged chunks greater than `after` and up to `last`, at most `limit`.
    #[must_use]
    pub fn damaged(&self, after: Option<ChunkId>, last: ChunkId, limit: usize) -> Vec<ChunkId> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let chunks = self.repairs.range((after, Bound::Unbounded)).map(|(chunk, _)| *chunk);
        chunks.take_while(|chunk| *chunk <= last).take(limit).collect()
    }

    /// A range of chunks, after `after` up to `last`, was compared: only the `suspects` differ.
    pub fn compared(&mut self, after: Option<ChunkId>, last: ChunkId, suspects: &[ChunkId]) {
        self.different
            .retain(|chunk| Some(*chunk) <= after || *chunk > last || suspects.contains(chunk));
    }

    /// A difference is confirmed. It is reported until a later comparison if a sync must not
    /// replace the chunk.
    pub fn differs(&mut self, chunk: ChunkId, kind: DifferenceKind) {
        if kind == DifferenceKind::Newer && self.different.len() < DAMAGED_MAX {
            self.different.insert(chunk);
        }
        self.count(|pass| pass.different += 1);
    }

    /// Status for callers.
    #[must_use]
    pub fn status(&self, used_bytes: u64, interval_s: u64) -> ScrubStatus {
        ScrubStatus {
            running: self.running.map(|running| running.pass),
            last: self.last,
            total: self.total,
            due_unix_s: (interval_s > 0).then_some(self.due_unix_s),
            used_bytes,
            damaged: self.repairs.len() as u64,
            damaged_chunks: self.damaged(None, ChunkId::MAX, DAMAGED_LISTED_MAX),
            different: self.different.len() as u64,
            different_chunks: self.different.iter().take(DAMAGED_LISTED_MAX).copied().collect(),
        }
    }

    fn count(&mut self, change: impl Fn(&mut Pass)) {
        change(&mut self.total);
        if let Some(running) = &mut self.running {
            change(&mut running.pass);
        }
    }
}

#[cfg(test)]
#[path = "scrub_test.rs"]
mod tests;
