//! Which inodes clients have open: what has lost its last name stays until nobody holds it.
//!
//! Kept in memory. A client announces everything again when it is not known, so a restart of the
//! service forgets nothing for longer than a client's pause between two messages. What had a holder
//! when it was removed says so in its row of the queue: after a restart it waits for exactly these
//! clients, however long they are cut off, until they are given up as gone.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use threefs_core::ids::{ClientId, InodeId};

use crate::rows::RemovalRow;

/// Inodes that one client may hold open.
pub(crate) const HOLDS_MAX: usize = 1 << 20;
/// Holders that a removal names; with more of them it waits for these.
const HOLDERS_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct Holds {
    /// Tells this life of the service from others.
    life: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    clients: HashMap<ClientId, Held>,
    holders: HashMap<InodeId, Vec<ClientId>>,
    /// Clients of former lives that have not come back are gone.
    gave_up: bool,
}

#[derive(Debug, Default)]
struct Held {
    heard_ms: u64,
    inodes: HashSet<InodeId>,
    /// It has announced all that it holds since this service began.
    complete: bool,
}

impl Holds {
    /// Nothing is held yet. `life` is different for each life of the service.
    pub(crate) fn new(life: u64) -> Self {
        Self { life, state: Mutex::default() }
    }

    /// This life of the service.
    pub(crate) fn life(&self) -> u64 {
        self.life
    }

    /// A client holds one more inode.
    pub(crate) fn hold(&self, client: ClientId, inode: InodeId, now_ms: u64) {
        let mut state = self.state();
        let State { clients, holders, .. } = &mut *state;
        let held = clients.entry(client).or_default();
        held.heard_ms = held.heard_ms.max(now_ms);
        if held.inodes.len() < HOLDS_MAX && held.inodes.insert(inode) {
            holders.entry(inode).or_default().push(client);
        }
    }

    /// What a client holds more and less than before. With `all`, `add` is everything that it
    /// holds. False: this service does not know all that it holds; it must announce it with `all`.
    pub(crate) fn update(
        &self,
        client: ClientId,
        add: &[InodeId],
        release: &[InodeId],
        all: bool,
        now_ms: u64,
    ) -> bool {
        for inode in add {
            self.hold(client, *inode, now_ms);
        }
        let mut state = self.state();
        let State { clients, holders, .. } = &mut *state;
        let held = clients.entry(client).or_default();
        held.heard_ms = held.heard_ms.max(now_ms);
        held.complete |= all;
        for inode in release {
            if held.inodes.remove(inode) {
                drop_one(holders, client, *inode);
            }
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
        let State { clients, holders, gave_up } = &mut *state;
        *gave_up = true;
        clients.retain(|client, held| {
            let lives = held.heard_ms >= since_ms;
            if !lives {
                held.inodes.iter().for_each(|inode| drop_one(holders, *client, *inode));
            }
            lives
        });
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        holds.hold(one, inode, 10);
        holds.hold(one, inode, 10);
        holds.hold(two, inode, 20);
        assert!(!holds.update(one, &[], &[inode], false, 30), "it never announced everything");
        assert!(holds.is_held(inode));
        assert!(holds.update(one, &[], &[], true, 30));
        holds.forget_silent(25);
        assert!(!holds.is_held(inode));
    }

    #[test]
    fn what_a_former_life_knew_to_be_open_waits_for_its_holders() {
        let holds = Holds::new(2);
        let holders = vec![ClientId(1), ClientId(2)];
        let row = RemovalRow { inode: InodeId(7), kind: EntryKind::File, life: 1, holders };
        assert!(holds.may_be_held(&row));
        holds.update(ClientId(1), &[], &[], true, 5);
        assert!(holds.may_be_held(&row), "the other one may be cut off");
        holds.update(ClientId(2), &[InodeId(7)], &[], true, 5);
        assert!(!holds.may_be_held(&row) && holds.is_held(InodeId(7)));
        let never_heard = RemovalRow { holders: vec![ClientId(3)], ..row };
        assert!(holds.may_be_held(&never_heard));
        holds.forget_silent(5);
        assert!(!holds.may_be_held(&never_heard), "it was waited for long enough");
    }
}
