//! Which inodes clients have open: what has lost its last name stays until nobody holds it.
//!
//! Kept in memory. A client announces everything again when it is not known, so a restart of the
//! service forgets nothing for longer than a client's pause between two messages. What had a holder
//! when it was removed says so in its row of the queue: after a restart it waits for exactly these
//! clients, however long they are cut off, until they are given up as gone.
//!
//! What the holders of one volume's tickets may announce is bounded, under however many client ids:
//! what goes beyond is not kept, and such a file is gone with its last name.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use threefs_core::ids::{ClientId, InodeId};

use crate::rows::RemovalRow;

/// Inodes that one client may hold open.
pub(crate) const HOLDS_MAX: usize = 1 << 20;
/// Pairs of a client and an inode of one volume: about 130 bytes each.
pub(crate) const HOLDS_OF_VOLUME_MAX: usize = 1 << 19;
/// Clients of one volume.
pub(crate) const CLIENTS_OF_VOLUME_MAX: usize = 1 << 14;
/// Holders that a removal names; with more of them it waits for these.
const HOLDERS_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct Holds {
    /// Tells this life of the service from others.
    life: u64,
    clients_of_volume_max: usize,
    holds_of_volume_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    clients: HashMap<ClientId, Held>,
    holders: HashMap<InodeId, Vec<ClientId>>,
    volumes: HashMap<InodeId, OfVolume>,
    /// Clients of former lives that have not come back are gone.
    gave_up: bool,
}

/// What the clients with tickets of one volume have together.
#[derive(Debug, Default)]
struct OfVolume {
    clients: usize,
    holds: usize,
}

#[derive(Debug, Default)]
struct Held {
    /// Whose ticket it has; `None` for the cluster's key.
    volume: Option<InodeId>,
    heard_ms: u64,
    inodes: HashSet<InodeId>,
    /// It has announced all that it holds since this service began.
    complete: bool,
}

impl Holds {
    /// Nothing is held yet. `life` is different for each life of the service.
    pub(crate) fn new(life: u64) -> Self {
        Self {
            life,
            clients_of_volume_max: CLIENTS_OF_VOLUME_MAX,
            holds_of_volume_max: HOLDS_OF_VOLUME_MAX,
            state: Mutex::default(),
        }
    }

    /// This life of the service.
    pub(crate) fn life(&self) -> u64 {
        self.life
    }

    /// A client, of the volume whose ticket it has, holds one more inode.
    pub(crate) fn hold(
        &self,
        client: ClientId,
        volume: Option<InodeId>,
        inode: InodeId,
        now_ms: u64,
    ) {
        let mut state = self.state();
        if !state.knows(client, volume, self.clients_of_volume_max) {
            return;
        }
        let State { clients, holders, volumes, .. } = &mut *state;
        let held = clients.entry(client).or_default();
        held.heard_ms = held.heard_ms.max(now_ms);
        let mut of_volume = held.volume.and_then(|volume| volumes.get_mut(&volume));
        let is_full = held.inodes.len() >= HOLDS_MAX
            || of_volume.as_ref().is_some_and(|all| all.holds >= self.holds_of_volume_max);
        if !is_full && held.inodes.insert(inode) {
            holders.entry(inode).or_default().push(client);
            if let Some(all) = &mut of_volume {
                all.holds += 1;
            }
        }
    }

    /// What a client holds more and less than before. With `all`, `add` is everything that it
    /// holds. False: this service does not know all that it holds; it must announce it with `all`.
    pub(crate) fn update(
        &self,
        client: ClientId,
        volume: Option<InodeId>,
        add: &[InodeId],
        release: &[InodeId],
        all: bool,
        now_ms: u64,
    ) -> bool {
        for inode in add {
            self.hold(client, volume, *inode, now_ms);
        }
        let mut state = self.state();
        if !state.knows(client, volume, self.clients_of_volume_max) {
            // Announcing it again would change nothing.
            return true;
        }
        let State { clients, holders, volumes, .. } = &mut *state;
        let held = clients.entry(client).or_default();
        held.heard_ms = held.heard_ms.max(now_ms);
        held.complete |= all;
        let mut released = 0;
        for inode in release {
            if held.inodes.remove(inode) {
                drop_one(holders, client, *inode);
                released += 1;
            }
        }
        if let Some(all) = held.volume.and_then(|volume| volumes.get_mut(&volume)) {
            all.holds -= released;
        }
        held.complete
    }

    /// Whether anybody has it open.
    pub(crate) fn is_held(&self, inode: InodeId) -> bool {
        self.state().holders.contains_key(&inode)
    }

    /// Who has it open.
    pub(crate) fn holders(&self, inode: InodeId) -> Vec<ClientId> {
        let state = self.state();
        let holders = state.holders.get(&inode).map(Vec::as_slice).unwrap_or_default();
        holders.iter().take(HOLDERS_MAX).copied().collect()
    }

