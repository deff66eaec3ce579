//! Errors of a join.

use hfreduce_engine::CollectiveError;

use crate::tcp_rendezvous::TcpRendezvousError;
use crate::topology::TopologyError;
use crate::variables::SettingError;

/// Why a rank did not join its group; `E` is the error of its rendezvous.
#[derive(Debug, thiserror::Error)]
pub enum JoinError<E = TcpRendezvousError> {
    /// A setting cannot be used.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The topology file cannot be used.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The ranks did not find each other.
    #[error(transparent)]
    Rendezvous(E),
    /// A rank was started with other settings.
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    /// The engine did not connect.
    #[error(transparent)]
    Engine(#[from] CollectiveError),
}

/// A rank that was started with other settings than this rank.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} {problem}")]
pub struct Disagreement {
    /// Rank of the job.
    pub rank: u32,
    /// Phase of the join.
    pub phase: &'static str,
    /// Its value and the value of this rank.
    pub problem: String,
}
