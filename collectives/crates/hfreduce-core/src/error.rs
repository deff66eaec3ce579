//! Errors of collective operations: the reason why a communicator is broken, which reaches every
//! rank unchanged, and the error that a rank reports.

use serde::{Deserialize, Serialize};

/// Kinds of failure. Each has a stable name, which users match on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// A process ended or its connection broke.
    PeerDied,
    /// A process exists but did not respond for the liveness timeout.
    PeerStalled,
    /// A peer closed the communicator while others still needed it.
    PeerLeft,
    /// The deadline of the operation has passed.
    TimedOut,
    /// Ranks called different operations.
    Mismatch,
    /// A peer broke the wire protocol.
    Protocol,
    /// A caller aborted the communicator.
    Aborted,
    /// The operating system refused a resource (memory, descriptors, addresses).
    Io,
    /// The caller's arguments are invalid.
    Invalid,
    /// A rank's GPU or its driver failed.
    Device,
}

impl ErrorKind {
    /// The stable name.
    pub fn name(self) -> &'static str {
        match self {
            Self::PeerDied => "peer_died",
            Self::PeerStalled => "peer_stalled",
            Self::PeerLeft => "peer_left",
            Self::TimedOut => "timed_out",
            Self::Mismatch => "mismatch",
            Self::Protocol => "protocol",
            Self::Aborted => "aborted",
            Self::Io => "io",
            Self::Invalid => "invalid",
            Self::Device => "device",
        }
    }
}

/// Maximum size of an encoded reason, in bytes: it must fit the shared abort record and one frame.
pub const REASON_BYTES_MAX: usize = 1024;
const TEXT_BYTES_MAX: usize = 240;

/// Why a communicator is broken, as reported by the rank that detected it first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortReason {
    /// The kind of failure.
    pub kind: ErrorKind,
    /// The rank that caused it, if known.
    pub peer: Option<u32>,
    /// The node of that rank.
    pub peer_node: Option<String>,
    /// The rank that detected it.
    pub seen_by: u32,
    /// The operation that the detecting rank was in; empty outside operations.
    pub operation: String,
    /// Sequence number of that operation, or -1.
    pub sequence: i64,
    /// What the detecting rank was doing.
    pub phase: String,
    /// What exactly was detected.
    pub detail: String,
}

impl AbortReason {
    /// A reason outside any operation; the driver adds the operation.
    pub fn new(kind: ErrorKind, seen_by: u32, detail: impl Into<String>) -> Self {
        Self {
            kind,
            peer: None,
            peer_node: None,
            seen_by,
            operation: String::new(),
            sequence: -1,
            phase: String::new(),
            detail: detail.into(),
        }
    }

    /// The same, caused by `peer`.
    pub fn with_peer(mut self, peer: u32, node: &str) -> Self {
        self.peer = Some(peer);
        self.peer_node = Some(node.to_owned());
        self
    }

    /// The same, detected during an operation.
    pub fn during(mut self, operation: &str, sequence: i64, phase: &str) -> Self {
        self.operation = operation.to_owned();
        self.sequence = sequence;
        self.phase = phase.to_owned();
        self
    }

    /// Encodes the reason in at most [`REASON_BYTES_MAX`] bytes; long texts are truncated.
    pub fn encode(&self) -> Vec<u8> {
        let mut cut = self.clone();
        for text in [&mut cut.detail, &mut cut.operation, &mut cut.phase] {
            truncate(text, TEXT_BYTES_MAX);
        }
        if let Some(node) = &mut cut.peer_node {
            truncate(node, 64);
        }
        let mut bytes = serde_json::to_vec(&cut).unwrap_or_default();
        if bytes.len() > REASON_BYTES_MAX {
            // Only text that needs escaping exceeds the limit: drop the details and keep the rank.
            cut.detail.clear();
            cut.operation.clear();
            cut.peer_node = None;
            bytes = serde_json::to_vec(&cut).unwrap_or_default();
        }
        bytes
    }

