//! Open file table: which inodes clients have open. An unlinked file is kept until no client has it
//! open.
//!
//! The table is in memory. A client that the service does not know reports all its open files
//! again, so a restart loses nothing for longer than the interval between two reports. Removed
//! files that are open have rows: see `ops::holds`.
//!
//! The entries of all clients with tickets of one volume are bounded in total. Files beyond the
//! bound are not tracked and are collected with their last name.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use threefs_core::ids::{ClientId, InodeId};

/// Open inodes of one client.
pub(crate) const OPEN_FILES_PER_CLIENT_MAX: usize = 1 << 20;
/// Pairs of client and open inode of one volume, about 130 bytes each.
pub(crate) const OPEN_FILES_PER_VOLUME_MAX: usize = 1 << 19;
/// Clients of one volume.
pub(crate) const CLIENTS_PER_VOLUME_MAX: usize = 1 << 14;
/// Maximum number of clients stored with a removal or a hold; it does not wait for others.
const OPENED_BY_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct OpenFiles {
    /// Distinguishes this run of the service from others.
    run_id: u64,
    clients_per_volume_max: usize,
    open_files_per_volume_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    clients: HashMap<ClientId, ClientFiles>,
    clients_of_inode: HashMap<InodeId, Vec<ClientId>>,
    volumes: HashMap<InodeId, VolumeUsage>,
}

/// Totals of the clients with tickets of one volume.
#[derive(Debug, Default)]
struct VolumeUsage {
    clients: usize,
    open_files: usize,
}

#[derive(Debug, Default)]
struct ClientFiles {
    /// The volume of the client's ticket; `None` for a holder of the cluster key.
    volume: Option<InodeId>,
    last_active_ms: u64,
    inodes: HashSet<InodeId>,
    /// The client has reported all its open files since this service started.
    complete: bool,
}

impl OpenFiles {
    /// An empty table. `run_id` is different for each run of the service.
    pub(crate) fn new(run_id: u64) -> Self {
        Self {
            run_id,
            clients_per_volume_max: CLIENTS_PER_VOLUME_MAX,
            open_files_per_volume_max: OPEN_FILES_PER_VOLUME_MAX,
            state: Mutex::default(),
        }
    }

    /// Id of this run of the service.
    pub(crate) fn run_id(&self) -> u64 {
        self.run_id
    }

    /// Records that a client with a ticket for `volume` has an inode open. Returns whether this
    /// call added the entry.
    pub(crate) fn open(
        &self,
        client: ClientId,
        volume: Option<InodeId>,
        inode: InodeId,
        now_ms: u64,
    ) -> bool {
        let mut state = self.state();
        if !state.admit(client, volume, self.clients_per_volume_max) {
            return false;
        }
        let State { clients, clients_of_inode, volumes } = &mut *state;
        let files = clients.entry(client).or_default();
        files.last_active_ms = files.last_active_ms.max(now_ms);
        let mut of_volume = files.volume.and_then(|volume| volumes.get_mut(&volume));
        let is_full = files.inodes.len() >= OPEN_FILES_PER_CLIENT_MAX
            || of_volume
                .as_ref()
                .is_some_and(|all| all.open_files >= self.open_files_per_volume_max);
        let is_new = !is_full && files.inodes.insert(inode);
        if is_new {
            clients_of_inode.entry(inode).or_default().push(client);
            if let Some(all) = &mut of_volume {
                all.open_files += 1;
            }
        }
        is_new
    }

