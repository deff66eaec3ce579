//! The flight recorder: what this rank did last, in memory that outlives its process.
//!
//! ```text
//! page 0    who we are, our last sign of life, what we wait for, why we broke
//! page 1    what we know of our neighbours
//! then      the last RECORDS operations, 128 bytes each, the oldest overwritten first
//! ```
//! Always on. Writing is a handful of relaxed stores into one cache line or two: no lock, no
//! allocation, no system call and no look at the clock that was not made anyway. Others read while
//! we write (`read`): whatever is longer than a word has a stamp that is odd while it changes, and
//! they look twice (`sealed`).
//! Absent on purpose: payload bytes, and anything that would have to be waited for.

mod dump;
mod read;
mod seqlock;
mod storage;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

pub use read::{Entry, Peer, ReadError, Snapshot, Waiting, read_file};
pub use storage::Folders;

use crate::atomics::Native;
use crate::core::Fingerprint;
use seqlock::DoubleRead;
use storage::RecorderMemory;

/// Operations that are kept.
pub const RECORDS: usize = 256;
/// Neighbours that are kept: the ranks of a node and the ends of its tree edges.
pub const PEERS: usize = 128;
/// The format's version; a reader refuses any other.
pub const VERSION: u64 = 1;

const MAGIC: u64 = u64::from_le_bytes(*b"HFFLIGHT");
const PAGE_WORDS: usize = 512;
const RECORD_WORDS: usize = 16;
const PEER_WORDS: usize = 4;
const BYTES: usize = (2 * PAGE_WORDS + RECORDS * RECORD_WORDS) * 8;

/// Words of page 0. Texts are a word with their length in bytes, then the bytes.
mod at {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    /// Process, and rank in the upper half.
    pub const PROCESS: usize = 2;
    /// When the process started, in the kernel's ticks since boot: a pid alone may be reused.
    pub const PROCESS_START: usize = 3;
    pub const PID_NAMESPACE: usize = 4;
    /// World size, and epoch in the upper half.
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
    /// The operation that waits + 1, or 0; whom for + 1; the phase.
    pub const WAIT_SEQUENCE: usize = 13;
    pub const WAIT_PEER: usize = 14;
    pub const WAIT_PHASE: usize = 15;
    pub const CAUSE: usize = 48;
    pub const IDENTITY: usize = 192;
    /// Boot id: monotonic times of another boot mean nothing.
    pub const BOOT: usize = 500;
}

/// Words of a record.
mod record {
    /// 2 × number + 1 while it is filled in, + 2 from then on.
    pub const STAMP: usize = 0;
    pub const SEQUENCE: usize = 1;
    pub const PRINT: usize = 2;
    pub const BYTES: usize = 5;
    pub const CALLED_NS: usize = 6;
    pub const FINISHED_NS: usize = 7;
    /// State, and chunks in the upper half.
    pub const STATE: usize = 8;
    /// Chunks contributed, and delivered in the upper half.
    pub const PROGRESS: usize = 9;
    /// Whom it waited for last + 1, and the time-out in milliseconds in the upper half.
    pub const PEER: usize = 10;
}

/// Where the communicator is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum State {
    /// The ranks are finding each other.
    Connecting = 1,
    /// Connected.
    Open = 2,
    /// Ended by a failure.
    Broken = 3,
}

/// What a record's state says.
const STARTED: u64 = 1;
const COMPLETED: u64 = 2;
const FAILED: u64 = 3;

/// Who writes.
#[derive(Clone, Debug, Default)]
pub struct RankInfo {
    /// The job, as the caller named it.
    pub job: String,
    /// This rank.
    pub rank: u32,
    /// How many there are.
    pub world_size: usize,
    /// Its node and zone.
    pub node: String,
    /// See above.
    pub zone: String,
    /// Interface and address that other nodes try first.
    pub reached_at: String,
    /// The group: equal on all of its ranks, different for every other group and epoch.
    pub group: u64,
    /// How often the members have changed.
    pub epoch: u32,
    /// The neighbours along the trees with their nodes, and how many TCP streams lead there.
    pub links: Vec<(u32, String, usize)>,
}

