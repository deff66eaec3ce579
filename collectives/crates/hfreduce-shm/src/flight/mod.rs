//! Flight recorder: the last operations of a rank, in memory that outlives its process.
//!
//! ```text
//! page 0    identity, last heartbeat, what the rank waits for, why the communicator broke
//! page 1    state of the neighbors
//! then      the last RECORDS operations, 128 bytes each, the oldest overwritten first
//! ```
//! The recorder is always on. Writing takes a few relaxed stores into one or two cache lines: no
//! lock, no allocation, no system call and no additional clock reading. Other processes read while
//! the rank writes (`read`): data longer than eight bytes has a stamp that is odd while it changes,
//! and is read twice (`seqlock`). Payload bytes are not recorded, and the recorder never waits.

mod dump;
mod host;
mod read;
mod seqlock;
mod storage;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

pub use read::{Entry, Peer, ReadError, Snapshot, Waiting, read_file};
pub use storage::Folders;

use fabric::atomics::Native;
use hfreduce_core::Fingerprint;
use seqlock::DoubleRead;
use storage::RecorderMemory;

/// Operations kept.
pub const RECORDS: usize = 256;
/// Neighbors kept: the ranks of the node and the tree neighbors.
pub const PEERS: usize = 128;
/// Version of the format; readers refuse any other.
pub const VERSION: u64 = 1;

const MAGIC: u64 = u64::from_le_bytes(*b"HFFLIGHT");
const PAGE_WORDS: usize = 512;
const RECORD_WORDS: usize = 16;
const PEER_WORDS: usize = 4;
const BYTES: usize = (2 * PAGE_WORDS + RECORDS * RECORD_WORDS) * 8;

/// Words of page 0. A text is one word with its length in bytes, followed by the bytes.
mod at {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    /// Process id; rank in the upper half.
    pub const PROCESS: usize = 2;
    /// Start time of the process, in ticks since boot: a pid alone may be reused.
    pub const PROCESS_START: usize = 3;
    pub const PID_NAMESPACE: usize = 4;
    /// World size; epoch in the upper half.
    pub const WORLD: usize = 5;
    pub const CREATED_UNIX_NS: usize = 6;
    pub const CREATED_NS: usize = 7;
    pub const BEAT_NS: usize = 8;
    /// Operations recorded so far.
    pub const NEXT: usize = 9;
    pub const STATE: usize = 10;
    pub const GROUP: usize = 11;
    /// Odd while the words up to `CAUSE` change.
    pub const WAIT_STAMP: usize = 12;
    /// Sequence number of the waiting operation + 1, or 0; the rank it waits for + 1; the phase.
    pub const WAIT_SEQUENCE: usize = 13;
    pub const WAIT_PEER: usize = 14;
    pub const WAIT_PHASE: usize = 15;
    pub const CAUSE: usize = 48;
    pub const IDENTITY: usize = 192;
    /// Boot id: monotonic times of another boot are not comparable.
    pub const BOOT: usize = 500;
}

/// Words of a record.
mod record {
    /// 2 × number + 1 while the record is written, + 2 afterwards.
    pub const STAMP: usize = 0;
    pub const SEQUENCE: usize = 1;
    pub const PRINT: usize = 2;
    pub const BYTES: usize = 5;
    pub const CALLED_NS: usize = 6;
    pub const FINISHED_NS: usize = 7;
    /// State; chunks in the upper half.
    pub const STATE: usize = 8;
    /// Chunks contributed; chunks delivered in the upper half.
    pub const PROGRESS: usize = 9;
    /// The rank it waited for last + 1; timeout in milliseconds in the upper half.
    pub const PEER: usize = 10;
}

/// State of the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum State {
    /// The ranks are connecting.
    Connecting = 1,
    /// Connected.
    Open = 2,
    /// Ended by a failure.
    Broken = 3,
}

/// State of an operation.
const STARTED: u64 = 1;
const COMPLETED: u64 = 2;
const FAILED: u64 = 3;

/// Identity of the recording rank.
#[derive(Clone, Debug, Default)]
pub struct RankInfo {
    /// The job, as the caller named it.
    pub job: String,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: usize,
    /// Its node.
    pub node: String,
    /// Its zone.
    pub zone: String,
    /// Interface and address that other nodes try first.
    pub reached_at: String,
    /// Id of the group: equal on all of its ranks, different for every other group and epoch.
    pub group: u64,
    /// Number of membership changes.
    pub epoch: u32,
    /// Tree neighbors with their nodes and the number of TCP streams.
    pub links: Vec<(u32, String, usize)>,
}

