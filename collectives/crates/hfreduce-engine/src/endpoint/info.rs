//! Info of a rank, which the ranks exchange before they are connected.

use std::io;
use std::net::IpAddr;
use std::os::unix::net::UnixListener;

use fabric::auth::nonce;
use fabric::shm;
use serde::{Deserialize, Serialize};

use super::Options;
use hfreduce_core::error::{AbortReason, CollectiveError, ErrorKind};

/// Version of the info; ranks of another release are refused.
pub const VERSION: u32 = 12;

/// Information of a rank for the other ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// Version of this format.
    pub version: u32,
    /// The rank.
    pub rank: u32,
    /// Random identity of the endpoint, the same in every epoch.
    pub id: u64,
    /// Machine and network namespace: equal ones reach each other over loopback.
    pub host: String,
    /// Processors that this machine has for its ranks.
    pub processors: usize,
    /// Addresses of the port, best first.
    pub addresses: Vec<IpAddr>,
    /// The interface of the first address.
    pub interface: String,
    /// TCP port of the endpoint.
    pub port: u16,
    /// UNIX socket at which the ranks of the node connect to its first rank.
    pub local_socket: String,
    /// UNIX socket at which neighbors on this machine deliver their segments.
    pub mapping_socket: String,
    /// Size of its arena of registered memory; 0 without one.
    pub registered_bytes: u64,
    /// Digest of everything that must be equal on all ranks.
    pub agreement: u64,
    /// The same in readable form, for error messages.
    pub agreed: String,
    /// Ranks of a node that own chunks, if set.
    pub channels: Option<usize>,
    /// A daemon runs the rank.
    pub served: bool,
    /// Node of the rank.
    pub node: String,
    /// Zone of the rank.
    pub zone: String,
    /// The bridge, for epochs that start without a list.
    pub bridge: Option<(String, String)>,
    /// The epoch from which the rank joined, and the collective operations it completed there.
    pub previous_epoch: Option<(u32, u64)>,
}

impl Info {
    /// Interface and address that other nodes try first, `eth0 10.0.0.5`; empty without addresses.
    pub fn reached_at(&self) -> String {
        let first = self.addresses.first();
        first.map(|address| format!("{} {address}", self.interface)).unwrap_or_default()
    }

    /// Adds to what all ranks must agree on; messages show `short`.
    pub fn agree(&mut self, short: &str, long: &str) {
        self.agreed = format!("{short}, {}", self.agreed);
        self.agreement = digest(format!("{long}, {}", self.agreed).as_bytes());
    }
}

/// UNIX sockets for ranks of this machine, with random names. Every epoch has new ones: connections
/// to old ones are dropped.
#[derive(Default)]
pub struct LocalSockets {
    pub local_name: String,
    /// For the ranks of the node, if this is its first.
    pub local: Option<UnixListener>,
    pub mapping_socket_name: String,
    /// For segments of neighbors, if they may be mapped.
    pub mapping_socket: Option<UnixListener>,
}

impl LocalSockets {
    /// Opens the requested sockets.
    ///
    /// # Errors
    /// A system call failed.
    pub fn open(local: bool, mapping_socket: bool) -> io::Result<Self> {
        let mut local_sockets = Self::default();
        if local {
            let (name, listener) = listen()?;
            (local_sockets.local_name, local_sockets.local) = (name, Some(listener));
        }
        if mapping_socket {
            let (name, listener) = listen()?;
            (local_sockets.mapping_socket_name, local_sockets.mapping_socket) =
                (name, Some(listener));
        }
        Ok(local_sockets)
    }
}

fn listen() -> io::Result<(String, UnixListener)> {
    let name = format!("hfreduce-{:016x}", u64::from_le_bytes(first_eight(&nonce()?)));
    let listener = shm::listen(&name)?;
    Ok((name, listener))
}

pub fn context(id: u64) -> String {
    format!("hfreduce/{id:016x}")
}
pub fn first_eight(bytes: &[u8]) -> [u8; 8] {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[..8]);
    eight
}

/// FNV-1a: a digest for comparison, not for security (connections are authenticated).
pub fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Identifies the machine and network namespace: processes with equal ones reach each other over
/// loopback.
pub fn host() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net")
        .map(|link| link.display().to_string())
        .unwrap_or_default();
    format!("{} {network}", boot.trim())
}

/// The error of a rank that cannot connect.
pub fn refused(options: &Options, kind: ErrorKind, phase: &str, detail: String) -> CollectiveError {
    let node = options.placement.get(options.rank as usize);
    let node = node.map(|(node, _)| node.as_str()).unwrap_or_default();
    refused_on((&options.job, options.rank, node), kind, phase, detail)
}

/// The same for a rank without options.
pub fn refused_on(
    (job, rank, node): (&str, u32, &str),
    kind: ErrorKind,
    phase: &str,
    detail: String,
) -> CollectiveError {
    CollectiveError {
        job: job.into(),
        rank,
        operation: "connect".to_owned(),
        sequence: -1,
        phase: phase.to_owned(),
        cause: Box::new(AbortReason::new(kind, rank, detail).with_peer(rank, node)),
        node: node.into(),
        flight_record: None,
    }
}
