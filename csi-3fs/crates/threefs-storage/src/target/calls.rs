//! Calls to other replicas.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fabric::deadline::Deadline;
use threefs_core::ids::NodeId;
use threefs_core::message::StorageRequest;
use threefs_core::replica::{CallId, Event};

use super::Target;

/// A call to another replica, see `Action::Call`.
pub(super) struct PeerCall {
    pub(super) call: CallId,
    pub(super) node: NodeId,
    pub(super) request: StorageRequest,
    pub(super) payload: Bytes,
    pub(super) timeout_ms: u64,
}

impl Target {
    /// Starts calls, all on one thread of the runtime, so that requests to one connection are sent
    /// together.
    pub(super) fn start_calls(self: &Arc<Self>, calls: Vec<PeerCall>) {
        let target = Arc::clone(self);
        let mut calls = calls.into_iter();
        match (calls.next(), calls.len()) {
            (None, _) => {}
            (Some(call), 0) => drop(self.context.runtime.spawn(target.call(call))),
            (Some(first), _) => {
                let starting = async move {
                    for call in std::iter::once(first).chain(calls) {
                        tokio::spawn(Arc::clone(&target).call(call));
                    }
                };
                self.context.runtime.spawn(starting);
            }
        }
    }

    async fn call(self: Arc<Self>, call: PeerCall) {
        let PeerCall { call, node, request, payload, timeout_ms } = call;
        let deadline = Deadline::after(Duration::from_millis(timeout_ms));
        let routing = self.context.routing();
        // An unknown address is unreachable.
        let address = routing.address(node).unwrap_or_default();
        let (result, payload) = self.context.peers.call(address, &request, payload, deadline).await;
        self.handle_inline(Event::Answer { call, result, payload });
    }
}
