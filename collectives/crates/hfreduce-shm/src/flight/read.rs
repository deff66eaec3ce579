//! Reader of flight records, of running processes and of those that have ended.

use std::path::Path;

use serde::Serialize;

use super::seqlock::DoubleRead;
use super::{
    COMPLETED, FAILED, MAGIC, PAGE_WORDS, PEER_WORDS, PEERS, RECORD_WORDS, RECORDS, State, VERSION,
    at, base, record,
};
use hfreduce_core::FINGERPRINT_BYTES;
use hfreduce_core::Fingerprint;
use hfreduce_core::{DType, ReduceOp};

/// Why a file cannot be read as a flight record.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: String,
        /// The system error.
        error: std::io::Error,
    },
    /// The file has another format, or is incomplete.
    #[error("{bytes} bytes that do not start with HFFLIGHT: not a flight record")]
    Foreign {
        /// Its length.
        bytes: usize,
    },
    /// The file was written by another release.
    #[error("a flight record of version {version}; this release reads version {VERSION}")]
    Version {
        /// Its version.
        version: u64,
    },
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// Position in the order of calls of this rank.
    pub record_id: u64,
    /// Sequence number in the communicator. Sends and receives have the number of the next
    /// collective.
    pub sequence: u64,
    /// Description, as in errors.
    pub operation: String,
    /// Kind of the operation.
    pub kind: &'static str,
    /// Element type.
    pub dtype: &'static str,
    /// Reduction operator; empty if the operation does not reduce.
    pub op: &'static str,
    /// Root rank.
    pub root: u32,
    /// Elements of one block; 0 where ranks may differ.
    pub count: u64,
    /// Bytes of this rank's larger buffer.
    pub bytes: u64,
    /// The fingerprint in hexadecimal: equal on all ranks, or the operation fails.
    pub fingerprint: String,
    /// started, completed or failed.
    pub state: &'static str,
    /// Time of the call, in monotonic nanoseconds of this machine.
    pub called_ns: u64,
    /// Time of the end; 0 while the operation is in progress.
    pub finished_ns: u64,
    /// Timeout given by the caller.
    pub timeout_ms: u32,
    /// Chunks, or messages of a point-to-point operation.
    pub chunks: u32,
    /// Of these, contributed by this rank.
    pub chunks_contributed: u32,
    /// Of these, delivered to this rank.
    pub chunks_delivered: u32,
    /// The rank that it waited for when the record was last updated.
    pub waiting_for: Option<u32>,
}

/// What the rank waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Waiting {
    /// Sequence number of the operation; none while connecting.
    pub sequence: Option<u64>,
    /// Description.
    pub phase: String,
    /// The rank that is waited for.
    pub rank: Option<u32>,
}

/// State of a neighbor, as known to the rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Peer {
    /// The neighbor's rank.
    pub rank: u32,
    /// Its node.
    pub node: String,
    /// True for a tree neighbor, false for a rank of the same node.
    pub link: bool,
    /// TCP streams to the neighbor; 0 for a rank of the same node.
    pub streams: u64,
    /// The operation that it entered last (same node) or is in (tree neighbor); none if unknown.
    pub sequence: Option<u64>,
    /// The rank that it reports to wait for.
    pub waiting_for: Option<u32>,
    /// It has closed the communicator or its connection.
    pub left: bool,
    /// Time of its last heartbeat, in monotonic nanoseconds of this machine.
    pub heard_ns: u64,
}

