//! In-memory state of clients: when each was last active, in milliseconds since the start of the
//! service (suspended time included), and which of its changes will never be retried.

pub(crate) mod holds;
pub(crate) mod open_files;
pub(crate) mod openings;
pub(crate) mod published_activity;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threefs_core::ids::{ClientId, InodeId};

use crate::clients::open_files::CLIENTS_PER_VOLUME_MAX;
use crate::protocol::RequestId;

/// Answers that one change drops at most; the sweep drops the rest.
const FORGET_MAX: u64 = 128;

/// State of one client.
#[derive(Debug, Default)]
pub(crate) struct Client {
    /// Changes with a lower sequence are finished; see `ops::Dedup`.
    pub floor: AtomicU64,
    /// Answers with a lower sequence are dropped. 0 = none yet.
    forgotten: AtomicU64,
    /// A running change drops answers.
    dropping: AtomicBool,
    last_active_ms: AtomicU64,
    /// The volume of the client's ticket; `None` for a holder of the cluster key.
    volume: Option<InodeId>,
}

impl Client {
    /// The oldest finished changes, whose answers the calling change drops. Empty while another
    /// change drops some: both would write the client's floor, and conflict.
    pub(crate) fn take_finished(&self, id: RequestId) -> Finished<'_> {
        if self.dropping.swap(true, SeqCst) {
            return Finished { client: self, range: 0..0 };
        }
        let start = match self.forgotten.load(SeqCst) {
            // The sweep drops the answers of earlier runs of the service.
            0 => id.finished_below.saturating_sub(FORGET_MAX),
            forgotten => forgotten,
        };
        let range = start..start.saturating_add(FORGET_MAX).min(id.finished_below).max(start);
        if range.is_empty() {
            self.dropping.store(false, SeqCst);
        }
        Finished { client: self, range }
    }
}

/// Finished changes whose answers one change drops. Released when it is dropped.
#[derive(Debug)]
pub(crate) struct Finished<'a> {
    client: &'a Client,
    range: Range<u64>,
}

impl Finished<'_> {
    /// Sequences of the changes.
    pub(crate) fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// The change is committed, and with it the removal of the answers.
    pub(crate) fn committed(self) {
        if !self.range.is_empty() {
            self.client.forgotten.fetch_max(self.range.end, SeqCst);
        }
    }
}

impl Drop for Finished<'_> {
    fn drop(&mut self) {
        if !self.range.is_empty() {
            self.client.dropping.store(false, SeqCst);
        }
    }
}

/// All clients of this run of the service. The number of clients of one volume is bounded; further
/// ones count as silent.
#[derive(Debug, Default)]
pub(crate) struct Clients(Mutex<ClientTable>);

#[derive(Debug, Default)]
struct ClientTable {
    clients: HashMap<ClientId, Arc<Client>>,
    /// Number of clients of each volume.
    of_volume: HashMap<InodeId, usize>,
}

impl Clients {
    /// Records the arrival of a change from a client with a ticket for `volume`.
    pub(crate) fn note_change(
        &self,
        id: RequestId,
        volume: Option<InodeId>,
        now_ms: u64,
    ) -> Arc<Client> {
        let mut table = self.table();
        let client = table.client(id.client, volume);
        client.floor.fetch_max(id.finished_below, SeqCst);
        client.last_active_ms.fetch_max(now_ms, SeqCst);
        client
    }

    /// Records any other activity of a client.
    pub(crate) fn note_activity(&self, client: ClientId, volume: Option<InodeId>, now_ms: u64) {
        self.note_change(RequestId { client, ..RequestId::default() }, volume, now_ms);
    }

    /// Whether the client was active at or after `since_ms`.
    pub(crate) fn active_since(&self, client: ClientId, since_ms: u64) -> bool {
        let table = self.table();
        table
            .clients
            .get(&client)
            .is_some_and(|client| client.last_active_ms.load(SeqCst) >= since_ms)
    }

