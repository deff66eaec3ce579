//! The second way to run: `hfreduced`, a process that has the connections and makes the sums of a
//! machine's ranks; they share memory with it and bring nothing but their calls.
//!
//! ```text
//! rank: Attachment, Attached                    hfreduced: Daemon, a Session for each rank
//! Open: options, key                 ─▶         an Endpoint like any other rank's
//!                                    ◀─         its arena (a descriptor), then Opened: its info
//! Connect: everybody's infos         ─▶         Endpoint::connect
//!                                    ◀─         Connected, or Refused: the error
//! Call: operation, places in the arena ─▶       Communicator::submit
//! Arrived: more of a paced input     ─▶         Work::arrived
//!                                    ◀─         Delivered: more of a paced output
//!                                    ◀─         Done: tickets, and who sent
//!                                    ◀─         Broken: the cause; nothing is touched any more
//! Reconfigure: the next members      ─▶         Communicator::reconfigure
//!                                    ◀─         Regrouped: everybody's infos, or Refused
//! Leave                              ─▶         Communicator::close
//! ```
//! A newcomer's Open says that it is one; then Join stands for Connect, and Regrouped for its answer.
//!
//! The engine does not know: a session's communicator is that of a rank which is a thread of the
//! daemon. So bits, names of failures and who reads whose memory are those of the first way, and ranks
//! of both ways may be in one group.
//!
//! The daemon makes the memory and lets the rank hand out its blocks. What is registered there is used
//! in place; what is not is copied in when it is called and out when it has ended. Memory that fills
//! and empties meanwhile (that of GPUs, see [`Watermarks`]) is copied piece by piece in the rank, which
//! alone knows the GPU.

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
