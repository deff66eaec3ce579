//! Disk of a node: operations take time, and their completion is an event of the replica.

use bytes::Bytes;
use rand::Rng;
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ChunkState, StoreUpdate, TagWindow, Which};
use threefs_core::error::{StorageError, StoreError};
use threefs_core::ids::{ChainVersion, ChunkId};
use threefs_core::message::{Content, ReadDone, ReadRequest, StorageReply, Updated};
use threefs_core::replica::{Event, OpId, PlannedRead, Token};

use super::hosting::io_error;
use crate::mutations::Mutation;
use crate::simulation::job::Job;
use crate::simulation::{SimEvent, Simulation, Violation};
use crate::store::Version;
use crate::topology::At;

impl Simulation {
    pub(super) fn start_apply(
        &mut self,
        at: At,
        op: OpId,
        mut update: StoreUpdate,
        (payload, payload_checksum): (Bytes, Checksum),
        (full, unsent): (bool, bool),
    ) {
        if self.mutation == Mutation::ForgetTags
            && let Some(newest) = update.tags.newest().copied()
        {
            // Only the newest tag is kept, to identify the update of the version.
            update.tags = TagWindow::default().with(newest.tag, newest.version);
        }
        let full = full || self.fills_up(&payload);
        // The real store shows a pending state at some time between start and end.
        let early = !full && self.rng.random_bool(0.5);
        let early_result = early.then(|| self.make(at, &update, &payload, payload_checksum).ok());
        let early_result = early_result.flatten();
        let job = Job::Apply { op, update, payload, payload_checksum, early_result, full, unsent };
        self.disk(at, 100..2_500, job);
    }

    /// Whether another program takes the space of an update that was accepted.
    fn fills_up(&mut self, payload: &Bytes) -> bool {
        let may = self.fills.is_some() && !self.faults_ended && !payload.is_empty();
        may && self.fills.as_mut().is_some_and(|rng| rng.random_bool(0.05))
    }

    /// Whether only the disk can fail for an update.
    pub(super) fn accepts(
        &self,
        at: At,
        update: &StoreUpdate,
        payload: &Bytes,
        expected: Checksum,
    ) -> bool {
        let is_sound = Checksum::of(payload) == expected || self.mutation == Mutation::TrustPayload;
        is_sound && self.hosted(at).store.accepts(update)
    }

    /// Applies an update whose payload is as its sender has sent it.
    fn make(
        &mut self,
        at: At,
        update: &StoreUpdate,
        payload: &Bytes,
        expected: Checksum,
    ) -> Result<ChunkState, StoreError> {
        let (chunk, computed) = (update.chunk, Checksum::of(payload));
        if computed != expected && self.mutation != Mutation::TrustPayload {
            return Err(StoreError::PayloadDamaged { chunk, expected, computed });
        }
        self.hosted_mut(at).store.apply(update, payload)
    }

    pub(super) fn disk(&mut self, at: At, delay: std::ops::Range<u64>, job: Job) {
        let mut after = self.rng.random_range(delay);
        if !self.faults_ended && self.rng.random_bool(0.02) {
            after *= 20;
        }
        let hangs = self.nodes[at.node].disk_hangs_until.saturating_sub(self.now);
        let opening = self.hosted(at).opening;
        self.push(hangs + after, SimEvent::Disk { at, opening, job: Box::new(job) });
    }

    pub(crate) fn disk_done(&mut self, at: At, job: Job) -> Result<(), Violation> {
        let hangs = self.nodes[at.node].disk_hangs_until.saturating_sub(self.now);
        if hangs > 0 {
            let opening = self.hosted(at).opening;
            self.push(hangs, SimEvent::Disk { at, opening, job: Box::new(job) });
            return Ok(());
        }
        if let Some(event) = self.error_event(at, &job) {
            return self.deliver_event(at, event);
        }
        let event = match job {
            Job::Apply { op, update, payload, payload_checksum, early_result, full, unsent } => {
                let payload = (&payload, payload_checksum);
                let result = self.end_apply(at, &update, payload, early_result, full);
                self.acknowledge_early(at, &result);
                Event::Applied { op, result, unsent }
            }
            Job::Commit { op, result } => Event::Committed { op, result },
            Job::Forgotten { op } => {
                self.hosted_mut(at).store.flush();
                Event::Forgotten { op, result: Ok(()) }
            }
            Job::Purged { op } => Event::Forgotten { op, result: Ok(()) },
            Job::InodesForgotten { op } => {
                self.hosted_mut(at).store.flush();
                Event::InodesForgotten { op, result: Ok(()) }
            }
            Job::Content { op, chunk, which } => {
                let read = self.hosted(at).store.read(chunk, which);
                Event::Content { op, result: read.map(|content| (content.state, content.bytes)) }
            }
            Job::Read { token, request, chain_version } => {
                return self.end_read(at, token, &request, chain_version);
            }
            Job::Reads { token, reads, chain_version } => {
                return self.end_reads(at, token, reads, chain_version);
            }
            Job::Repair { token, request, which } => {
                let read = self.hosted(at).store.read(request.chunk, which);
                let (result, payload) = match read {
                    Ok(Version { state, bytes, .. }) => {
                        let (version, checksum) = (state.version, state.checksum);
                        (Ok(StorageReply::Content(Content { version, checksum })), bytes)
                    }
                    Err(error) => (Err(error.at(at.target())), Bytes::new()),
                };
                self.reply(at, token, result, payload);
                return Ok(());
            }
        };
        self.deliver_event(at, event)
    }