    /// Whether somebody had it open in a former life of the service and has not yet announced
    /// whether he still has.
    pub(crate) fn may_be_held(&self, removal: &RemovalRow) -> bool {
        let state = self.state();
        if removal.life == self.life || state.gave_up {
            return false;
        }
        let complete = |client| state.clients.get(client).is_some_and(|held| held.complete);
        !removal.holders.iter().all(complete)
    }

    /// Forgets clients that were not heard since `since_ms`, and those of former lives.
    pub(crate) fn forget_silent(&self, since_ms: u64) {
        let mut state = self.state();
        let State { clients, holders, volumes, gave_up } = &mut *state;
        *gave_up = true;
        clients.retain(|client, held| {
            let lives = held.heard_ms >= since_ms;
            if !lives {
                held.inodes.iter().for_each(|inode| drop_one(holders, *client, *inode));
                if let Some(all) = held.volume.and_then(|volume| volumes.get_mut(&volume)) {
                    all.clients -= 1;
                    all.holds -= held.inodes.len();
                }
            }
            lives
        });
        volumes.retain(|_, all| all.clients > 0);
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether the client is known; one more of a volume is from now on, if there is a place.
    fn knows(&mut self, client: ClientId, volume: Option<InodeId>, clients_max: usize) -> bool {
        if self.clients.contains_key(&client) {
            return true;
        }
        if let Some(volume) = volume {
            let all = self.volumes.entry(volume).or_default();
            if all.clients >= clients_max {
                return false;
            }
            all.clients += 1;
        }
        self.clients.insert(client, Held { volume, ..Held::default() });
        true
    }
}

fn drop_one(holders: &mut HashMap<InodeId, Vec<ClientId>>, client: ClientId, inode: InodeId) {
    if let Some(of_inode) = holders.get_mut(&inode) {
        of_inode.retain(|holder| *holder != client);
        if of_inode.is_empty() {
            holders.remove(&inode);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::EntryKind;

    #[test]
    fn an_inode_is_held_until_the_last_client_lets_go_or_falls_silent() {
        let holds = Holds::new(1);
        let (one, two, inode) = (ClientId(1), ClientId(2), InodeId(7));
        holds.hold(one, None, inode, 10);
        holds.hold(one, None, inode, 10);
        holds.hold(two, None, inode, 20);
        assert!(
            !holds.update(one, None, &[], &[inode], false, 30),
            "it never announced everything"
        );
        assert!(holds.is_held(inode));
        assert!(holds.update(one, None, &[], &[], true, 30));
        holds.forget_silent(25);
        assert!(!holds.is_held(inode));
    }

    #[test]
    fn what_a_former_life_knew_to_be_open_waits_for_its_holders() {
        let holds = Holds::new(2);
        let holders = vec![ClientId(1), ClientId(2)];
        let row = RemovalRow { inode: InodeId(7), kind: EntryKind::File, life: 1, holders };
        assert!(holds.may_be_held(&row));
        holds.update(ClientId(1), None, &[], &[], true, 5);
        assert!(holds.may_be_held(&row), "the other one may be cut off");
        holds.update(ClientId(2), None, &[InodeId(7)], &[], true, 5);
        assert!(!holds.may_be_held(&row) && holds.is_held(InodeId(7)));
        let never_heard = RemovalRow { holders: vec![ClientId(3)], ..row };
        assert!(holds.may_be_held(&never_heard));
        holds.forget_silent(5);
        assert!(!holds.may_be_held(&never_heard), "it was waited for long enough");
    }

    #[test]
    fn the_clients_of_one_volume_are_bounded_and_take_nothing_from_others() {
        let holds = Holds { clients_of_volume_max: 4, holds_of_volume_max: 10, ..Holds::new(1) };
        let (bounded, other) = (Some(InodeId(100)), Some(InodeId(200)));
        for client in 0..50 {
            for inode in 0..5 {
                holds.hold(ClientId(client), bounded, InodeId(inode), 10);
            }
            assert!(holds.update(ClientId(client), bounded, &[], &[], true, 10));
        }
        assert_eq!(holds.state().clients.len(), 4);
        assert_eq!(holds.state().clients.values().map(|it| it.inodes.len()).sum::<usize>(), 10);
        holds.hold(ClientId(90), other, InodeId(9), 10);
        holds.hold(ClientId(91), None, InodeId(9), 10);
        assert_eq!(holds.holders(InodeId(9)).len(), 2);
        // What is released or forgotten leaves room.
        holds.update(ClientId(0), bounded, &[InodeId(8)], &[InodeId(0)], false, 20);
        assert!(!holds.is_held(InodeId(8)), "it was full when that came");
        holds.hold(ClientId(0), bounded, InodeId(8), 20);
        assert!(holds.is_held(InodeId(8)));
        holds.forget_silent(15);
        assert_eq!(holds.state().volumes.len(), 1);
        for client in 10..50 {
            holds.hold(ClientId(client), bounded, InodeId(9), 30);
        }
        assert_eq!(holds.state().clients.len(), 4);
        assert_eq!(holds.holders(InodeId(9)).len(), 3);
        holds.forget_silent(u64::MAX);
        let state = holds.state();
        assert!(state.volumes.is_empty() && state.holders.is_empty());
    }
}
