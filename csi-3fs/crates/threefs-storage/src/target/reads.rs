//! Reads of clients: one, or several with one reply.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use threefs_core::chunk::Which;
use threefs_core::error::StorageError;
use threefs_core::ids::ChainVersion;
use threefs_core::message::{ReadDone, ReadMany, ReadRequest, StorageReply};
use threefs_core::replica::{Event, PlannedRead};
use tokio::sync::oneshot;

use super::actions::{answered, job};
use super::{Job, Response, Target};

/// Number of reads of one request that a thread executes one after the other: a disk is faster with
/// several reads in flight, and cached data with few thread switches.
const READS_OF_JOB: usize = 8;

/// Results of some reads of a request, and the bytes of those that succeeded.
type Group = (Vec<Result<ReadDone, StorageError>>, Vec<u8>);

/// Collects the groups of one request.
struct Gather {
    /// `None` after the reply.
    waiting: Option<oneshot::Sender<Response>>,
    groups: Vec<Option<Group>>,
}

impl Gather {
    /// The connection is closed.
    fn is_closed(&self) -> bool {
        self.waiting.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    /// Replies after the last group.
    fn add(&mut self, number: usize, group: Group) {
        if let Some(place) = self.groups.get_mut(number) {
            *place = Some(group);
        }
        if self.groups.iter().any(Option::is_none) {
            return;
        }
        let Some(waiting) = self.waiting.take() else { return };
        let bytes = self.groups.iter().flatten().map(|(_, payload)| payload.len()).sum();
        let (mut results, mut payload) = (Vec::new(), Vec::with_capacity(bytes));
        for (group, data) in std::mem::take(&mut self.groups).into_iter().flatten() {
            results.extend(group);
            payload.extend_from_slice(&data);
        }
        let _ = waiting.send((Ok(StorageReply::ReadMany(results)), Bytes::from(payload)));
    }
}

impl Target {
    pub(super) fn serve_read(
        &self,
        waiting: oneshot::Sender<Response>,
        request: &ReadRequest,
        chain_version: ChainVersion,
    ) -> Option<Event> {
        // The connection is closed.
        if waiting.is_closed() {
            return None;
        }
        let answer = match self.read_committed(request, chain_version) {
            Ok((reply, bytes)) => (Ok(StorageReply::Read(reply)), Bytes::from(bytes)),
            Err(error) => (Err(error), Bytes::new()),
        };
        answered(waiting, answer, request.chunk)
    }

    /// Starts several reads; returns the last store operation, which the caller must run.
    pub(super) fn start_reads(
        self: &Arc<Self>,
        waiting: oneshot::Sender<Response>,
        reads: Vec<PlannedRead>,
        chain_version: ChainVersion,
    ) -> Option<Job> {
        let count = reads.len().min(ReadMany::PARTS_MAX).div_ceil(READS_OF_JOB);
        let groups = vec![None; count];
        let gather = Arc::new(Mutex::new(Gather { waiting: Some(waiting), groups }));
        let mut last: Option<Job> = None;
        for (number, group) in reads.chunks(READS_OF_JOB).enumerate() {
            let (gather, group) = (Arc::clone(&gather), group.to_vec());
            let next = job(move |target| target.read_group(&gather, number, group, chain_version));
            if let Some(job) = std::mem::replace(&mut last, next) {
                self.spawn(job);
            }
        }
        last
    }

    fn read_group(
        self: &Arc<Self>,
        gather: &Mutex<Gather>,
        number: usize,
        reads: Vec<PlannedRead>,
        chain_version: ChainVersion,
    ) -> Option<Event> {
        if gather.lock().unwrap_or_else(PoisonError::into_inner).is_closed() {
            return None;
        }
        let (mut results, mut payload) = (Vec::with_capacity(reads.len()), Vec::new());
        let mut damaged = None;
        for read in reads {
            let result = match read {
                PlannedRead::Done(result) => result,
                PlannedRead::Serve(request) => {
                    self.read_committed(&request, chain_version).map(|(reply, bytes)| {
                        payload.extend_from_slice(&bytes);
                        reply
                    })
                }
            };
            if let Err(StorageError::ChunkCorrupt { chunk, .. }) = result {
                damaged = Some(chunk);
            }
            results.push(result);
        }
        let mut gather = gather.lock().unwrap_or_else(PoisonError::into_inner);
        gather.add(number, (results, payload));
        // Of several damaged chunks, the others are found when they are read again one by one.
        damaged.map(|chunk| Event::DamageFound { chunk })
    }

    fn read_committed(
        &self,
        request: &ReadRequest,
        chain_version: ChainVersion,
    ) -> Result<(ReadDone, Vec<u8>), StorageError> {
        let ReadRequest { chunk, offset, length, .. } = *request;
        let outcome = self.store.read(chunk, Which::Committed, offset, length);
        let outcome = outcome.map_err(|error| error.at(self.config.target))?;
        let reply = ReadDone {
            version: outcome.state.version,
            length: outcome.bytes.len() as u32,
            chunk_length: outcome.state.length,
            checksum: outcome.checksum,
            chain_version,
        };
        Ok((reply, outcome.bytes))
    }
}

#[cfg(test)]
mod tests {
    use threefs_core::checksum::Checksum;

    use super::*;

    fn read(version: u64, data: &[u8]) -> Group {
        let done = ReadDone {
            version: threefs_core::ids::ChunkVersion(version),
            length: data.len() as u32,
            chunk_length: 9,
            checksum: Checksum::of(data),
            chain_version: ChainVersion(1),
        };
        (vec![Ok(done)], data.to_vec())
    }

    #[test]
    fn one_reply_has_all_results_in_order() {
        let (waiting, mut reply) = oneshot::channel();
        let mut gather = Gather { waiting: Some(waiting), groups: vec![None; 3] };
        gather.add(2, read(3, b"c"));
        gather.add(0, read(1, b"a"));
        reply.try_recv().unwrap_err();
        assert!(!gather.is_closed());
        gather.add(1, read(2, b"bb"));
        let (result, payload) = reply.try_recv().unwrap();
        let Ok(StorageReply::ReadMany(results)) = result else { panic!("{result:?}") };
        let versions: Vec<u64> =
            results.iter().map(|result| result.as_ref().unwrap().version.0).collect();
        assert_eq!((versions, &payload[..]), (vec![1, 2, 3], &b"abbc"[..]));
        assert!(gather.is_closed());
    }

    #[test]
    fn reads_of_a_closed_connection_end() {
        let (waiting, reply) = oneshot::channel();
        let gather = Gather { waiting: Some(waiting), groups: vec![None] };
        drop(reply);
        assert!(gather.is_closed());
    }
}