    /// Results of the store while it reports I/O errors; client reads are served from its cache.
    fn error_event(&self, at: At, job: &Job) -> Option<Event> {
        if self.hosted(at).fails_until <= self.now {
            return None;
        }
        Some(match *job {
            Job::Apply { op, .. } => {
                Event::Applied { op, unsent: false, result: Err(io_error("flush")) }
            }
            Job::Commit { op, .. } => {
                Event::Committed { op, result: Err(io_error("write the log")) }
            }
            Job::Forgotten { op } | Job::Purged { op } => {
                Event::Forgotten { op, result: Err(io_error("write the log")) }
            }
            Job::InodesForgotten { op } => {
                Event::InodesForgotten { op, result: Err(io_error("flush")) }
            }
            Job::Content { op, .. } => Event::Content { op, result: Err(io_error("read")) },
            Job::Read { .. } | Job::Reads { .. } | Job::Repair { .. } => return None,
        })
    }

    fn end_apply(
        &mut self,
        at: At,
        update: &StoreUpdate,
        (payload, payload_checksum): (&Bytes, Checksum),
        early_result: Option<ChunkState>,
        full_at_start: bool,
    ) -> Result<ChunkState, StoreError> {
        // Space is reserved at the start, but others may use the same disk.
        let full = full_at_start || self.nodes[at.node].full;
        let mutation = self.mutation;
        let result = match early_result {
            Some(pending) => Ok(pending),
            None if full && !payload.is_empty() => {
                Err(StoreError::NoSpace { needed_bytes: payload.len() as u64 })
            }
            None => self.make(at, update, payload, payload_checksum),
        };
        if result.is_ok() && mutation != Mutation::LoseFlush {
            self.hosted_mut(at).store.flush();
        }
        result
    }

    fn acknowledge_early(&mut self, at: At, result: &Result<ChunkState, StoreError>) {
        if self.mutation == Mutation::AcknowledgeBeforeTail
            && let Ok(pending) = result
            && let Some(newest) = pending.tags.newest()
            && let Some(token) = self.hosted_mut(at).update_tokens.remove(&newest.tag)
        {
            let reply = Updated {
                version: pending.version,
                length: pending.length,
                checksum: pending.checksum,
                chain_version: pending.chain_version,
            };
            self.reply(at, token, Ok(StorageReply::Updated(reply)), Bytes::new());
        }
    }

    fn end_read(
        &mut self,
        at: At,
        token: Token,
        request: &ReadRequest,
        chain_version: ChainVersion,
    ) -> Result<(), Violation> {
        match self.read_committed(at, request, chain_version) {
            Ok((reply, payload)) => {
                self.reply(at, token, Ok(StorageReply::Read(reply)), payload);
                Ok(())
            }
            Err(error) => {
                let is_damaged = matches!(error, StorageError::ChunkCorrupt { .. });
                self.reply(at, token, Err(error), Bytes::new());
                if is_damaged {
                    return self.deliver_event(at, Event::DamageFound { chunk: request.chunk });
                }
                Ok(())
            }
        }
    }

    fn end_reads(
        &mut self,
        at: At,
        token: Token,
        reads: Vec<PlannedRead>,
        chain_version: ChainVersion,
    ) -> Result<(), Violation> {
        let (mut results, mut all) = (Vec::new(), Vec::new());
        for read in reads {
            let result = match read {
                PlannedRead::Done(result) => result,
                PlannedRead::Serve(request) => {
                    self.read_committed(at, &request, chain_version).map(|(reply, payload)| {
                        all.extend_from_slice(&payload);
                        reply
                    })
                }
            };
            results.push(result);
        }
        let damaged = results.iter().filter_map(|result| match result {
            Err(StorageError::ChunkCorrupt { chunk, .. }) => Some(*chunk),
            _ => None,
        });
        let damaged: Vec<ChunkId> = damaged.collect();
        self.reply(at, token, Ok(StorageReply::ReadMany(results)), Bytes::from(all));
        for chunk in damaged {
            self.deliver_event(at, Event::DamageFound { chunk })?;
        }
        Ok(())
    }

    fn read_committed(
        &self,
        at: At,
        request: &ReadRequest,
        chain_version: ChainVersion,
    ) -> Result<(ReadDone, Bytes), StorageError> {
        let version = self.hosted(at).store.read(request.chunk, Which::Committed);
        let version = version.map_err(|error| error.at(at.target()))?;
        Ok(read_reply(request, &version, chain_version))
    }
}

pub(super) fn read_reply(
    request: &ReadRequest,
    version: &Version,
    chain_version: ChainVersion,
) -> (ReadDone, Bytes) {
    let total = version.bytes.len();
    let from = (request.offset as usize).min(total);
    let to = (from + request.length as usize).min(total);
    let payload = version.bytes.slice(from..to);
    let reply = ReadDone {
        version: version.state.version,
        length: payload.len() as u32,
        chunk_length: total as u32,
        checksum: Checksum::of(&payload),
        chain_version,
    };
    (reply, payload)
}
