//! Creation of a link's transport from its connections.

use std::io;
use std::net::TcpStream;

use fabric::deadline::Deadline;
use serde::{Deserialize, Serialize};

use super::in_process::InProcess;
use super::tcp::Streams;
use super::transport::Transport;

/// Kind of transport along the trees. The variable `HFREDUCE_TRANSPORT` does not select it: that
/// decides whether nodes on one machine also read payloads from each other's segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TransportKind {
    /// TCP.
    #[default]
    Tcp,
    /// Queues in memory, for ranks that are threads of one process.
    InProcess,
}

/// Creates the transport of a link from its authenticated connections; `dialed`: this end dialed
/// them. A transport that is not TCP sends its address to the peer over them.
///
/// # Errors
/// A system call failed, or the peer has disconnected.
pub fn open(
    kind: TransportKind,
    connections: Vec<TcpStream>,
    dialed: bool,
    slot_bytes: usize,
    deadline: Deadline,
) -> io::Result<Box<dyn Transport>> {
    Ok(match kind {
        TransportKind::Tcp => Box::new(Streams::new(connections, slot_bytes)?),
        TransportKind::InProcess => {
            let first = connections.into_iter().next().ok_or(io::ErrorKind::NotConnected)?;
            Box::new(InProcess::meet(first, dialed, deadline)?)
        }
    })
}