/// Contents of a flight record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// "hfreduce-flight".
    pub format: &'static str,
    /// Version of the format.
    pub version: u64,
    /// Path of the file, if there is one.
    pub path: Option<String>,
    /// The job, as its environment names it.
    pub job: String,
    /// Rank in this communicator.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// Equal on all ranks of a communicator.
    pub group: String,
    /// Number of membership changes.
    pub epoch: u32,
    /// Node of the rank.
    pub node: String,
    /// Zone of the node.
    pub zone: String,
    /// Interface and address that other nodes try first.
    pub reached_at: String,
    /// Host name.
    pub host: String,
    /// Process id in its namespace.
    pub pid: u32,
    /// Start time of the process, in ticks since boot.
    pub process_start: u64,
    /// Id of the process id namespace.
    pub pid_namespace: u64,
    /// Boot id: monotonic times count from this boot.
    pub boot_id: String,
    /// Creation time, in nanoseconds since 1970.
    pub created_unix_ns: u64,
    /// Creation time, in monotonic nanoseconds.
    pub created_ns: u64,
    /// Time of this reading, in monotonic nanoseconds.
    pub read_ns: u64,
    /// Time of the last heartbeat, in monotonic nanoseconds.
    pub beat_ns: u64,
    /// connecting, open or broken.
    pub state: &'static str,
    /// What the rank waits for now.
    pub waiting: Option<Waiting>,
    /// Why the communicator broke.
    pub cause: Option<serde_json::Value>,
    /// State of the neighbors.
    pub peers: Vec<Peer>,
    /// Number of operations called; `entries` holds the last of them.
    pub operations: u64,
    /// Oldest first.
    pub entries: Vec<Entry>,
}

/// Reads a flight record.
///
/// # Errors
/// [`ReadError`].
pub fn read_file(path: &Path) -> Result<Snapshot, ReadError> {
    use std::io::{Read, Seek};
    use std::os::unix::fs::OpenOptionsExt;
    let io = |error| ReadError::Io { path: path.display().to_string(), error };
    let mut reads = [Vec::new(), Vec::new()];
    // One byte more than a record has: a longer file has another format.
    let limit = (2 * PAGE_WORDS + RECORDS * RECORD_WORDS) as u64 * 8 + 1;
    let mut open = std::fs::OpenOptions::new();
    // A folder of another user may hold a pipe of that name.
    let file = open.read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(io)?;
    if file.metadata().map_err(io)?.is_file() {
        for look in &mut reads {
            (&file).rewind().map_err(io)?;
            (&file).take(limit).read_to_end(look).map_err(io)?;
        }
    }
    Snapshot::of(DoubleRead(&reads[0], &reads[1]), Some(path))
}

struct Words<'a>(DoubleRead<'a>);

impl Words<'_> {
    fn get(&self, at: usize) -> u64 {
        self.0.get(at)
    }

    fn low(&self, at: usize) -> u32 {
        self.get(at) as u32
    }

    fn high(&self, at: usize) -> u32 {
        (self.get(at) >> 32) as u32
    }

    fn text(&self, at: usize, end: usize) -> String {
        // Otherwise it was changed while it was read: the next reader sees it.
        String::from_utf8_lossy(self.0.text(at, end).unwrap_or_default()).into_owned()
    }
}

impl Snapshot {
    /// Decodes a record that was read twice. Never panics, whatever the bytes are.
    ///
    /// # Errors
    /// [`ReadError`].
    pub(super) fn of(reads: DoubleRead<'_>, path: Option<&Path>) -> Result<Self, ReadError> {
        let words = Words(reads);
        let whole = reads.0.len() == super::BYTES && reads.1.len() == super::BYTES;
        if !whole || words.get(at::MAGIC) != MAGIC {
            return Err(ReadError::Foreign { bytes: reads.0.len() });
        }
        if u64::from(words.low(at::VERSION)) != VERSION {
            return Err(ReadError::Version { version: u64::from(words.low(at::VERSION)) });
        }
        let identity: serde_json::Value =
            serde_json::from_str(&words.text(at::IDENTITY, at::BOOT)).unwrap_or_default();
        let text_of = |name: &str| identity[name].as_str().unwrap_or_default().to_owned();
        let node = text_of("node");
        Ok(Self {
            format: "hfreduce-flight",
            version: VERSION,
            path: path.map(|path| path.display().to_string()),
            job: text_of("job"),
            rank: words.high(at::PROCESS),
            world_size: words.low(at::WORLD),
            group: format!("{:016x}", words.get(at::GROUP)),
            epoch: words.high(at::WORLD),
            zone: text_of("zone"),
            reached_at: text_of("reached_at"),
            host: text_of("host"),
            pid: words.low(at::PROCESS),
            process_start: words.get(at::PROCESS_START),
            pid_namespace: words.get(at::PID_NAMESPACE),
            boot_id: words.text(at::BOOT, PAGE_WORDS),
            created_unix_ns: words.get(at::CREATED_UNIX_NS),
            created_ns: words.get(at::CREATED_NS),
            read_ns: super::host::monotonic_ns(),
            beat_ns: words.get(at::BEAT_NS),
            state: match words.get(at::STATE) {
                state if state == State::Open as u64 => "open",
                state if state == State::Broken as u64 => "broken",
                _ => "connecting",
            },
            waiting: waiting(&words),
            cause: serde_json::from_str(&words.text(at::CAUSE, at::IDENTITY)).ok(),
            peers: peers(&words, &node, &identity["links"]),
            operations: words.get(at::NEXT),
            entries: entries(&words),
            node,
        })
    }
}