/// Known state of a neighbor.
#[derive(Clone, Copy, Debug)]
pub struct PeerState {
    /// The neighbor's rank.
    pub rank: u32,
    /// True for a tree neighbor, false for a rank of the node.
    pub link: bool,
    /// Operations it has entered; for a tree neighbor, the one it is in + 1 (0: unknown or none).
    pub entered: u64,
    /// The rank that it reports to wait for.
    pub waiting_for: Option<u32>,
    /// It has closed the communicator or its connection.
    pub closed: bool,
}

/// The recorder of one rank. Its file is removed when it is dropped.
#[derive(Debug)]
pub struct Recorder {
    memory: RecorderMemory,
    anchor: Instant,
    anchor_ns: u64,
    dumps: Option<PathBuf>,
    dumped: OnceLock<Option<PathBuf>>,
}

impl Recorder {
    /// Creates a recorder. Without a usable folder it records into anonymous memory, which others
    /// find as long as the process runs; if that fails too, into private memory.
    pub fn new(folders: &Folders, about: &RankInfo) -> Self {
        Self::over(RecorderMemory::new(folders, BYTES, about), folders.dumps.clone(), about)
    }

    /// A recorder of this process alone, for a rank whose daemon has a recorder.
    #[inline]
    pub fn private(about: &RankInfo) -> Self {
        Self::over(RecorderMemory::private(BYTES), None, about)
    }

    fn over(memory: RecorderMemory, dumps: Option<PathBuf>, about: &RankInfo) -> Self {
        let (anchor, anchor_ns) = (Instant::now(), host::monotonic_ns());
        let recorder = Self { memory, anchor, anchor_ns, dumps, dumped: OnceLock::new() };
        recorder.describe(about);
        for (at, value) in [
            (at::VERSION, VERSION | (RECORDS as u64) << 32),
            (at::PROCESS, u64::from(std::process::id()) | u64::from(about.rank) << 32),
            (at::PROCESS_START, host::process_start(std::process::id()).unwrap_or(0)),
            (at::PID_NAMESPACE, host::pid_namespace()),
            (at::WORLD, about.world_size as u64 | u64::from(about.epoch) << 32),
            (at::CREATED_UNIX_NS, host::unix_ns()),
            (at::CREATED_NS, anchor_ns),
            (at::BEAT_NS, anchor_ns),
            (at::STATE, State::Connecting as u64),
            (at::GROUP, about.group),
        ] {
            recorder.set(at, value);
        }
        recorder.text(at::BOOT, host::boot_id().as_bytes(), PAGE_WORDS);
        fence(Ordering::Release);
        recorder.word(at::MAGIC).store(MAGIC, Ordering::Release);
        recorder
    }

    /// Updates the identity.
    pub fn describe(&self, about: &RankInfo) {
        let cut = |text: &str| text.chars().take(48).collect::<String>();
        let link = |(rank, node, streams): &(u32, String, usize)| (*rank, cut(node), *streams);
        let identity = serde_json::json!({
            "job": cut(&about.job),
            "node": cut(&about.node),
            "zone": cut(&about.zone),
            "reached_at": cut(&about.reached_at),
            "host": cut(&host::host_name()),
            "links": about.links.iter().take(8).map(link).collect::<Vec<_>>(),
        });
        self.text(at::IDENTITY, identity.to_string().as_bytes(), at::BOOT);
    }

    /// Path of its file, if it has one.
    #[inline]
    pub fn path(&self) -> Option<&Path> {
        self.memory.path()
    }

    /// Records a call; returns the number of its record. Callers are serialized by the lock of the
    /// submission queue.
    pub fn called(
        &self,
        sequence: u64,
        fingerprint: &Fingerprint,
        bytes: usize,
        timeout_ms: u64,
        now: Instant,
    ) -> u64 {
        let number = self.word(at::NEXT).load(Ordering::Relaxed);
        let base = base(number);
        let stamp = self.word(base + record::STAMP);
        seqlock::change::<Native>(stamp, number * 2 + 1, number * 2 + 2, || {
            self.set(base + record::SEQUENCE, sequence);
            for (at, word) in fingerprint.words().into_iter().enumerate() {
                self.set(base + record::PRINT + at, word);
            }
            self.set(base + record::BYTES, bytes as u64);
            self.set(base + record::CALLED_NS, self.ns(now));
            self.set(base + record::FINISHED_NS, 0);
            self.set(base + record::STATE, STARTED);
            self.set(base + record::PROGRESS, 0);
            self.set(base + record::PEER, timeout_ms.min(u64::from(u32::MAX)) << 32);
        });
        self.word(at::NEXT).store(number + 1, Ordering::Release);
        number
    }

    /// Records the progress of an operation.
    #[inline]
    pub fn progress(&self, number: u64, contributed: u32, delivered: u32) {
        if let Some(base) = self.base_of(number) {
            let progress = u64::from(contributed) | u64::from(delivered) << 32;
            self.set(base + record::PROGRESS, progress);
        }
    }

