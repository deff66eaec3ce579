//! Activity of clients across services. Sessions and answers of silent clients end, and a client is
//! silent only if no service has heard of it.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use threefs_core::ids::ClientId;

use crate::background::transaction;
use crate::ops::{self, OpError};
use crate::rows::Uptime;
use crate::tree::Tree;

/// Rows per transaction.
const PAGE: usize = 1024;
/// Publications of the activity within the time after which a client is silent.
const PUBLICATIONS: u64 = 8;

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
    fn is_silent(
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

impl Tree {
    pub(crate) fn activity_interval_ms(&self) -> u64 {
        let silent_ms = self.config.session_timeout_ms.min(self.config.answer_keep_ms);
        (silent_ms / PUBLICATIONS).max(1)
    }

    /// Publishes which clients were active since the last publication, for the collector.
    pub(crate) async fn publish_activity(&self) -> Result<(), OpError> {
        let now = self.uptime();
        // Some publications may fail or be late.
        let since_ms = now.ms.saturating_sub(2 * self.activity_interval_ms());
        let active = self.clients.active(since_ms);
        for clients in active.chunks(PAGE) {
            self.store.transact(transaction(), &ops::PublishActivity { clients, now }).await?;
        }
        Ok(())
    }

    /// Those of the clients that no service has heard of since `since_ms`.
    pub(crate) async fn silent_clients(
        &self,
        clients: impl Iterator<Item = ClientId>,
        since_ms: u64,
        now_ms: u64,
    ) -> Result<HashSet<ClientId>, OpError> {
        let silent: HashSet<ClientId> =
            clients.filter(|client| !self.clients.active_since(*client, since_ms)).collect();
        if self.services.alone {
            return Ok(silent);
        }
        let silent: Vec<ClientId> = silent.into_iter().collect();
        let read = ops::ReadActivity(&silent);
        let published = self.store.transact(transaction(), &read).await?;
        let of_client = silent.into_iter().zip(published);
        let silent = of_client.filter(|(client, published)| {
            self.published_activity.is_silent(*client, *published, since_ms, now_ms)
        });
        Ok(silent.map(|(client, _)| client).collect())
    }
}
