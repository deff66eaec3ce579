//! What travels and what happens, in the order of time.

use std::rc::Rc;

use bytes::Bytes;
use threefs_core::error::StorageError;
use threefs_core::heartbeat::{Heartbeat, HeartbeatReply};
use threefs_core::message::{StorageReply, StorageRequest};
use threefs_core::routing::RoutingInfo;
use threefs_core::time::Millis;

use super::Expiry;
use crate::faults::Fault;
use crate::node::Job;

/// What travels.
#[derive(Clone, Debug)]
pub(crate) enum Packet {
    Request {
        rpc: u64,
        life: u64,
        request: Box<StorageRequest>,
        payload: Bytes,
        expires: Option<Expiry>,
    },
    Response {
        rpc: u64,
        life: u64,
        result: Box<Result<StorageReply, StorageError>>,
        payload: Bytes,
    },
    Heartbeat {
        heartbeat: Box<Heartbeat>,
        sent_at: Millis,
        life: u64,
    },
    HeartbeatReply {
        reply: HeartbeatReply,
        sent_at: Millis,
        life: u64,
    },
    /// A heartbeat of a life that another one has taken the place of.
    Replaced {
        life: u64,
    },
    AskRouting {
        life: u64,
    },
    Routing {
        routing: Rc<RoutingInfo>,
        life: u64,
    },
}

impl Packet {
    pub(crate) fn request(rpc: u64, life: u64, request: StorageRequest, payload: Bytes) -> Self {
        Self::Request { rpc, life, request: Box::new(request), payload, expires: None }
    }

    pub(crate) fn response(
        rpc: u64,
        life: u64,
        result: Result<StorageReply, StorageError>,
        payload: Bytes,
    ) -> Self {
        Self::Response { rpc, life, result: Box::new(result), payload }
    }
}

/// What is due at a moment.
#[derive(Clone, Debug)]
pub(crate) enum Happening {
    Deliver {
        from: usize,
        to: usize,
        packet: Packet,
    },
    Disk {
        node: usize,
        life: u64,
        job: Box<Job>,
    },
    Wake {
        node: usize,
        life: u64,
    },
    Beat {
        node: usize,
        life: u64,
    },
    Poll {
        node: usize,
        life: u64,
    },
    Scan,
    /// A replica goes to the spare node, as soon as it can.
    Move,
    /// That is given up, as soon as it can be.
    GiveUpMove,
    /// The collector asks the head to forget the removed file.
    Collect,
    Task {
        task: usize,
        generation: u64,
    },
    Fault(Fault),
    CheckSettled,
}

pub(super) struct Due {
    pub at: u64,
    pub sequence: u64,
    pub happening: Happening,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.sequence) == (other.at, other.sequence)
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}