    /// Decodes [`AbortReason::encode`]; anything else becomes a protocol error.
    pub fn decode(bytes: &[u8], seen_by: u32) -> Self {
        serde_json::from_slice(bytes).unwrap_or_else(|error| {
            Self::new(
                ErrorKind::Protocol,
                seen_by,
                format!("invalid abort reason received: {error}"),
            )
        })
    }

    /// The rank that caused the failure, for messages.
    pub fn peer_description(&self) -> String {
        match (self.peer, &self.peer_node) {
            (Some(rank), Some(node)) => format!("rank {rank} on node {node}"),
            (Some(rank), None) => format!("rank {rank}"),
            _ => "the group".to_owned(),
        }
    }
}

/// Cuts a text to at most `bytes_max` bytes, between two characters.
pub(crate) fn truncate(text: &mut String, bytes_max: usize) {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

/// A failed operation as one rank reports it: what the rank was doing, and the first failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub struct CollectiveError {
    /// The job, as the caller named it.
    pub job: Box<str>,
    /// The reporting rank.
    pub rank: u32,
    /// Its node.
    pub node: Box<str>,
    /// The operation that failed here (empty outside operations).
    pub operation: String,
    /// Its sequence number, or -1.
    pub sequence: i64,
    /// What this rank was doing.
    pub phase: String,
    /// The first failure in the group.
    pub cause: Box<AbortReason>,
    /// The flight record dump of this rank, if one was written.
    pub flight_record: Option<Box<str>>,
}

impl std::fmt::Display for CollectiveError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let AbortReason { kind, detail, seen_by, .. } = &*self.cause;
        if self.operation.is_empty() {
            write!(formatter, "rank {} on node {}", self.rank, self.node)?;
        } else {
            write!(
                formatter,
                "{} #{} failed on rank {} on node {}",
                self.operation, self.sequence, self.rank, self.node
            )?;
        }
        if !self.job.is_empty() {
            write!(formatter, " (job {})", self.job)?;
        }
        if !self.phase.is_empty() {
            write!(formatter, " while {}", self.phase)?;
        }
        write!(formatter, ": {} ({}): {detail}", self.cause.peer_description(), kind.name())?;
        if *seen_by != self.rank {
            write!(formatter, " (seen by rank {seen_by}")?;
            if self.cause.sequence >= 0 {
                write!(formatter, " in {} #{}", self.cause.operation, self.cause.sequence)?;
            }
            write!(formatter, ")")?;
        }
        if let Some(path) = &self.flight_record {
            write!(formatter, "; flight record: {path}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_of_any_length_fits_the_record() {
        let long = "\u{1}\"é".repeat(4000);
        let cause = AbortReason::new(ErrorKind::Protocol, 7, long.clone())
            .with_peer(3, &long)
            .during(&long, 12, &long);
        let bytes = cause.encode();
        assert!(bytes.len() <= REASON_BYTES_MAX, "{}", bytes.len());
        let decoded = AbortReason::decode(&bytes, 0);
        assert_eq!(
            (decoded.kind, decoded.peer, decoded.seen_by),
            (ErrorKind::Protocol, Some(3), 7)
        );
    }

    #[test]
    fn the_text_names_job_rank_node_operation_phase_and_culprit() {
        let error = CollectiveError {
            job: "default/gpt".into(),
            rank: 3,
            node: "a1".into(),
            operation: "allreduce".into(),
            sequence: 12,
            phase: "waiting for the result".into(),
            cause: Box::new(
                AbortReason::new(ErrorKind::PeerDied, 4, "connection closed")
                    .with_peer(5, "b0")
                    .during("allreduce", 12, "receiving"),
            ),
            flight_record: Some("/tmp/record.json".into()),
        };
        let text = error.to_string();
        for part in [
            "allreduce #12",
            "rank 3 on node a1",
            "job default/gpt",
            "waiting for",
            "rank 5 on node b0",
            "peer_died",
            "seen by rank 4",
            "flight record: /tmp/record.json",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