    /// Applies a client's report. With `all`, `add` is everything that it has open. Returns false
    /// if the service does not know all its open files: the client must report again with `all`.
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
            self.open(client, volume, *inode, now_ms);
        }
        let mut state = self.state();
        if !state.admit(client, volume, self.clients_per_volume_max) {
            // The bound is reached: another report would not change anything.
            return true;
        }
        let State { clients, clients_of_inode, volumes } = &mut *state;
        let files = clients.entry(client).or_default();
        files.last_active_ms = files.last_active_ms.max(now_ms);
        files.complete |= all;
        let mut released = 0;
        for inode in release {
            if files.inodes.remove(inode) {
                close_one(clients_of_inode, client, *inode);
                released += 1;
            }
        }
        if let Some(all) = files.volume.and_then(|volume| volumes.get_mut(&volume)) {
            all.open_files -= released;
        }
        files.complete
    }

    /// Whether any client has the inode open.
    pub(crate) fn is_open(&self, inode: InodeId) -> bool {
        self.state().clients_of_inode.contains_key(&inode)
    }

    /// The clients that have the inode open.
    pub(crate) fn clients_with_open(&self, inode: InodeId) -> Vec<ClientId> {
        let state = self.state();
        let clients_of_inode =
            state.clients_of_inode.get(&inode).map(Vec::as_slice).unwrap_or_default();
        clients_of_inode.iter().take(OPENED_BY_MAX).copied().collect()
    }

    /// Drops clients that were not active since `since_ms`.
    pub(crate) fn expire_idle(&self, since_ms: u64) {
        let mut state = self.state();
        let State { clients, clients_of_inode, volumes } = &mut *state;
        clients.retain(|client, files| {
            let is_active = files.last_active_ms >= since_ms;
            if !is_active {
                files.inodes.iter().for_each(|inode| close_one(clients_of_inode, *client, *inode));
                if let Some(all) = files.volume.and_then(|volume| volumes.get_mut(&volume)) {
                    all.clients -= 1;
                    all.open_files -= files.inodes.len();
                }
            }
            is_active
        });
        volumes.retain(|_, all| all.clients > 0);
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether the client has an entry; adds one if the volume's bound allows.
    fn admit(&mut self, client: ClientId, volume: Option<InodeId>, clients_max: usize) -> bool {
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
        self.clients.insert(client, ClientFiles { volume, ..ClientFiles::default() });
        true
    }
}

fn close_one(
    clients_of_inode: &mut HashMap<InodeId, Vec<ClientId>>,
    client: ClientId,
    inode: InodeId,
) {
    if let Some(of_inode) = clients_of_inode.get_mut(&inode) {
        of_inode.retain(|holder| *holder != client);
        if of_inode.is_empty() {
            clients_of_inode.remove(&inode);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_open_until_the_last_client_closes_it_or_expires() {
        let open_files = OpenFiles::new(1);
        let (client_1, two, inode) = (ClientId(1), ClientId(2), InodeId(7));
        open_files.open(client_1, None, inode, 10);
        open_files.open(client_1, None, inode, 10);
        open_files.open(two, None, inode, 20);
        assert!(
            !open_files.update(client_1, None, &[], &[inode], false, 30),
            "it never reported everything"
        );
        assert!(open_files.is_open(inode));
        assert!(open_files.update(client_1, None, &[], &[], true, 30));
        open_files.expire_idle(25);
        assert!(!open_files.is_open(inode));
    }

    #[test]
    fn the_clients_of_one_volume_are_bounded_and_others_are_unaffected() {
        let open_files = OpenFiles {
            clients_per_volume_max: 4,
            open_files_per_volume_max: 10,
            ..OpenFiles::new(1)
        };
        let (bounded, other) = (Some(InodeId(100)), Some(InodeId(200)));
        for client in 0..50 {
            for inode in 0..5 {
                open_files.open(ClientId(client), bounded, InodeId(inode), 10);
            }
            assert!(open_files.update(ClientId(client), bounded, &[], &[], true, 10));
        }
        assert_eq!(open_files.state().clients.len(), 4);
        assert_eq!(
            open_files.state().clients.values().map(|it| it.inodes.len()).sum::<usize>(),
            10
        );
        open_files.open(ClientId(90), other, InodeId(9), 10);
        open_files.open(ClientId(91), None, InodeId(9), 10);
        assert_eq!(open_files.clients_with_open(InodeId(9)).len(), 2);
        // Released and expired entries free room.
        open_files.update(ClientId(0), bounded, &[InodeId(8)], &[InodeId(0)], false, 20);
        assert!(!open_files.is_open(InodeId(8)), "the volume was at its bound");
        open_files.open(ClientId(0), bounded, InodeId(8), 20);
        assert!(open_files.is_open(InodeId(8)));
        open_files.expire_idle(15);
        assert_eq!(open_files.state().volumes.len(), 1);
        for client in 10..50 {
            open_files.open(ClientId(client), bounded, InodeId(9), 30);
        }
        assert_eq!(open_files.state().clients.len(), 4);
        assert_eq!(open_files.clients_with_open(InodeId(9)).len(), 3);
        open_files.expire_idle(u64::MAX);
        let state = open_files.state();
        assert!(state.volumes.is_empty() && state.clients_of_inode.is_empty());
    }
}
