//! Node of this rank, as all parts of its driver use it: identity, segment, registered memory and
//! doorbells of its ranks, and the poller.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;

use super::shared::{Identity, Shared};
use hfreduce_shm::arenas::Arenas;
use hfreduce_shm::segment::ShmSegment;
use hfreduce_transport::poller::{self, Poller};

/// The other ranks of the node, as seen by this rank.
pub struct NodePeers {
    /// Doorbells of all local ranks, by local index.
    pub doorbells: Vec<OwnedFd>,
    /// (local index, socket, process) of the ranks whose end is watched.
    pub watched: Vec<(usize, UnixStream, Option<OwnedFd>)>,
}

/// See the module's text.
pub(super) struct Node {
    pub shared: Arc<Shared>,
    pub shm: ShmSegment,
    pub peers: NodePeers,
    pub arenas: Arenas,
    pub poller: Poller,
    /// Ranks share CPUs: unnecessary wake-ups keep other ranks from working.
    pub is_crowded: bool,
}

impl Node {
    pub fn identity(&self) -> &Identity {
        &self.shared.identity
    }

    pub fn rank(&self) -> u32 {
        self.shared.identity.rank
    }

    /// This rank's index among the ranks of the node.
    pub fn local(&self) -> usize {
        self.shared.identity.local()
    }

    /// Number of ranks of the node.
    pub fn locals(&self) -> usize {
        self.shm.shape().locals
    }

    /// Local index of `peer`, if it is on this node.
    pub fn local_of(&self, peer: u32) -> Option<usize> {
        let identity = self.identity();
        let world = identity.placement.world_size();
        let near = (peer as usize) < world && identity.placement.node_of(peer) == identity.node();
        near.then(|| identity.placement.local_of(peer))
    }

    /// Counts bytes that this rank takes from memory that a local rank has filled. Its own memory
    /// does not count.
    pub fn count_taken(&self, local: usize, bytes: usize) {
        if local != self.local() {
            self.shared.peer_bytes.count_taken(self.identity().locals()[local], bytes);
        }
    }

    /// True if the group has one node: results are computed in place, or in their slots.
    pub fn is_alone(&self) -> bool {
        self.shared.identity.placement.nodes().len() == 1
    }

    /// True once an abort has been reported to the callers of this rank.
    pub fn is_broken(&self) -> bool {
        self.shared.broken.get().is_some()
    }

    /// Wakes a rank. Called after a change and [`ShmSegment::full_fence`].
    pub fn wake(&self, local: usize, reasons: u32) {
        if local != self.local() && self.shm.claim_wakeup(local, reasons) {
            self.shared.counters.wakeups.fetch_add(1, Ordering::Relaxed);
            poller::notify(&self.peers.doorbells[local]);
        }
    }

    pub fn wake_all(&self, reasons: u32) {
        self.shm.full_fence();
        for local in 0..self.locals() {
            self.wake(local, reasons);
        }
    }

    /// Stops watching a local rank whose process has ended.
    pub fn forget(&self, local: usize) {
        let ended = self.peers.watched.iter().filter(|(at, ..)| *at == local);
        for (_, socket, process) in ended {
            self.poller.forget(socket);
            if let Some(process) = process {
                self.poller.forget(process);
            }
        }
    }

    /// Clears the access flag of ranks whose process has ended.
    pub fn clear_ended_peers(&self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        for (local, socket, process) in &self.peers.watched {
            let mut end = match process {
                Some(process) => [PollFd::new(process, PollFlags::IN)],
                None => [PollFd::new(socket, PollFlags::HUP)],
            };
            if poll(&mut end, Some(&now)).is_ok_and(|ended| ended > 0) {
                self.shm.end_peer_access(*local);
            }
        }
    }
}
