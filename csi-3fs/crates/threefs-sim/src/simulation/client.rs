//! Clients: each task does one request at a time and retries it with the same tag until it is
//! answered.

use std::rc::Rc;

use bytes::Bytes;
use rand::Rng;
use threefs_core::checksum::Checksum;
use threefs_core::chunk::ContentChange;
use threefs_core::error::{Remedy, StorageError};
use threefs_core::ids::{ChannelId, ChunkId, ClientId, Epoch, RequestTag};
use threefs_core::message::{
    Address, NamedVolume, ReadMany, ReadPart, ReadRequest, StorageReply, StorageRequest,
    UpdateConditions, UpdateRequest,
};
use threefs_core::routing::{ChainTarget, PublicState, RoutingInfo};

use crate::history::Intent;
use crate::simulation::{
    CHUNK_BYTES, CallerId, INODE, Packet, SimEvent, Simulation, Violation, is_removed,
};
use crate::topology::chain_id;

const TIMEOUT_US: u64 = 30_000;
/// More channels than any client has: abandoned channels are replaced in steps of it.
const CHANNELS: u32 = 100;

/// Activity of a task.
#[derive(Clone, Debug)]
pub enum Activity {
    /// No request.
    Idle,
    /// An update, with its retries.
    Updating {
        /// Its tag.
        tag: RequestTag,
        /// Start of the first attempt.
        invoked: u64,
        /// The intended change.
        intent: Intent,
        /// When it is abandoned.
        end: Option<u64>,
        /// The epoch of its next attempt.
        epoch: Epoch,
        /// It has been refused because of a fence.
        is_refused: bool,
    },
    /// One attempt of a read.
    Reading {
        /// The chunk.
        chunk: ChunkId,
        /// Epoch of the read, if it is not of the newest version.
        up_to: Option<Epoch>,
        /// Start of this attempt.
        invoked: u64,
    },
}

/// One channel of one client.
#[derive(Debug)]
pub struct Task {
    /// Its endpoint.
    pub endpoint: usize,
    client: ClientId,
    channel: ChannelId,
    sequence: u64,
    routing: Rc<RoutingInfo>,
    /// Its current activity.
    pub activity: Activity,
    /// The call that it waits for; replies to others are late.
    rpc: Option<u64>,
    generation: u64,
}

impl Task {
    /// A task with a separate channel.
    #[must_use]
    pub fn new(endpoint: usize, client: u128, channel: u32) -> Self {
        Self {
            endpoint,
            client: ClientId::with_incarnation(client << 32, 0),
            channel: ChannelId(channel),
            sequence: 0,
            routing: Rc::new(RoutingInfo::default()),
            activity: Activity::Idle,
            rpc: None,
            generation: 0,
        }
    }
}

impl Simulation {
    /// Starts, repeats or abandons an attempt.
    pub(crate) fn wake_task_now(&mut self, task: usize, generation: u64) {
        if self.tasks[task].generation != generation {
            return;
        }
        let endpoint = self.tasks[task].endpoint;
        self.send_to_managers(endpoint, Packet::AskRouting { incarnation: 0 });
        self.expire_update(task);
        if matches!(self.tasks[task].activity, Activity::Idle) {
            if self.ends_at.is_some_and(|end| self.now >= end) {
                return;
            }
            self.start_request(task);
        }
        self.attempt(task);
    }

    /// Abandons an expired update, which may have been made or not. It is not sent again, and its
    /// channel is not reused.
    fn expire_update(&mut self, task: usize) {
        let state = &mut self.tasks[task];
        if let Activity::Updating { end: Some(end), .. } = state.activity
            && self.now >= end
        {
            state.activity = Activity::Idle;
            state.rpc = None;
            state.channel = ChannelId(state.channel.0 + CHANNELS);
        }
    }

    fn wake_task(&mut self, task: usize, after_us: u64) {
        self.tasks[task].generation += 1;
        let generation = self.tasks[task].generation;
        self.push(after_us, SimEvent::Task { task, generation });
    }