    /// Records the number of chunks of an operation.
    #[inline]
    pub fn cut(&self, number: u64, chunks: u32) {
        if let Some(base) = self.base_of(number) {
            self.set(base + record::STATE, STARTED | u64::from(chunks) << 32);
        }
    }

    /// Records the rank that an operation waits for.
    #[inline]
    pub fn waits_for(&self, number: u64, rank: Option<u32>) {
        if let Some(base) = self.base_of(number) {
            let timeout = self.get(base + record::PEER) >> 32 << 32;
            self.set(base + record::PEER, timeout | u64::from(rank.map_or(0, |rank| rank + 1)));
        }
    }

    /// Records the end of an operation.
    #[inline]
    pub fn finished(&self, number: u64, failed: bool, now: Instant) {
        if let Some(base) = self.base_of(number) {
            self.set(base + record::FINISHED_NS, self.ns(now));
            let chunks = self.get(base + record::STATE) >> 32 << 32;
            self.set(base + record::STATE, chunks | if failed { FAILED } else { COMPLETED });
        }
    }

    /// Records what the rank as a whole waits for. Called by the thread that holds the driver.
    #[inline]
    pub fn waiting(&self, sequence: Option<u64>, phase: &str, peer: Option<u32>) {
        let stamp = self.word(at::WAIT_STAMP);
        let during = stamp.load(Ordering::Relaxed) | 1;
        seqlock::change::<Native>(stamp, during, during + 1, || {
            self.set(at::WAIT_SEQUENCE, sequence.map_or(0, |sequence| sequence + 1));
            self.set(at::WAIT_PEER, peer.map_or(0, |peer| u64::from(peer) + 1));
            self.text(at::WAIT_PHASE, phase.as_bytes(), at::CAUSE);
        });
    }

    /// Records a heartbeat and the state of the neighbors.
    pub fn beat(&self, now: Instant, peers: impl Iterator<Item = (PeerState, Instant)>) {
        self.set(at::BEAT_NS, self.ns(now));
        for (at, (state, last_message)) in peers.take(PEERS).enumerate() {
            let base = PAGE_WORDS + at * PEER_WORDS;
            let flags = if state.link { 2 } else { 1 } | if state.closed { 4 } else { 0 };
            self.set(base, u64::from(state.rank) | flags << 32);
            self.set(base + 1, state.entered);
            self.set(base + 2, state.waiting_for.map_or(0, |rank| u64::from(rank) + 1));
            self.set(base + 3, self.ns(last_message));
        }
    }

    /// Records that all ranks are connected.
    pub fn open(&self) {
        self.set(at::STATE, State::Open as u64);
        self.waiting(None, "", None);
    }

    /// Records the failure (JSON) and writes a dump. Returns its path, or none if it could not be
    /// written. The first caller writes; all callers wait for it, for a second at most.
    #[inline]
    pub fn broke(&self, cause: &[u8]) -> Option<&Path> {
        if self.get(at::STATE) != State::Broken as u64 {
            self.text(at::CAUSE, cause, at::IDENTITY);
            self.set(at::STATE, State::Broken as u64);
        }
        let folder = self.dumps.as_deref();
        self.dumped.get_or_init(|| dump::write(folder?, self.snapshot()?)).as_deref()
    }

    /// Records the path of the dump that a daemon has written.
    #[inline]
    pub fn dumped_at(&self, path: Option<PathBuf>) {
        let _ = self.dumped.set(path);
    }

    /// Reads everything that is recorded.
    #[inline]
    pub fn snapshot(&self) -> Option<Snapshot> {
        let reads = self.memory.reads();
        Snapshot::of(DoubleRead(&reads[0], &reads[1]), self.path()).ok()
    }

    /// Removes the file after an orderly close.
    #[inline]
    pub fn close(&self) {
        self.memory.remove();
    }

    #[inline]
    fn ns(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.anchor);
        self.anchor_ns + since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos())
    }

    /// Index of a record, unless it was overwritten.
    #[inline]
    fn base_of(&self, number: u64) -> Option<usize> {
        let base = base(number);
        (self.get(base + record::STAMP) == number * 2 + 2).then_some(base)
    }

    #[inline]
    fn text(&self, at: usize, bytes: &[u8], end: usize) {
        seqlock::write_text::<Native>(&self.memory.words()[at..end], bytes);
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        &self.memory.words()[at]
    }

    #[inline]
    fn get(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }

    #[inline]
    fn set(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }
}

#[inline]
fn base(number: u64) -> usize {
    2 * PAGE_WORDS + (number as usize % RECORDS) * RECORD_WORDS
}

#[cfg(test)]
#[path = "flight_test.rs"]
mod tests;
