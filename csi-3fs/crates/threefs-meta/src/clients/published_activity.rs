//! Activity of clients that other services over the store have published.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use threefs_core::ids::ClientId;

use crate::rows::Uptime;

#[derive(Debug)]
struct Known {
    published: Option<Uptime>,
    /// When this service first saw it, in milliseconds of its uptime.
    since_ms: u64,
    asked_ms: u64,
}

/// What other services have published about clients.
#[derive(Debug, Default)]
pub(crate) struct PublishedActivity(Mutex<HashMap<ClientId, Known>>);

impl PublishedActivity {
    /// Whether a client's row has been unchanged since `since_ms`.
    pub(crate) fn is_silent(
        &self,
        client: ClientId,
        published: Option<Uptime>,
        since_ms: u64,
        now_ms: u64,
    ) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known =
            known.entry(client).or_insert(Known { published, since_ms: now_ms, asked_ms: 0 });
        if known.published != published {
            (known.published, known.since_ms) = (published, now_ms);
        }
        known.asked_ms = now_ms;
        known.since_ms < since_ms
    }

    /// Forgets clients that the sweep of that time did not ask for: they have no rows any more.
    pub(crate) fn retain_asked_at(&self, now_ms: u64) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, known| known.asked_ms == now_ms);
    }
}
