//! Faults: a part that cannot continue returns the reason, with the rank that caused it, and the
//! driver aborts the communicator.

use std::io;

use super::node::Node;
use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_core::tree::Violation;
use hfreduce_core::{Fingerprint, Kind};

/// Why a part cannot continue.
#[derive(Debug)]
pub(super) enum Fault {
    /// This rank has detected it.
    Detected(Box<AbortReason>),
    /// The neighbor at this tree link has reported it.
    Reported(Box<AbortReason>, usize),
    /// Another rank of the node has recorded it in the segment.
    Recorded,
}

impl From<AbortReason> for Fault {
    fn from(cause: AbortReason) -> Self {
        Self::Detected(Box::new(cause))
    }
}

impl Node {
    /// A reason that names the rank that caused it.
    pub fn reason(&self, kind: ErrorKind, rank: u32, detail: String) -> AbortReason {
        let identity = self.identity();
        let process = matches!(kind, ErrorKind::PeerDied | ErrorKind::PeerStalled);
        let served = process && identity.served.get(rank as usize) == Some(&true);
        let detail =
            if served { format!("hfreduced, which serves it there: {detail}") } else { detail };
        AbortReason::new(kind, identity.rank, detail)
            .with_peer(rank, identity.placement.node_name(rank))
    }

    pub fn fault(&self, kind: ErrorKind, rank: u32, detail: String) -> Fault {
        self.reason(kind, rank, detail).into()
    }

    /// The operating system has refused a resource to this rank.
    pub fn io_fault(&self, detail: String) -> Fault {
        self.fault(ErrorKind::Io, self.rank(), detail)
    }

    /// An operation was started with an unknown code.
    pub fn unknown_codes(&self) -> Fault {
        let detail = "unknown data type or reduction".to_owned();
        self.fault(ErrorKind::Invalid, self.rank(), detail)
    }

    /// A kernel has refused its arguments.
    pub fn kernel_fault(&self, error: &hfreduce_kernels::KernelError) -> Fault {
        AbortReason::new(ErrorKind::Invalid, self.rank(), error.to_string()).into()
    }

    /// A frame of `rank` violates the protocol, or belongs to another operation.
    pub fn violation(&self, rank: u32, why: Violation) -> Fault {
        let (kind, detail) = match why {
            Violation::Mismatch { sequence, fingerprint, peer_fingerprint } => {
                let detail = self.disagreement(rank, sequence, fingerprint, peer_fingerprint);
                (ErrorKind::Mismatch, detail)
            }
            Violation::Protocol(why) => (ErrorKind::Protocol, why),
        };
        self.fault(kind, rank, detail)
    }

    /// The connection to `rank` has ended.
    pub fn lost_peer(&self, rank: u32, error: &io::Error) -> Fault {
        let (kind, detail) = match error.kind() {
            io::ErrorKind::InvalidData => (ErrorKind::Protocol, error.to_string()),
            io::ErrorKind::UnexpectedEof => {
                (ErrorKind::PeerDied, "its connection was closed unexpectedly".into())
            }
            _ => (ErrorKind::PeerDied, format!("its connection failed: {error}")),
        };
        self.fault(kind, rank, detail)
    }

    /// A local rank runs another operation.
    pub fn local_mismatch(
        &self,
        local: usize,
        sequence: u64,
        fingerprint: Fingerprint,
        other: Fingerprint,
    ) -> Fault {
        let rank = self.identity().locals()[local];
        let detail = self.disagreement(rank, sequence, fingerprint, other);
        self.fault(ErrorKind::Mismatch, rank, detail)
    }

    /// A local rank has contributed to a chunk of an operation that it has not started: the ranks
    /// number their chunks differently.
    pub fn local_absent(
        &self,
        local: usize,
        (sequence, fingerprint): (u64, Fingerprint),
        latest: Option<(u64, Fingerprint)>,
    ) -> Fault {
        let rank = self.identity().locals()[local];
        let last_call = latest.map_or_else(
            || "has not called any operation".to_owned(),
            |(at, latest)| {
                format!("called {} as operation #{at} and none after it", latest.describe())
            },
        );
        let own = self.rank();
        let detail = format!(
            "rank {rank} {last_call}, and rank {own} called {} as operation #{sequence}",
            fingerprint.describe()
        );
        self.fault(ErrorKind::Mismatch, rank, detail)
    }

    fn disagreement(&self, rank: u32, seq: u64, own: Fingerprint, other: Fingerprint) -> String {
        // Sends and receives are identified by their tag.
        let name = match own.kind {
            Kind::Send | Kind::Recv => "with tag ",
            _ => "as operation #",
        };
        format!(
            "{name}{seq} rank {rank} called {} and rank {} called {}",
            other.describe(),
            self.rank(),
            own.describe()
        )
    }
}
