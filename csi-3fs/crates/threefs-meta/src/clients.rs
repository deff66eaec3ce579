//! What is known in memory of each client: when it was heard, in milliseconds since the service
//! began by the clock that counts suspended time, and which of its changes can never
//! be sent again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use threefs_core::ids::ClientId;

use crate::protocol::RequestId;

/// Answers that one change forgets on the way at most; the sweep takes the rest.
const FORGET_MAX: u64 = 64;

/// One client.
#[derive(Debug, Default)]
pub(crate) struct Client {
    /// Sequences below are finished; see `ops::AnswerOnce`.
    pub floor: AtomicU64,
    /// Answers below have been forgotten.
    forgotten: AtomicU64,
    heard_ms: AtomicU64,
}

impl Client {
    /// From which sequence on a change should forget answers.
    pub(crate) fn forget_from(&self, id: RequestId) -> u64 {
        self.forgotten.load(SeqCst).max(id.finished_below.saturating_sub(FORGET_MAX))
    }

    pub(crate) fn forgot(&self, id: RequestId) {
        self.forgotten.fetch_max(id.finished_below, SeqCst);
    }
}

/// All clients of this life of the service.
#[derive(Debug, Default)]
pub(crate) struct Clients(Mutex<HashMap<ClientId, Arc<Client>>>);

impl Clients {
    /// A change of this client has arrived.
    pub(crate) fn hear(&self, id: RequestId, now_ms: u64) -> Arc<Client> {
        let mut clients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let client = Arc::clone(clients.entry(id.client).or_default());
        client.floor.fetch_max(id.finished_below, SeqCst);
        client.heard_ms.fetch_max(now_ms, SeqCst);
        client
    }

    /// Something else of this client has arrived.
    pub(crate) fn hear_of(&self, client: ClientId, now_ms: u64) {
        self.hear(RequestId { client, ..RequestId::default() }, now_ms);
    }

    /// Whether it was heard since `since_ms`.
    pub(crate) fn heard_since(&self, client: ClientId, since_ms: u64) -> bool {
        let clients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        clients.get(&client).is_some_and(|client| client.heard_ms.load(SeqCst) >= since_ms)
    }

    /// Whether it has declared that it will never send this change again.
    pub(crate) fn has_finished(&self, client: ClientId, sequence: u64) -> bool {
        let clients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        clients.get(&client).is_some_and(|client| sequence < client.floor.load(SeqCst))
    }

    /// Forgets clients that were not heard since `since_ms`. A client counts as used while a call
    /// of it runs.
    pub(crate) fn forget_silent(&self, since_ms: u64) {
        let mut clients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        clients.retain(|_, client| {
            Arc::strong_count(client) > 1 || client.heard_ms.load(SeqCst) >= since_ms
        });
    }
}
