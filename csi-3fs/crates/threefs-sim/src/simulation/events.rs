//! Packets and events.

use std::rc::Rc;

use bytes::Bytes;
use threefs_core::fence::Fences;
use threefs_core::heartbeat::{FenceReport, Heartbeat, HeartbeatReply, SeenRouting};
use threefs_core::ids::FencesVersion;
use threefs_core::message::{StorageRequest, StorageResult};
use threefs_core::routing::RoutingInfo;
use threefs_core::time::Millis;

use super::Expiry;
use super::job::Job;
use crate::fault_plan::Fault;
use crate::topology::At;

/// Destination of a reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallerId {
    /// Endpoint of a node or a client.
    pub endpoint: usize,
    /// Id of the call.
    pub rpc: u64,
    /// For a node: the target of this chain.
    pub chain: usize,
    /// For a node: the opening of its store.
    pub opening: u64,
    /// For a client: the volume of its ticket.
    pub volume: Option<u64>,
}

impl CallerId {
    /// The caller id of a client.
    pub(crate) fn client(endpoint: usize, rpc: u64) -> Self {
        Self { endpoint, rpc, chain: 0, opening: 0, volume: Some(endpoint as u64 % 2) }
    }
}

/// A message between endpoints.
#[derive(Clone, Debug)]
pub(crate) enum Packet {
    Request {
        caller: CallerId,
        request: Box<StorageRequest>,
        payload: Bytes,
        expires: Option<Expiry>,
        /// When the caller times out.
        deadline: u64,
    },
    Response {
        caller: CallerId,
        result: Box<StorageResult>,
        payload: Bytes,
    },
    /// The port had no call slot.
    Overloaded {
        caller: CallerId,
    },
    Heartbeat {
        heartbeat: Box<Heartbeat>,
        seen: Box<SeenRouting>,
        fences: Box<FenceReport>,
        sent_at: Millis,
        incarnation: u64,
    },
    HeartbeatReply {
        reply: HeartbeatReply,
        fences: FencesVersion,
        sent_at: Millis,
        incarnation: u64,
    },
    /// Reply to a heartbeat of a replaced incarnation.
    Replaced {
        incarnation: u64,
    },
    AskRouting {
        incarnation: u64,
    },
    Routing {
        routing: Rc<RoutingInfo>,
        incarnation: u64,
    },
    AskFences {
        known: FencesVersion,
        incarnation: u64,
    },
    Fences {
        fences: Box<Fences>,
        incarnation: u64,
    },
}

impl Packet {
    pub(crate) fn request(
        caller: CallerId,
        request: StorageRequest,
        payload: Bytes,
        deadline: u64,
    ) -> Self {
        Self::Request { caller, request: Box::new(request), payload, expires: None, deadline }
    }

    pub(crate) fn response(caller: CallerId, result: StorageResult, payload: Bytes) -> Self {
        Self::Response { caller, result: Box::new(result), payload }
    }
}

/// A scheduled event.
#[derive(Clone, Debug)]
pub(crate) enum SimEvent {
    Deliver {
        from: usize,
        to: usize,
        packet: Packet,
    },
    Disk {
        at: At,
        opening: u64,
        job: Box<Job>,
    },
    Wake {
        at: At,
        opening: u64,
    },
    /// A failed or closed store is opened.
    Open {
        at: At,
        incarnation: u64,
    },
    /// A request at a port is admitted.
    Enter {
        node: usize,
        incarnation: u64,
        id: u64,
    },
    Heartbeat {
        node: usize,
        incarnation: u64,
    },
    Poll {
        node: usize,
        incarnation: u64,
    },
    Scan,
    /// An mgmtd renews its lease, or reads that of the other one.
    Mgmtd {
        mgmtd: usize,
    },
    /// A fault of the primary mgmtd.
    Failover {
        number: usize,
    },
    /// The operator checks the chains.
    Operator,
    /// A move of a replica to the spare node starts as soon as possible.
    Move,
    /// The move is abandoned as soon as possible.
    AbandonMove,
    /// Garbage collection requests the heads to forget the removed file.
    Collect,
    /// Snapshots are created, and lists of shown epochs published.
    Create,
    Task {
        task: usize,
        generation: u64,
    },
    Fault(Fault),
    CheckConverged,
}

pub(super) struct ScheduledEvent {
    pub at: u64,
    pub sequence: u64,
    pub event: SimEvent,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.sequence) == (other.at, other.sequence)
    }
}
impl Eq for ScheduledEvent {}
impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for ScheduledEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}