    fn start_request(&mut self, task: usize) {
        let mut chunk = ChunkId::new(INODE, self.rng.random_range(0..self.chunks));
        if self.rng.random_bool(0.4) {
            let up_to = self.epochs.of_read(self.now);
            self.tasks[task].activity = Activity::Reading { chunk, up_to, invoked: self.now };
            return;
        }
        let removed_chunk = self.removal.chunk(self.now);
        chunk = removed_chunk.unwrap_or(chunk);
        self.updates += 1;
        let (change, payload) = self.random_change();
        let state = &mut self.tasks[task];
        state.sequence += 1;
        let tag =
            RequestTag { client: state.client, channel: state.channel, sequence: state.sequence };
        let intent = Intent { chunk, change, payload };
        self.history.invoke(tag, intent.clone());
        let end = match self.removal.at().filter(|_| removed_chunk.is_some()) {
            Some(at) => self.fencing.end_by(tag, at, self.now),
            None => self.fencing.start_update(tag, self.now),
        };
        let (invoked, epoch) = (self.now, self.epochs.of_update(self.now));
        self.tasks[task].activity =
            Activity::Updating { tag, invoked, intent, end, epoch, is_refused: false };
    }

    fn random_change(&mut self) -> (ContentChange, Bytes) {
        // Every payload is unique, so content identifies the updates in it.
        let mark = (self.updates as u32).to_be_bytes();
        match self.rng.random_range(0..10) {
            0 => (ContentChange::Remove, Bytes::new()),
            4..=6 if self.fencing.purges => (ContentChange::Remove, Bytes::new()),
            1 => {
                let length = self.rng.random_range(0..=CHUNK_BYTES);
                (ContentChange::Truncate { length }, Bytes::new())
            }
            2 | 3 => (ContentChange::Replace, mark.repeat(3).into()),
            _ => {
                let offset = self.rng.random_range(0..=CHUNK_BYTES - 4);
                (ContentChange::Write { offset }, Bytes::copy_from_slice(&mark))
            }
        }
    }

    fn attempt(&mut self, task: usize) {
        let chunk = match &self.tasks[task].activity {
            Activity::Idle => return,
            Activity::Updating { intent, .. } => intent.chunk,
            Activity::Reading { chunk, .. } => *chunk,
        };
        let id = chain_id(self.topology.chain_of(chunk));
        let Some(chain) = self.tasks[task].routing.chain(id).cloned() else {
            return self.wake_task(task, 3_000);
        };
        let place: Option<ChainTarget> = match self.tasks[task].activity {
            Activity::Idle => return,
            Activity::Updating { .. } => chain.head().copied(),
            Activity::Reading { .. } => {
                let serving: Vec<ChainTarget> = chain
                    .targets
                    .iter()
                    .filter(|place| place.state == PublicState::Serving)
                    .copied()
                    .collect();
                (!serving.is_empty()).then(|| serving[self.rng.random_range(0..serving.len())])
            }
        };
        let Some(place) = place else { return self.wake_task(task, 5_000) };
        let to = Address { chain: id, chain_version: chain.version, target: place.target };
        let now = self.now;
        let (request, payload) = match &mut self.tasks[task].activity {
            Activity::Idle => return,
            Activity::Reading { chunk, up_to, invoked } => {
                *invoked = now;
                let (offset, length) = (0, CHUNK_BYTES);
                let request = if let Some(epoch) = *up_to {
                    let chunk = chunk.in_epoch(epoch);
                    StorageRequest::ReadUpTo(ReadRequest { to, chunk, offset, length })
                } else if self.rpcs.is_multiple_of(2) {
                    StorageRequest::Read(ReadRequest { to, chunk: *chunk, offset, length })
                } else {
                    let parts = vec![ReadPart { index: chunk.index, offset, length }];
                    StorageRequest::ReadMany(ReadMany { to, inode: chunk.inode, parts })
                };
                (request, Bytes::new())
            }
            Activity::Updating { tag, intent, epoch, is_refused, .. } => {
                let payload = intent.payload.clone();
                *epoch = self.epochs.of_repeated(*epoch, now);
                let update = UpdateRequest {
                    to,
                    chunk: intent.chunk.in_epoch(*epoch),
                    tag: *tag,
                    change: intent.change,
                    payload_checksum: Checksum::of(&payload),
                    chunk_bytes: CHUNK_BYTES,
                };
                let request = match self.epochs.named_volume(*epoch, *is_refused) {
                    NamedVolume::Unnamed => StorageRequest::Update(update),
                    volume => {
                        let conditions = UpdateConditions { volume, at: None };
                        StorageRequest::UpdateIf(update, conditions)
                    }
                };
                (request, payload)
            }
        };
        self.rpcs += 1;
        let rpc = self.rpcs;
        self.tasks[task].rpc = Some(rpc);
        let endpoint = self.tasks[task].endpoint;
        self.rpc_task.insert(rpc, task);
        let node = place.node.0 as usize;
        let expires = request.update().and_then(|(update, _)| self.expiry(update.tag, node));
        let (caller, request) = (CallerId::client(endpoint, rpc), Box::new(request));
        let deadline = self.now + TIMEOUT_US;
        self.send(endpoint, node, Packet::Request { caller, request, payload, expires, deadline });
        self.wake_task(task, TIMEOUT_US);
    }

