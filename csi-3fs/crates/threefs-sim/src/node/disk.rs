//! A node's disk: work takes time, and its end is an event of the replica.

use bytes::Bytes;
use rand::Rng;
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ChunkState, StoreUpdate, TagWindow, Which};
use threefs_core::error::{StorageError, StoreError};
use threefs_core::ids::ChunkId;
use threefs_core::message::{Content, ReadDone, ReadRequest, RepairRequest, StorageReply, Updated};
use threefs_core::replica::{Event, OpId, Token};

use crate::mutant::Mutant;
use crate::store::Version;
use crate::world::{Happening, Violation, World};

/// Work of a disk, done when its time comes.
#[derive(Clone, Debug)]
pub(crate) enum Job {
    Apply { op: OpId, update: StoreUpdate, payload: Bytes, begun: Option<ChunkState> },
    Commit { op: OpId, result: Result<ChunkState, StoreError> },
    Forgotten { op: OpId },
    InodesForgotten { op: OpId },
    Content { op: OpId, chunk: ChunkId, which: Which },
    Read { token: Token, request: ReadRequest, chain_version: threefs_core::ids::ChainVersion },
    Repair { token: Token, request: RepairRequest, which: Which },
}

impl World {
    pub(super) fn begin_apply(
        &mut self,
        node: usize,
        op: OpId,
        mut update: StoreUpdate,
        payload: Bytes,
    ) {
        if self.mutant == Mutant::ForgetTags
            && let Some(newest) = update.tags.newest().copied()
        {
            // Only the newest is kept, to know who made the version.
            update.tags = TagWindow::default().with(newest.tag, newest.version);
        }
        // The real store shows a pending state at some moment between beginning and end.
        let early = !self.nodes[node].full && self.rng.random_bool(0.5);
        let begun = if early { self.nodes[node].store.apply(&update, &payload).ok() } else { None };
        self.disk(node, 100..2_500, Job::Apply { op, update, payload, begun });
    }

    pub(super) fn disk(&mut self, node: usize, takes: std::ops::Range<u64>, job: Job) {
        let mut after = self.rng.random_range(takes);
        if !self.calm && self.rng.random_bool(0.02) {
            after *= 20;
        }
        let hangs = self.nodes[node].disk_hangs_until.saturating_sub(self.now);
        let life = self.nodes[node].life;
        self.push(hangs + after, Happening::Disk { node, life, job: Box::new(job) });
    }

    pub(crate) fn disk_done(&mut self, node: usize, life: u64, job: Job) -> Result<(), Violation> {
        let hangs = self.nodes[node].disk_hangs_until.saturating_sub(self.now);
        if hangs > 0 {
            self.push(hangs, Happening::Disk { node, life, job: Box::new(job) });
            return Ok(());
        }
        let event = match job {
            Job::Apply { op, update, payload, begun } => {
                let result = self.end_apply(node, &update, &payload, begun);
                self.acknowledge_early(node, &result);
                Event::Applied { op, result }
            }
            Job::Commit { op, result } => Event::Committed { op, result },
            Job::Forgotten { op } => Event::Forgotten { op, result: Ok(()) },
            Job::InodesForgotten { op } => {
                self.nodes[node].store.flush();
                Event::InodesForgotten { op, result: Ok(()) }
            }
            Job::Content { op, chunk, which } => {
                let read = self.nodes[node].store.read(chunk, which);
                Event::Content { op, result: read.map(|found| (found.state, found.bytes)) }
            }
            Job::Read { token, request, chain_version } => {
                return self.end_read(node, token, &request, chain_version);
            }
            Job::Repair { token, request, which } => {
                let read = self.nodes[node].store.read(request.chunk, which);
                let (result, payload) = match read {
                    Ok(Version { state, bytes }) => {
                        let (version, checksum) = (state.version, state.checksum);
                        (Ok(StorageReply::Content(Content { version, checksum })), bytes)
                    }
                    Err(error) => (Err(error.at(self.nodes[node].target)), Bytes::new()),
                };
                self.reply(node, token, result, payload);
                return Ok(());
            }
        };
        self.give(node, event)
    }

    fn end_apply(
        &mut self,
        node: usize,
        update: &StoreUpdate,
        payload: &Bytes,
        begun: Option<ChunkState>,
    ) -> Result<ChunkState, StoreError> {
        let state = &mut self.nodes[node];
        let result = match begun {
            Some(pending) => Ok(pending),
            None if state.full && !payload.is_empty() => {
                Err(StoreError::NoSpace { needed_bytes: payload.len() as u64 })
            }
            None => state.store.apply(update, payload),
        };
        if result.is_ok() && self.mutant != Mutant::LoseFlush {
            state.store.flush();
        }
        result
    }

    fn acknowledge_early(&mut self, node: usize, result: &Result<ChunkState, StoreError>) {
        if self.mutant == Mutant::AcknowledgeBeforeTail
            && let Ok(pending) = result
            && let Some(newest) = pending.tags.newest()
            && let Some(token) = self.nodes[node].update_tokens.remove(&newest.tag)
        {
            let done = Updated {
                version: pending.version,
                length: pending.length,
                checksum: pending.checksum,
                chain_version: pending.chain_version,
            };
            self.reply(node, token, Ok(StorageReply::Updated(done)), Bytes::new());
        }
    }

    fn end_read(
        &mut self,
        node: usize,
        token: Token,
        request: &ReadRequest,
        chain_version: threefs_core::ids::ChainVersion,
    ) -> Result<(), Violation> {
        match self.nodes[node].store.read(request.chunk, Which::Committed) {
            Ok(version) => {
                let (result, payload) = read_reply(request, version, chain_version);
                self.reply(node, token, result, payload);
                Ok(())
            }
            Err(error) => {
                let damaged = matches!(error, StoreError::Corrupt { .. });
                let target = self.nodes[node].target;
                self.reply(node, token, Err(error.at(target)), Bytes::new());
                if damaged {
                    return self.give(node, Event::DamageFound { chunk: request.chunk });
                }
                Ok(())
            }
        }
    }
}

pub(super) fn read_reply(
    request: &ReadRequest,
    version: Version,
    chain_version: threefs_core::ids::ChainVersion,
) -> (Result<StorageReply, StorageError>, Bytes) {
    let total = version.bytes.len();
    let from = (request.offset as usize).min(total);
    let to = (from + request.length as usize).min(total);
    let payload = version.bytes.slice(from..to);
    let done = ReadDone {
        version: version.state.version,
        length: payload.len() as u32,
        chunk_length: total as u32,
        checksum: Checksum::of(&payload),
        chain_version,
    };
    (Ok(StorageReply::Read(done)), payload)
}
