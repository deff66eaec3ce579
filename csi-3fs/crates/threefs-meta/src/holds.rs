//! Which inodes clients have open: what has lost its last name stays until nobody holds it.
//!
//! Kept in memory. A client says it again when it is told that it is not known, so a restart of
//! the service forgets nothing for longer than a client's pause between two messages, and until
//! then nothing is collected (`TreeConfig::collect_delay_ms`).

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use threefs_core::ids::{ClientId, InodeId};

/// Inodes that one client may hold open.
pub(crate) const HOLDS_MAX: usize = 1 << 20;

#[derive(Debug, Default)]
pub(crate) struct Holds(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    clients: HashMap<ClientId, Held>,
    count: HashMap<InodeId, u32>,
}

#[derive(Debug, Default)]
struct Held {
    heard_ms: u64,
    inodes: HashSet<InodeId>,
    /// It has told all that it holds since this service began.
    complete: bool,
}

impl Holds {
    /// A client holds one more inode.
    pub(crate) fn hold(&self, client: ClientId, inode: InodeId, now_ms: u64) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let State { clients, count } = &mut *state;
        let held = clients.entry(client).or_default();
        held.heard_ms = held.heard_ms.max(now_ms);
        if held.inodes.len() < HOLDS_MAX && held.inodes.insert(inode) {
            *count.entry(inode).or_default() += 1;
        }
    }

    /// What a client holds more and less than before. With `all`, `add` is everything that it
    /// holds. False: this service does not know all that it holds; it must say so with `all`.
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
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let State { clients, count } = &mut *state;
        let held = clients.entry(client).or_default();
        held.heard_ms = held.heard_ms.max(now_ms);
        held.complete |= all;
        for inode in release {
            if held.inodes.remove(inode) {
                drop_one(count, *inode);
            }
        }
        held.complete
    }

    /// Whether anybody has it open.
    pub(crate) fn is_held(&self, inode: InodeId) -> bool {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.count.contains_key(&inode)
    }

    /// Forgets clients that were not heard since `since_ms`.
    pub(crate) fn forget_silent(&self, since_ms: u64) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let State { clients, count } = &mut *state;
        clients.retain(|_, held| {
            let lives = held.heard_ms >= since_ms;
            if !lives {
                held.inodes.iter().for_each(|inode| drop_one(count, *inode));
            }
            lives
        });
    }
}

fn drop_one(count: &mut HashMap<InodeId, u32>, inode: InodeId) {
    if let Some(holders) = count.get_mut(&inode) {
        *holders -= 1;
        if *holders == 0 {
            count.remove(&inode);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_held_until_the_last_client_lets_go_or_falls_silent() {
        let holds = Holds::default();
        let (one, two, inode) = (ClientId(1), ClientId(2), InodeId(7));
        holds.hold(one, inode, 10);
        holds.hold(one, inode, 10);
        holds.hold(two, inode, 20);
        assert!(!holds.update(one, &[], &[inode], false, 30), "it never told everything");
        assert!(holds.is_held(inode));
        assert!(holds.update(one, &[], &[], true, 30));
        holds.forget_silent(25);
        assert!(!holds.is_held(inode));
    }
}