    /// Handles a packet for a client's endpoint.
    pub(crate) fn client_receives(
        &mut self,
        endpoint: usize,
        packet: Packet,
    ) -> Result<(), Violation> {
        match packet {
            Packet::Routing { routing, .. } => {
                for task in self.tasks.iter_mut().filter(|task| task.endpoint == endpoint) {
                    if routing.version > task.routing.version {
                        task.routing = Rc::clone(&routing);
                    }
                }
                Ok(())
            }
            Packet::Response { caller, result, .. } if self.gc_answered(caller.rpc, &result) => {
                Ok(())
            }
            Packet::Response { caller, result, payload } => {
                match self.rpc_task.remove(&caller.rpc) {
                    Some(task) if self.tasks[task].rpc == Some(caller.rpc) => {
                        self.on_reply(task, *result, &payload)
                    }
                    _ => Ok(()),
                }
            }
            Packet::Overloaded { caller } => {
                if let Some(task) = self.rpc_task.remove(&caller.rpc)
                    && self.tasks[task].rpc == Some(caller.rpc)
                {
                    self.tasks[task].rpc = None;
                    self.wake_task(task, self.retry_us);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn on_reply(
        &mut self,
        task: usize,
        result: Result<StorageReply, StorageError>,
        payload: &Bytes,
    ) -> Result<(), Violation> {
        self.tasks[task].rpc = None;
        let (now, activity) = (self.now, self.tasks[task].activity.clone());
        let checked = match (activity, result) {
            // It has expired and its file may be forgotten: there was nothing to change.
            (Activity::Updating { intent, end: Some(end), .. }, Ok(_))
                if is_removed(intent.chunk) && now >= end =>
            {
                Ok(())
            }
            (Activity::Updating { tag, invoked, .. }, Ok(StorageReply::Updated(reply))) => {
                self.history.acknowledged(tag, invoked, now, reply.version)
            }
            (Activity::Reading { chunk, up_to, invoked }, Ok(StorageReply::Read(reply))) => {
                let view = up_to.map_or(chunk.last_version(), |epoch| chunk.in_epoch(epoch));
                self.history.read(view, invoked, now, reply.version, payload)
            }
            (Activity::Reading { chunk, invoked, .. }, Ok(StorageReply::ReadMany(results))) => {
                let chunk = chunk.last_version();
                match results[..] {
                    [Ok(reply)] => self.history.read(chunk, invoked, now, reply.version, payload),
                    _ => {
                        self.wake_task(task, self.retry_us);
                        return Ok(());
                    }
                }
            }
            (Activity::Updating { .. }, Err(error)) if error.remedy() == Remedy::RenewEpoch => {
                let current = self.epochs.current(now);
                if let Activity::Updating { epoch, is_refused, .. } = &mut self.tasks[task].activity
                {
                    (*epoch, *is_refused) = (current.max(*epoch), true);
                }
                self.wake_task(task, self.retry_us);
                return Ok(());
            }
            (Activity::Updating { intent, .. }, Err(error)) if error.remedy() == Remedy::GiveUp => {
                match error {
                    StorageError::NoSpace { .. } => Ok(()),
                    StorageError::InodeForgotten { .. } if is_removed(intent.chunk) => Ok(()),
                    error => Err(format!("an update was permanently refused: {error}")),
                }
            }
            _ => {
                self.wake_task(task, self.retry_us);
                return Ok(());
            }
        };
        self.tasks[task].activity = Activity::Idle;
        let rest = self.rng.random_range(0..8_000);
        self.wake_task(task, rest);
        checked.map_err(|violation| self.violation(violation))
    }
}
