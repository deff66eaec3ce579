//! A file that is removed: its clients stop, its updates expire, its inode is forgotten by all
//! replicas and nothing brings it back.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::error::StorageError;
use threefs_core::forgotten::InodeRange;
use threefs_core::ids::{ChunkId, InodeId};
use threefs_core::message::{Address, ForgetInodes, StorageReply, StorageRequest};

use super::{CHAIN, Happening, Packet, Violation, World};
use crate::faults::CALM_AT_US;
use crate::mutant::Mutant;

/// Its inode.
const REMOVED: InodeId = InodeId(8);
/// Separates its random numbers from those of everything else.
const SEED: u64 = 0x676f_6e65;
/// Between two requests to forget it.
const RETRY_US: u64 = 20_000;

/// The file, in a part of the schedules.
#[derive(Debug)]
pub(crate) struct Removal {
    rng: ChaCha8Rng,
    /// No update of it is begun from then on, anywhere.
    at: Option<u64>,
    rpc: Option<u64>,
    forgotten: bool,
}

impl Removal {
    pub(crate) fn new(seed: u64, mutant: Mutant) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ SEED);
        let some = rng.random_bool(0.3) || mutant.needs_removal();
        let at = some.then(|| rng.random_range(50_000..CALM_AT_US));
        Self { rng, at, rpc: None, forgotten: false }
    }

    /// Is nothing left to be done?
    pub(crate) fn is_done(&self) -> bool {
        self.at.is_none() || self.forgotten
    }

    /// When its updates end.
    pub(crate) fn at(&self) -> Option<u64> {
        self.at
    }

    /// May this chunk be forgotten already?
    pub(crate) fn has_begun(&self, chunk: ChunkId, now: u64) -> bool {
        is_removed(chunk) && self.at.is_some_and(|at| now >= at)
    }

    /// Does an update that begins now change this file? Then one of its chunks.
    pub(crate) fn chunk(&mut self, now: u64) -> Option<ChunkId> {
        let at = self.at.filter(|at| now < *at)?;
        let chosen = self.rng.random_bool(0.3) && now < at;
        chosen.then(|| ChunkId::new(REMOVED, self.rng.random_range(0..3)))
    }
}

/// Is it a chunk of the removed file?
pub(crate) fn is_removed(chunk: ChunkId) -> bool {
    chunk.inode == REMOVED
}

impl World {
    /// The collector asks the head to forget the inode, until it is done.
    pub(super) fn collect(&mut self) {
        if self.removal.forgotten {
            return;
        }
        self.push(RETRY_US, Happening::Collect);
        let chain = self.manager.chain(CHAIN);
        let Some((head, version)) = chain.and_then(|chain| Some((*chain.head()?, chain.version)))
        else {
            return;
        };
        let to = Address { chain: CHAIN, chain_version: version, target: head.target };
        let inodes = vec![InodeRange::one(REMOVED)];
        let request = StorageRequest::ForgetInodes(ForgetInodes { to, from: None, inodes, hop: 0 });
        self.rpcs += 1;
        self.removal.rpc = Some(self.rpcs);
        let packet = Packet::request(self.rpcs, 0, request, bytes::Bytes::new());
        // Any client endpoint will do.
        let from = self.manager_endpoint() + 1;
        self.send(from, head.node.0 as usize, packet);
    }

    /// Takes an answer if it is the collector's.
    pub(crate) fn collected(
        &mut self,
        rpc: u64,
        result: &Result<StorageReply, StorageError>,
    ) -> bool {
        let ours = self.removal.rpc == Some(rpc);
        if ours && matches!(result, Ok(StorageReply::InodesForgotten)) {
            self.note(|| format!("FORGOTTEN {REMOVED}"));
            self.removal.forgotten = true;
        }
        ours
    }

    /// All is quiet: nobody has anything of it, so the index is as large as what exists.
    pub(super) fn check_forgotten(&self) -> Result<(), Violation> {
        if self.removal.at.is_none() {
            return Ok(());
        }
        for (index, node) in self.members() {
            if let Some(chunk) = node.store.slots().keys().find(|chunk| is_removed(**chunk)) {
                return Err(
                    self.violation(format!("node {index} has {chunk}, which was forgotten"))
                );
            }
        }
        Ok(())
    }
}
