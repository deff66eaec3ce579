//! What travels and what happens, in the order of time.

use std::rc::Rc;

use bytes::Bytes;
use threefs_core::heartbeat::{Heartbeat, HeartbeatReply};
use threefs_core::message::{StorageRequest, StorageResult};
use threefs_core::routing::RoutingInfo;
use threefs_core::time::Millis;

use super::Expiry;
use crate::fault_plan::Fault;
use crate::node::Job;
use crate::topology::At;

/// Where the answer to a request goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallerId {
    /// A node or a client.
    pub endpoint: usize,
    /// The call.
    pub rpc: u64,
    /// Of a node: the target of this chain.
    pub chain: usize,
    /// In this opening of its store.
    pub opening: u64,
    /// Of a client: the volume whose ticket it holds.
    pub volume: Option<u64>,
}

impl CallerId {
    /// A client.
    pub(crate) fn client(endpoint: usize, rpc: u64) -> Self {
        Self { endpoint, rpc, chain: 0, opening: 0, volume: Some(endpoint as u64 % 2) }
    }
}

/// What travels.
#[derive(Clone, Debug)]
pub(crate) enum Packet {
    Request {
        caller: CallerId,
        request: Box<StorageRequest>,
        payload: Bytes,
        expires: Option<Expiry>,
        /// When the caller gives it up.
        deadline: u64,
    },
    Response {
        caller: CallerId,
        result: Box<StorageResult>,
        payload: Bytes,
    },
    /// The port had no place for a request.
    Overloaded {
        caller: CallerId,
    },
    Heartbeat {
        heartbeat: Box<Heartbeat>,
        sent_at: Millis,
        incarnation: u64,
    },
    HeartbeatReply {
        reply: HeartbeatReply,
        sent_at: Millis,
        incarnation: u64,
    },
    /// A heartbeat of a life that another one has taken the place of.
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

/// What is due at a moment.
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
    /// A store that failed, or could not be opened, is opened.
    Open {
        at: At,
        incarnation: u64,
    },
    /// The turn of a request at a port has come.
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
    /// The operator looks at the chains.
    Operator,
    /// A replica goes to the spare node, as soon as it can.
    Move,
    /// That is given up, as soon as it can be.
    AbandonMove,
    /// The collector asks the head to forget the removed file.
    Collect,
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