    /// The clients that were active at or after `since_ms`.
    pub(crate) fn active(&self, since_ms: u64) -> Vec<ClientId> {
        let table = self.table();
        let active = table
            .clients
            .iter()
            .filter(|(_, client)| client.last_active_ms.load(SeqCst) >= since_ms);
        active.map(|(client, _)| *client).collect()
    }

    /// Whether the client has declared that it will never retry this change.
    pub(crate) fn has_finished(&self, client: ClientId, sequence: u64) -> bool {
        let table = self.table();
        table.clients.get(&client).is_some_and(|client| sequence < client.floor.load(SeqCst))
    }

    /// Drops clients that were not active since `since_ms`. A client with a running call is kept.
    pub(crate) fn expire_idle(&self, since_ms: u64) {
        let mut table = self.table();
        let ClientTable { clients, of_volume } = &mut *table;
        clients.retain(|_, client| {
            let stays =
                Arc::strong_count(client) > 1 || client.last_active_ms.load(SeqCst) >= since_ms;
            if !stays && let Some(all) = client.volume.and_then(|volume| of_volume.get_mut(&volume))
            {
                *all -= 1;
            }
            stays
        });
        of_volume.retain(|_, all| *all > 0);
    }

    fn table(&self) -> MutexGuard<'_, ClientTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientTable {
    /// The entry of a client. Beyond the volume's bound, an entry that is not stored.
    fn client(&mut self, id: ClientId, volume: Option<InodeId>) -> Arc<Client> {
        if let Some(client) = self.clients.get(&id) {
            return Arc::clone(client);
        }
        let client = Arc::new(Client { volume, ..Client::default() });
        if let Some(volume) = volume {
            let all = self.of_volume.entry(volume).or_default();
            if *all >= CLIENTS_PER_VOLUME_MAX {
                return client;
            }
            *all += 1;
        }
        self.clients.insert(id, Arc::clone(&client));
        client
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_is_dropped_by_one_change() {
        let client = Client::default();
        let id = |finished_below| RequestId { finished_below, ..RequestId::default() };
        assert_eq!(client.take_finished(id(0)).range(), 0..0);
        let first = client.take_finished(id(1_000));
        assert_eq!(first.range(), 872..1_000);
        assert!(client.take_finished(id(1_000)).range().is_empty(), "another change drops them");
        first.committed();
        assert!(client.take_finished(id(1_000)).range().is_empty());
        client.take_finished(id(1_001)).committed();
        // The change failed: the next one drops the same answers.
        assert_eq!(client.take_finished(id(2_000)).range(), 1_001..1_129);
        assert_eq!(client.take_finished(id(2_000)).range(), 1_001..1_129);
        client.take_finished(id(2_000)).committed();
        // A delayed change declares less than the ones before it.
        assert!(client.take_finished(id(5)).range().is_empty());
        assert_eq!(client.take_finished(id(u64::MAX)).range(), 1_129..1_257);
    }

    #[test]
    fn the_clients_of_one_volume_are_bounded_and_others_are_not() {
        let clients = Clients::default();
        let (bounded, other) = (Some(InodeId(100)), Some(InodeId(200)));
        let max = CLIENTS_PER_VOLUME_MAX as u128;
        for client in 0..max * 2 {
            clients.note_activity(ClientId(client), bounded, 10);
        }
        assert_eq!(clients.table().clients.len(), CLIENTS_PER_VOLUME_MAX);
        assert!(clients.active_since(ClientId(max - 1), 10));
        assert!(!clients.active_since(ClientId(max), 10));
        for (client, volume) in [(max * 2, other), (max * 2 + 1, None)] {
            clients.note_activity(ClientId(client), volume, 20);
            assert!(clients.active_since(ClientId(client), 20));
        }
        clients.expire_idle(15);
        assert_eq!(clients.table().clients.len(), 2);
        clients.note_activity(ClientId(max), bounded, 30);
        assert!(clients.active_since(ClientId(max), 30), "the others have expired");
    }
}
