//! Simulation of whole clusters with the engine's core on a simulated clock.
//!
//! - [`cluster`]: performance of allreduces over nodes and networks given by constants ([`hardware`]).
//! - [`ring`]: the same for NCCL's ring.
//! - [`figure7`]: both compared with the paper's measurements, as a table, JSON and a chart ([`chart`]).
//! - [`reconfigure`]: agreement on a new epoch under faults.
//! - [`scenario`]: a group with one fault, defined by a [`seed`]; [`group`] runs it.
//! - [`faults`]: detection of failures in many scenarios.
//!
//! A run is deterministic: it uses no clock, thread or random source of the host.

pub mod chart;
pub mod cluster;
pub mod event_queue;
pub mod faults;
pub mod figure7;
pub mod group;
pub mod hardware;
pub mod machine;
pub mod reconfigure;
pub mod ring;
pub mod scenario;
pub mod seed;

/// The reason why a simulation has no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SimError {
    /// The list of operations is empty.
    #[error("no operations to simulate: give at least one size")]
    Empty,
    /// The core stopped before the end.
    #[error(
        "after {at} s no event is pending, but operations are incomplete: {waiting}; this is a bug of the engine's core"
    )]
    Stuck {
        /// Simulated seconds since the start.
        at: f64,
        /// Nodes and what they wait for.
        waiting: String,
    },
    /// The cluster has no plan.
    #[error(transparent)]
    Plan(#[from] hfreduce_plan::PlanError),
}
