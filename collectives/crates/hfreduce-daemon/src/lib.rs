//! `hfreduced`: a process that has the connections and runs the kernels of a machine's ranks. The
//! ranks share memory with it and send their calls.
//!
//! ```text
//! rank: DaemonEndpoint, ClientDriver              hfreduced: Daemon, a Session per rank
//! Open: options, key                   ─▶         creates an Endpoint
//!                                      ◀─         its arena (a descriptor), then Opened: its info
//! Connect: the infos of all ranks      ─▶         Endpoint::connect
//!                                      ◀─         Connected, or Refused: the error
//! Call: operation, ranges of the arena ─▶         Communicator::submit
//! Arrived: progress of the input       ─▶         Work::arrived
//!                                      ◀─         Delivered: progress of the output
//!                                      ◀─         Done: tickets and senders
//!                                      ◀─         Broken: the reason; no memory is accessed any more
//! Reconfigure: the next members        ─▶         Communicator::reconfigure
//!                                      ◀─         Reconfigured: the infos of all ranks, or Refused
//! Leave                                ─▶         Communicator::close
//! ```
//! A newcomer sets a flag in Open; then Join replaces Connect, and Reconfigured is the answer.
//!
//! The engine is not aware of daemons: a session's communicator is that of a rank which is a thread
//! of the daemon. So result bits, error messages and memory access are the same as without a
//! daemon, and ranks with and without a daemon may form one group.
//!
//! The daemon creates the arena and the rank allocates its blocks. Registered buffers are used in
//! place; others are copied in at the call and out at its end. Pipelined buffers (those of GPUs,
//! see [`Watermarks`]) are copied piece by piece by the rank, which has access to the GPU.

mod any_endpoint;
mod client;
#[cfg(test)]
mod daemon_test;
mod protocol;
mod server;

pub use any_endpoint::{AnyEndpoint, AnyNewcomer};
pub use client::{DaemonEndpoint, DaemonNewcomer};
#[cfg(doc)]
use hfreduce_shm::watermarks::Watermarks;
pub use server::{Daemon, ListenError, Rules};