/// What is known of a neighbour.
#[derive(Clone, Copy, Debug)]
pub struct PeerState {
    /// Which rank.
    pub rank: u32,
    /// True for the end of a tree edge, false for a rank of our node.
    pub link: bool,
    /// Operations it has entered; for a link, the one it is in + 1 (0: in none, as far as we know).
    pub entered: u64,
    /// Whom it says that it waits for.
    pub waiting_for: Option<u32>,
    /// It took leave or its connection is closed.
    pub left: bool,
}

/// See the module's text. Its file goes with it, unless the process ends before.
#[derive(Debug)]
pub struct Recorder {
    memory: RecorderMemory,
    anchor: Instant,
    anchor_ns: u64,
    dumps: Option<PathBuf>,
    dumped: OnceLock<Option<PathBuf>>,
}

impl Recorder {
    /// A new one. Where no folder takes its file it is kept in memory without a name, which others
    /// find as long as the process lives; where even that fails it records into the void.
    pub fn new(folders: &Folders, about: &RankInfo) -> Self {
        Self::over(RecorderMemory::new(folders, BYTES, about), folders.dumps.clone(), about)
    }

    /// One for this process alone: a daemon has the rank's own.
    pub fn private(about: &RankInfo) -> Self {
        Self::over(RecorderMemory::private(BYTES), None, about)
    }

    fn over(memory: RecorderMemory, dumps: Option<PathBuf>, about: &RankInfo) -> Self {
        let (anchor, anchor_ns) = (Instant::now(), storage::monotonic_ns());
        let recorder = Self { memory, anchor, anchor_ns, dumps, dumped: OnceLock::new() };
        recorder.describe(about);
        for (at, value) in [
            (at::VERSION, VERSION | (RECORDS as u64) << 32),
            (at::PROCESS, u64::from(std::process::id()) | u64::from(about.rank) << 32),
            (at::PROCESS_START, storage::process_start(std::process::id()).unwrap_or(0)),
            (at::PID_NAMESPACE, storage::pid_namespace()),
            (at::WORLD, about.world_size as u64 | u64::from(about.epoch) << 32),
            (at::CREATED_UNIX_NS, storage::unix_ns()),
            (at::CREATED_NS, anchor_ns),
            (at::BEAT_NS, anchor_ns),
            (at::STATE, State::Connecting as u64),
            (at::GROUP, about.group),
        ] {
            recorder.set(at, value);
        }
        recorder.text(at::BOOT, storage::boot_id().as_bytes(), PAGE_WORDS);
        fence(Ordering::Release);
        recorder.word(at::MAGIC).store(MAGIC, Ordering::Release);
        recorder
    }

    /// Tells more about us.
    pub fn describe(&self, about: &RankInfo) {
        let cut = |text: &str| text.chars().take(48).collect::<String>();
        let link = |(rank, node, streams): &(u32, String, usize)| (*rank, cut(node), *streams);
        let identity = serde_json::json!({
            "job": cut(&about.job),
            "node": cut(&about.node),
            "zone": cut(&about.zone),
            "reached_at": cut(&about.reached_at),
            "host": cut(&storage::host_name()),
            "links": about.links.iter().take(8).map(link).collect::<Vec<_>>(),
        });
        self.text(at::IDENTITY, identity.to_string().as_bytes(), at::BOOT);
    }

    /// Where its file is, if it has a name.
    pub fn path(&self) -> Option<&Path> {
        self.memory.path()
    }

    /// An operation was called: its record's number. Callers take turns (the lock of the queue
    /// that the call goes into).
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

    /// How far it is.
    pub fn progress(&self, number: u64, contributed: u32, delivered: u32) {
        if let Some(base) = self.kept(number) {
            let progress = u64::from(contributed) | u64::from(delivered) << 32;
            self.set(base + record::PROGRESS, progress);
        }
    }

    /// Into how many pieces it was cut.
    pub fn cut(&self, number: u64, chunks: u32) {
        if let Some(base) = self.kept(number) {
            self.set(base + record::STATE, STARTED | u64::from(chunks) << 32);
        }
    }