fn waiting(words: &Words<'_>) -> Option<Waiting> {
    let settled = words.0.is_settled(at::WAIT_STAMP);
    let phase = words.text(at::WAIT_PHASE, at::CAUSE);
    (settled && !phase.is_empty()).then(|| Waiting {
        sequence: words.get(at::WAIT_SEQUENCE).checked_sub(1),
        phase,
        rank: rank_of(words.get(at::WAIT_PEER)),
    })
}

fn peers(words: &Words<'_>, node: &str, links: &serde_json::Value) -> Vec<Peer> {
    let link_to = |rank: u32| {
        let mut links = links.as_array().into_iter().flatten();
        let link = links.find(|link| link[0].as_u64() == Some(u64::from(rank)))?;
        Some((link[1].as_str()?.to_owned(), link[2].as_u64().unwrap_or_default()))
    };
    let bases = (0..PEERS).map(|peer| PAGE_WORDS + peer * PEER_WORDS);
    bases
        .take_while(|base| words.high(*base) != 0)
        .map(|base| {
            let (rank, flags) = (words.low(base), words.high(base));
            let link = flags & 2 != 0;
            let (node, streams) =
                if link { link_to(rank).unwrap_or_default() } else { (node.to_owned(), 0) };
            Peer {
                rank,
                node,
                link,
                streams,
                sequence: words.get(base + 1).checked_sub(1),
                waiting_for: rank_of(words.get(base + 2)),
                left: flags & 4 != 0,
                heard_ns: words.get(base + 3),
            }
        })
        .collect()
}

fn rank_of(word: u64) -> Option<u32> {
    word.checked_sub(1).and_then(|rank| u32::try_from(rank).ok())
}

fn entries(words: &Words<'_>) -> Vec<Entry> {
    let next = words.get(at::NEXT);
    (next.saturating_sub(RECORDS as u64)..next).filter_map(|number| entry(words, number)).collect()
}

fn entry(words: &Words<'_>, number: u64) -> Option<Entry> {
    let base = base(number);
    // Any other stamp: overwritten or being written.
    let stamp = base + record::STAMP;
    let whole = words.get(stamp) == number.checked_mul(2)?.checked_add(2)?;
    (whole && words.0.is_settled(stamp)).then_some(())?;
    let mut encoded = [0; FINGERPRINT_BYTES];
    for (word, bytes) in encoded.chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&words.get(base + record::PRINT + word).to_le_bytes());
    }
    let hex = encoded.iter().map(|byte| format!("{byte:02x}")).collect();
    let fingerprint = Fingerprint::decode(&encoded)?;
    let reduces = fingerprint.kind.reduces();
    Some(Entry {
        record_id: number,
        sequence: words.get(base + record::SEQUENCE),
        operation: fingerprint.describe(),
        kind: fingerprint.kind.name(),
        dtype: DType::from_code(fingerprint.dtype).map_or("", |dtype| dtype.name()),
        op: ReduceOp::from_code(fingerprint.op).filter(|_| reduces).map_or("", |op| op.name()),
        root: fingerprint.root,
        count: fingerprint.count,
        bytes: words.get(base + record::BYTES),
        fingerprint: hex,
        state: match u64::from(words.low(base + record::STATE)) {
            COMPLETED => "completed",
            FAILED => "failed",
            _ => "started",
        },
        called_ns: words.get(base + record::CALLED_NS),
        finished_ns: words.get(base + record::FINISHED_NS),
        timeout_ms: words.high(base + record::PEER),
        chunks: words.high(base + record::STATE),
        chunks_contributed: words.low(base + record::PROGRESS),
        chunks_delivered: words.high(base + record::PROGRESS),
        waiting_for: rank_of(u64::from(words.low(base + record::PEER))),
    })
}
