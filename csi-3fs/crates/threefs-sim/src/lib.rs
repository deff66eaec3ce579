//! Seeded, deterministic simulator of chains under faults.
//!
//! One seed determines one schedule: one to three chains of two to four replicas over the same
//! nodes, mgmtd's rules for heartbeats and chains ([`threefs_mgmtd::Model`]), the credits and
//! budgets of the storage service's port, clients with retries, a network that loses, repeats,
//! delays and reorders messages and damages payloads, and faults: crashes that lose unflushed data, stopped processes,
//! partitions, hung, full and failing disks, damaged chunks and logs, lost disks, an unavailable
//! manager, clock drift. The replicas are the product's [`threefs_core::replica::Replica`]; only
//! the driver is the simulator's.
//!
//! A schedule has two phases. While faults occur, safety is checked: the replies to clients must be
//! linearizable (`history`). Then the faults end, and within a bounded time every request must be
//! answered, every target must serve again and all replicas must be equal.
//!
//! [`Mutation`] seeds bugs in the driver, to prove that the same checks find them.

mod fault_plan;
mod history;
mod manager;
mod mutations;
mod simulation;
pub mod snapshots;
mod store;
mod topology;

pub use mutations::Mutation;
pub use simulation::{Outcome, Simulation, Violation};

/// Runs the schedule of one seed.
///
/// # Errors
/// The first violation.
pub fn run(seed: u64, mutation: Mutation) -> Result<Outcome, Violation> {
    Simulation::new(seed, mutation).run()
}
