//! A seeded, deterministic simulator of chains under faults.
//!
//! One seed makes one schedule: one to three chains of two to four replicas over the same nodes,
//! mgmtd's own rules for heartbeats and chains ([`threefs_mgmtd::Model`]), the credits and budgets of
//! the storage service's port, clients with retries, a network that loses, repeats, delays and
//! reorders, and faults: crashes that lose what was not flushed, stopped processes, partitions,
//! hung, full and failing disks, damaged chunks and logs, lost disks, a manager that is away, clocks
//! that run apart. The replicas are the product's own [`threefs_core::replica::Replica`]; only the
//! driver is of the simulator.
//!
//! A schedule has two phases. While faults run, safety is checked: every answer that a client gets
//! must fit into one order of versions (`history`). Then the faults stop, and within a bounded
//! time every request must be answered, every target must serve again and all replicas must be
//! equal.
//!
//! [`Mutation`] puts bugs into the driver, to prove that the same checks find them.

mod client;
mod fault_plan;
mod history;
mod manager;
mod mutations;
mod node;
mod simulation;
mod store;
mod topology;

pub use mutations::Mutation;
pub use simulation::{Outcome, Simulation, Violation};

/// Runs the schedule of one seed.
///
/// # Errors
/// What went wrong, first of all.
pub fn run(seed: u64, mutation: Mutation) -> Result<Outcome, Violation> {
    Simulation::new(seed, mutation).run()
}
