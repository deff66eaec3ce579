//! Activity of clients across services. Sessions and answers of silent clients end, and a client is
//! silent only if no service has heard of it.

use std::collections::HashSet;

use threefs_core::ids::ClientId;

use crate::background::transaction;
use crate::ops::{self, OpError};
use crate::tree::Tree;

/// Rows per transaction.
const PAGE: usize = 1024;
/// Publications of the activity within the time after which a client is silent.
const PUBLICATIONS: u64 = 8;

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
