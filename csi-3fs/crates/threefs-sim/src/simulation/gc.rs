//! Removal of a file: its clients stop, its updates expire, all replicas forget its inode, and no
//! chunk of it reappears.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::error::StorageError;
use threefs_core::forgotten::InodeRange;
use threefs_core::ids::{ChunkId, InodeId};
use threefs_core::message::{Address, ForgetInodes, StorageReply, StorageRequest};

use super::{CallerId, Packet, SimEvent, Simulation, Violation};
use crate::fault_plan::FAULTS_END_US;
use crate::mutations::Mutation;
use crate::topology::chain_id;

/// Its inode.
const REMOVED: InodeId = InodeId(8);
/// Seed of the generator of removals.
const SEED: u64 = 0x676f_6e65;
/// Its chunks.
const CHUNKS: u32 = 3;
/// Interval between two requests to forget it.
const RETRY_US: u64 = 20_000;

/// The removed file, in some of the schedules.
#[derive(Debug)]
pub(crate) struct Removal {
    rng: ChaCha8Rng,
    /// No update of it starts at or after this time.
    at: Option<u64>,
    /// For each chain: the last request, and whether it is complete.
    chains: Vec<(Option<u64>, bool)>,
    /// Garbage collection is running.
    running: bool,
}

impl Removal {
    pub(crate) fn new(seed: u64, mutation: Mutation, chains: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ SEED);
        let some = rng.random_bool(0.3) || mutation.needs_removal();
        let at = some.then(|| rng.random_range(50_000..FAULTS_END_US));
        Self { rng, at, chains: vec![(None, false); chains], running: false }
    }

    /// Whether the removal is complete.
    pub(crate) fn is_done(&self) -> bool {
        self.at.is_none() || self.chains.iter().all(|(_, forgotten)| *forgotten)
    }

    /// When its updates expire.
    pub(crate) fn at(&self) -> Option<u64> {
        self.at
    }

    /// A chunk of this file for an update that starts now, by chance.
    pub(crate) fn chunk(&mut self, now: u64) -> Option<ChunkId> {
        let at = self.at.filter(|at| now < *at)?;
        let picked = self.rng.random_bool(0.3) && now < at;
        picked.then(|| ChunkId::new(REMOVED, self.rng.random_range(0..CHUNKS)))
    }
}

/// Whether this is a chunk of the removed file.
pub(crate) fn is_removed(chunk: ChunkId) -> bool {
    chunk.inode == REMOVED
}

/// All chunks of the removed file.
pub(super) fn removed_chunks() -> impl Iterator<Item = ChunkId> {
    (0..CHUNKS).map(|index| ChunkId::new(REMOVED, index))
}

impl Simulation {
    /// Requests the heads to forget the inode, until all have done so.
    pub(super) fn run_gc(&mut self) {
        self.removal.running = !self.removal.is_done();
        if self.removal.is_done() {
            return;
        }
        self.push(RETRY_US, SimEvent::Collect);
        for chain in 0..self.topology.chains {
            if !self.removal.chains[chain].1 {
                self.forget_on_chain(chain);
            }
        }
    }

    fn forget_on_chain(&mut self, chain: usize) {
        let published = self.manager.chain(chain_id(chain));
        let Some((head, version)) =
            published.and_then(|chain| Some((*chain.head()?, chain.version)))
        else {
            return;
        };
        let to = Address { chain: chain_id(chain), chain_version: version, target: head.target };
        let inodes = vec![InodeRange::one(REMOVED)];
        let request = StorageRequest::ForgetInodes(ForgetInodes::of_head(to, inodes));
        self.rpcs += 1;
        self.removal.chains[chain].0 = Some(self.rpcs);
        // Any client endpoint can be used.
        let from = self.manager_endpoint() + 1;
        let (caller, deadline) = (CallerId::client(from, self.rpcs), self.now + RETRY_US);
        let packet = Packet::request(caller, request, bytes::Bytes::new(), deadline);
        self.send(from, head.node.0 as usize, packet);
    }

    /// Restarts the removal on a chain whose new head may not have forgotten the inode.
    pub(super) fn forget_again(&mut self, chain: usize) {
        if self.removal.at.is_none_or(|at| self.now < at) {
            return;
        }
        self.removal.chains[chain] = (None, false);
        if !self.removal.running {
            self.push(0, SimEvent::Collect);
        }
    }

    /// Handles a reply to garbage collection; false for other replies.
    pub(crate) fn gc_answered(
        &mut self,
        rpc: u64,
        result: &Result<StorageReply, StorageError>,
    ) -> bool {
        let Some(chain) = self.removal.chains.iter().position(|(call, _)| *call == Some(rpc))
        else {
            return false;
        };
        if matches!(result, Ok(StorageReply::InodesForgotten)) {
            self.note(|| format!("FORGOTTEN {REMOVED} by {}", chain_id(chain)));
            self.removal.chains[chain].1 = true;
        }
        true
    }

    /// Checks that no replica has any state of the file, so that the index does not grow.
    pub(super) fn check_forgotten(&self) -> Result<(), Violation> {
        if self.removal.at.is_none() {
            return Ok(());
        }
        for at in self.members() {
            let mut chunks = self.hosted(at).store.slots().keys();
            if let Some(chunk) = chunks.find(|chunk| is_removed(**chunk)) {
                let name = self.name(at);
                return Err(self.violation(format!("{name} has {chunk}, which was forgotten")));
            }
        }
        Ok(())
    }
}
