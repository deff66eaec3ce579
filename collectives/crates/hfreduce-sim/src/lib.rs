//! Whole clusters on a simulated clock, driven by the engine's own core.
//!
//! - [`cluster`]: how fast: allreduces over machines and networks made of constants ([`hardware`]).
//! - [`ring`]: the same for NCCL's ring.
//! - [`figure7`]: both beside what the paper measured, as a table, JSON and a picture ([`chart`]).
//! - [`regroup`]: members agree on a new epoch while things go wrong.
//! - [`faults`]: who learns what, and when, if something goes wrong: a scenario is one seed; [`group`] runs it.
//!
//! One run is one order of events: no clock, thread or random source of the machine is looked at.

pub mod agenda;
pub mod chart;
pub mod cluster;
pub mod faults;
pub mod figure7;
pub mod group;
pub mod hardware;
pub mod machine;
pub mod regroup;
pub mod ring;

/// Why there is no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SimError {
    /// There is nothing to simulate.
    #[error("there is no operation to simulate: give at least one size")]
    Empty,
    /// The core stopped before the end.
    #[error(
        "after {at} s nothing can move any more, and not everything is done: {who}; this is a bug of the engine's core"
    )]
    Stuck {
        /// Simulated seconds since the beginning.
        at: f64,
        /// Who waits for what.
        who: String,
    },
    /// There is no plan for such a cluster.
    #[error(transparent)]
    Plan(#[from] hfreduce_plan::PlanError),
}
