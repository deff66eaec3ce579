//! What is known in memory of each client: when it was heard, in milliseconds since the service
//! began by the clock that counts suspended time, and which of its changes can never
//! be sent again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threefs_core::ids::{ClientId, InodeId};

use crate::holds::CLIENTS_OF_VOLUME_MAX;
use crate::protocol::RequestId;

/// Answers that one change forgets on the way at most; the sweep takes the rest.
const FORGET_MAX: u64 = 64;
/// Answers that the clients of one volume may have kept together; at 5,000 changes a second they
/// are those of 200 seconds, which is longer than any call lasts.
const ANSWERS_OF_VOLUME_MAX: u64 = 1 << 20;

/// One client.
#[derive(Debug, Default)]
pub(crate) struct Client {
    /// Sequences below are finished; see `ops::AnswerOnce`.
    pub floor: AtomicU64,
    /// Answers below have been forgotten.
    forgotten: AtomicU64,
    heard_ms: AtomicU64,
    /// Whose ticket it has; `None` for the cluster's key.
    volume: Option<InodeId>,
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

/// All clients of this life of the service. Of one volume a bounded number: further ones are taken
/// for silent. They share the answers that are kept for the volume: whoever declares nothing
/// finished has its oldest changes taken for finished.
#[derive(Debug, Default)]
pub(crate) struct Clients(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    clients: HashMap<ClientId, Arc<Client>>,
    of_volume: HashMap<InodeId, usize>,
}

impl Clients {
    /// A change of this client, of the volume whose ticket it has, has arrived.
    pub(crate) fn hear(&self, id: RequestId, volume: Option<InodeId>, now_ms: u64) -> Arc<Client> {
        let mut known = self.known();
        let client = known.client(id.client, volume);
        let kept = known.answers_of_client(volume);
        let floor = id.finished_below.max(id.sequence.saturating_sub(kept));
        client.floor.fetch_max(floor, SeqCst);
        client.heard_ms.fetch_max(now_ms, SeqCst);
        client
    }

    /// Something else of this client has arrived.
    pub(crate) fn hear_of(&self, client: ClientId, volume: Option<InodeId>, now_ms: u64) {
        self.hear(RequestId { client, ..RequestId::default() }, volume, now_ms);
    }

    /// Whether it was heard since `since_ms`.
    pub(crate) fn heard_since(&self, client: ClientId, since_ms: u64) -> bool {
        let known = self.known();
        known.clients.get(&client).is_some_and(|client| client.heard_ms.load(SeqCst) >= since_ms)
    }

    /// Whether it has declared that it will never send this change again.
    pub(crate) fn has_finished(&self, client: ClientId, sequence: u64) -> bool {
        let known = self.known();
        known.clients.get(&client).is_some_and(|client| sequence < client.floor.load(SeqCst))
    }

    /// Forgets clients that were not heard since `since_ms`. A client counts as used while a call
    /// of it runs.
    pub(crate) fn forget_silent(&self, since_ms: u64) {
        let mut known = self.known();
        let Known { clients, of_volume } = &mut *known;
        clients.retain(|_, client| {
            let stays = Arc::strong_count(client) > 1 || client.heard_ms.load(SeqCst) >= since_ms;
            if let Some(count) = client.volume.and_then(|volume| of_volume.get_mut(&volume)) {
                *count -= usize::from(!stays);
            }
            stays
        });
        of_volume.retain(|_, count| *count > 0);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    /// Answers that a client of the volume may have kept.
    fn answers_of_client(&self, volume: Option<InodeId>) -> u64 {
        let Some(volume) = volume else { return u64::MAX };
        let clients = self.of_volume.get(&volume).copied().unwrap_or_default();
        ANSWERS_OF_VOLUME_MAX / clients.max(1) as u64
    }

    /// The entry of a client. One more than a volume may have gets one that is not kept.
    fn client(&mut self, id: ClientId, volume: Option<InodeId>) -> Arc<Client> {
        if let Some(client) = self.clients.get(&id) {
            return Arc::clone(client);
        }
        let client = Arc::new(Client { volume, ..Client::default() });
        if let Some(volume) = volume {
            let count = self.of_volume.entry(volume).or_default();
            if *count >= CLIENTS_OF_VOLUME_MAX {
                return client;
            }
            *count += 1;
        }
        self.clients.insert(id, Arc::clone(&client));
        client
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_declare_nothing_finished_have_a_bounded_number_of_answers() {
        let clients = Clients::default();
        let (bounded, free) = (ClientId(1), ClientId(2));
        let (volume, sequence) = (Some(InodeId(100)), ANSWERS_OF_VOLUME_MAX);
        let ask = |client, volume, sequence| {
            clients.hear(RequestId { client, sequence, finished_below: 0 }, volume, 10);
        };
        ask(free, None, sequence * 2);
        assert!(!clients.has_finished(free, 0), "one with the cluster's key is trusted");
        ask(bounded, volume, sequence);
        assert!(!clients.has_finished(bounded, 0));
        ask(bounded, volume, sequence + 1);
        assert!(clients.has_finished(bounded, 0));
        assert!(!clients.has_finished(bounded, 1));
        (3..6).for_each(|client| clients.hear_of(ClientId(client), volume, 10));
        ask(bounded, volume, sequence + 2);
        assert!(clients.has_finished(bounded, sequence * 3 / 4), "four share them");
        assert!(!clients.has_finished(bounded, sequence * 3 / 4 + 2));
    }

    #[test]
    fn the_clients_of_one_volume_are_bounded_and_others_are_not() {
        let clients = Clients::default();
        let (bounded, other) = (Some(InodeId(100)), Some(InodeId(200)));
        let max = CLIENTS_OF_VOLUME_MAX as u128;
        for client in 0..max * 2 {
            clients.hear_of(ClientId(client), bounded, 10);
        }
        assert_eq!(clients.known().clients.len(), CLIENTS_OF_VOLUME_MAX);
        assert!(clients.heard_since(ClientId(max - 1), 10));
        assert!(!clients.heard_since(ClientId(max), 10));
        for (client, volume) in [(max * 2, other), (max * 2 + 1, None)] {
            clients.hear_of(ClientId(client), volume, 20);
            assert!(clients.heard_since(ClientId(client), 20));
        }
        clients.forget_silent(15);
        assert_eq!(clients.known().clients.len(), 2);
        clients.hear_of(ClientId(max), bounded, 30);
        assert!(clients.heard_since(ClientId(max), 30), "the others are forgotten");
    }
}