    /// Whom it waits for.
    pub fn waits_for(&self, number: u64, rank: Option<u32>) {
        if let Some(base) = self.kept(number) {
            let timeout = self.get(base + record::PEER) >> 32 << 32;
            self.set(base + record::PEER, timeout | u64::from(rank.map_or(0, |rank| rank + 1)));
        }
    }

    /// It has ended.
    pub fn finished(&self, number: u64, failed: bool, now: Instant) {
        if let Some(base) = self.kept(number) {
            self.set(base + record::FINISHED_NS, self.ns(now));
            let chunks = self.get(base + record::STATE) >> 32 << 32;
            self.set(base + record::STATE, chunks | if failed { FAILED } else { COMPLETED });
        }
    }

    /// What the rank as a whole waits for. One thread at a time (whoever drives).
    pub fn waiting(&self, sequence: Option<u64>, phase: &str, peer: Option<u32>) {
        let stamp = self.word(at::WAIT_STAMP);
        let during = stamp.load(Ordering::Relaxed) | 1;
        seqlock::change::<Native>(stamp, during, during + 1, || {
            self.set(at::WAIT_SEQUENCE, sequence.map_or(0, |sequence| sequence + 1));
            self.set(at::WAIT_PEER, peer.map_or(0, |peer| u64::from(peer) + 1));
            self.text(at::WAIT_PHASE, phase.as_bytes(), at::CAUSE);
        });
    }

    /// A sign of life, and what is known of the neighbours.
    pub fn beat(&self, now: Instant, peers: impl Iterator<Item = (PeerState, Instant)>) {
        self.set(at::BEAT_NS, self.ns(now));
        for (at, (known, heard)) in peers.take(PEERS).enumerate() {
            let base = PAGE_WORDS + at * PEER_WORDS;
            let flags = if known.link { 2 } else { 1 } | if known.left { 4 } else { 0 };
            self.set(base, u64::from(known.rank) | flags << 32);
            self.set(base + 1, known.entered);
            self.set(base + 2, known.waiting_for.map_or(0, |rank| u64::from(rank) + 1));
            self.set(base + 3, self.ns(heard));
        }
    }

    /// Everybody is there.
    pub fn open(&self) {
        self.set(at::STATE, State::Open as u64);
        self.waiting(None, "", None);
    }

    /// Everything ended for this reason (JSON): writes all that is recorded to the folder of dumps.
    /// The file's path, or none where nothing could be written. Whoever says so first writes; all
    /// wait for that, a second at most.
    pub fn broke(&self, cause: &[u8]) -> Option<&Path> {
        if self.get(at::STATE) != State::Broken as u64 {
            self.text(at::CAUSE, cause, at::IDENTITY);
            self.set(at::STATE, State::Broken as u64);
        }
        let folder = self.dumps.as_deref();
        self.dumped.get_or_init(|| dump::write(folder?, self.snapshot()?)).as_deref()
    }

    /// A daemon, which has the rank's own recorder, has written the dump.
    pub fn dumped_at(&self, path: Option<PathBuf>) {
        let _ = self.dumped.set(path);
    }

    /// All that is recorded.
    pub fn snapshot(&self) -> Option<Snapshot> {
        let reads = self.memory.reads();
        Snapshot::of(DoubleRead(&reads[0], &reads[1]), self.path()).ok()
    }

    /// The file is not needed any more: this end was in order.
    pub fn close(&self) {
        self.memory.remove();
    }

    fn ns(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.anchor);
        self.anchor_ns + since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos())
    }

    /// Where a record is, unless it was overwritten.
    fn kept(&self, number: u64) -> Option<usize> {
        let base = base(number);
        (self.get(base + record::STAMP) == number * 2 + 2).then_some(base)
    }

    fn text(&self, at: usize, bytes: &[u8], end: usize) {
        seqlock::write_text::<Native>(&self.memory.words()[at..end], bytes);
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.memory.words()[at]
    }

    fn get(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }

    fn set(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }
}

fn base(number: u64) -> usize {
    2 * PAGE_WORDS + (number as usize % RECORDS) * RECORD_WORDS
}

#[cfg(test)]
#[path = "flight_test.rs"]
mod tests;
