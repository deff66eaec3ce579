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
    /// Its newest change.
    newest: AtomicU64,
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

    /// Answers that are kept for it at most.
    fn answers(&self) -> u64 {
        self.newest.load(SeqCst).saturating_sub(self.floor.load(SeqCst))
    }
}

/// All clients of this life of the service. Of one volume a bounded number: further ones are taken
/// for silent. They share the answers that are kept for the volume: above the bound, the oldest
/// changes of a client with more than an even share count as finished.
#[derive(Debug, Default)]
pub(crate) struct Clients(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    clients: HashMap<ClientId, Arc<Client>>,
    of_volume: HashMap<InodeId, OfVolume>,
}

#[derive(Debug, Default)]
struct OfVolume {
    clients: usize,
    /// Kept for all of them.
    answers: u64,
}

impl Clients {
    /// A change of this client, of the volume whose ticket it has, has arrived.
    pub(crate) fn hear(&self, id: RequestId, volume: Option<InodeId>, now_ms: u64) -> Arc<Client> {
        let mut known = self.known();
        let client = known.client(id.client, volume);
        let answers = client.answers();
        client.newest.fetch_max(id.sequence, SeqCst);
        client.floor.fetch_max(id.finished_below, SeqCst);
        known.bound_answers(&client, answers);
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
            if !stays && let Some(all) = client.volume.and_then(|volume| of_volume.get_mut(&volume))
            {
                all.clients -= 1;
                all.answers -= client.answers();
            }
            stays
        });
        of_volume.retain(|_, all| all.clients > 0);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    /// A client that is kept had `before` answers and may have more now.
    fn bound_answers(&mut self, client: &Arc<Client>, before: u64) {
        let all = client.volume.and_then(|volume| self.of_volume.get_mut(&volume));
        // One that is not kept is held here alone.
        let Some(all) = all.filter(|_| Arc::strong_count(client) > 1) else { return };
        let others = all.answers - before;
        if others.saturating_add(client.answers()) > ANSWERS_OF_VOLUME_MAX {
            let share = ANSWERS_OF_VOLUME_MAX / all.clients.max(1) as u64;
            let floor = client.newest.load(SeqCst).saturating_sub(share);
            client.floor.fetch_max(floor, SeqCst);
        }
        all.answers = others + client.answers();
    }

    /// The entry of a client. One more than a volume may have gets one that is not kept.
    fn client(&mut self, id: ClientId, volume: Option<InodeId>) -> Arc<Client> {
        if let Some(client) = self.clients.get(&id) {
            return Arc::clone(client);
        }
        let client = Arc::new(Client { volume, ..Client::default() });
        if let Some(volume) = volume {
            let all = self.of_volume.entry(volume).or_default();
            if all.clients >= CLIENTS_OF_VOLUME_MAX {
                return client;
            }
            all.clients += 1;
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

    /// A long truncation of one client, beside which it goes on with other changes.
    #[test]
    fn a_slow_change_is_not_taken_for_finished_because_there_are_many_clients() {
        let clients = Clients::default();
        let (volume, slow) = (Some(InodeId(100)), ClientId(1 << 20));
        (0..1_000).for_each(|client| clients.hear_of(ClientId(client), volume, 10));
        for sequence in 5..100_000 {
            clients.hear(RequestId { client: slow, sequence, finished_below: 5 }, volume, 10);
        }
        assert!(clients.has_finished(slow, 4) && !clients.has_finished(slow, 5));
        clients.forget_silent(20);
        assert!(clients.known().of_volume.is_empty());
    }

    #[test]
    fn all_clients_together_have_a_bounded_number_of_answers() {
        let clients = Clients::default();
        let volume = Some(InodeId(100));
        for sequence in [1, ANSWERS_OF_VOLUME_MAX, u64::MAX] {
            for client in 0..100 {
                let id = RequestId { client: ClientId(client), sequence, finished_below: 0 };
                clients.hear(id, volume, 10);
                let known = clients.known();
                let sum = known.clients.values().map(|it| it.answers()).sum::<u64>();
                let all = &known.of_volume[&InodeId(100)];
                assert_eq!(sum, all.answers);
                assert!(sum <= 2 * ANSWERS_OF_VOLUME_MAX);
            }
        }
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
