//! Small reads of rings: those of one file share requests to storage services.

use std::collections::BTreeMap;
use std::sync::Arc;

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::ReadBatch;
use threefs_rings::{Checked, FileTerms, check};
use tokio::task::JoinSet;

use super::ring_io::{Started, result_of};
use crate::daemon::Daemon;
use crate::files::OpenFile;
use crate::rings::{Region, Ring, Session};

/// Larger reads have a request each, whose cost is then small.
const SMALL_BYTES_MAX: u64 = 64 << 10;

/// A read that was checked.
struct Read {
    started: Started,
    region: Arc<Region>,
    memory_offset: u64,
    /// Offset in the file, and length up to the end of the file.
    range: (u64, u64),
}

impl Daemon {
    /// Starts submissions of one ring.
    pub(super) fn start_entries(
        self: &Arc<Self>,
        session: &Arc<Session>,
        ring: &Arc<Ring>,
        all: Vec<Started>,
    ) {
        let mut by_file: BTreeMap<u32, Vec<Started>> = BTreeMap::new();
        for started in all {
            if ring.terms.for_read && started.entry.length <= SMALL_BYTES_MAX {
                by_file.entry(started.entry.file).or_default().push(started);
            } else {
                self.start_entry(session, ring, started);
            }
        }
        for (file, mut group) in by_file {
            if group.len() == 1
                && let Some(started) = group.pop()
            {
                self.start_entry(session, ring, started);
                continue;
            }
            let (daemon, session, ring) = (Arc::clone(self), Arc::clone(session), Arc::clone(ring));
            tokio::spawn(async move { daemon.read_group(&session, &ring, file, group).await });
        }
    }

    /// Executes reads of one file. Those that a batch does not answer are executed one by one.
    async fn read_group(
        self: Arc<Self>,
        session: &Arc<Session>,
        ring: &Arc<Ring>,
        file: u32,
        group: Vec<Started>,
    ) {
        // Each read of a file with locks checks that they are held.
        let has_no_locks = |inode| matches!(self.locks.required(inode), Ok(None));
        let file = session.file(file).filter(|file| has_no_locks(file.inode));
        // Nor do they wait for pending bytes.
        let file = file.filter(|file| self.pending.end(file.inode) == 0);
        let open = file.as_ref().and_then(|file| self.files.retain(file.inode));
        let (Some(file), Some(open)) = (file, open) else {
            for started in group {
                self.start_entry(session, ring, started);
            }
            return;
        };
        let terms = FileTerms { access: file.access };
        let length = open.state().length;
        let mut reads = Vec::with_capacity(group.len());
        for started in group {
            let region = session.memory(started.entry.region);
            let memory_terms = region.as_ref().map(|region| region.terms);
            let checked = check(&started.entry, ring.terms, memory_terms, Some(terms));
            match (checked, region) {
                (Ok(checked), Some(region)) => {
                    reads.push(Some(Read::new(started, region, &checked, length)));
                }
                (checked, _) => {
                    let error = checked.err().unwrap_or(Errno::INVAL);
                    ring.complete(&[(started.entry.slot, result_of(Err(error)))]);
                }
            }
        }
        self.read_batches(session, ring, &open, reads).await;
        self.release_retained(file.inode, &open).await;
    }

    /// Executes reads in batches, and those that are in none one by one.
    async fn read_batches(
        self: &Arc<Self>,
        session: &Arc<Session>,
        ring: &Arc<Ring>,
        open: &Arc<OpenFile>,
        mut reads: Vec<Option<Read>>,
    ) {
        let deadline = Deadline::after(self.timeout);
        let ranges: Vec<(u64, u64)> =
            reads.iter().map(|read| read.as_ref().map_or((0, 0), |read| read.range)).collect();
        let handle = open.state().file.clone();
        if let Err(error) = self.wait_servable(deadline).await {
            return fail(ring, reads.iter().flatten(), error);
        }
        let batches = self.client.plan_batches(&handle, &ranges, deadline).await;
        let mut tasks = JoinSet::new();
        for batch in batches.unwrap_or_default() {
            let members: BTreeMap<usize, Read> = batch
                .ranges()
                .filter_map(|range| Some((range, reads.get_mut(range)?.take()?)))
                .collect();
            let (daemon, session, ring, handle) =
                (Arc::clone(self), Arc::clone(session), Arc::clone(ring), handle.clone());
            tasks.spawn(async move {
                let read = daemon.read_batch(&ring, &handle, &batch, members, deadline).await;
                for (_, unanswered) in read {
                    daemon.start_entry(&session, &ring, unanswered.started);
                }
            });
        }
        for read in reads.into_iter().flatten() {
            self.start_entry(session, ring, read.started);
        }
        while tasks.join_next().await.is_some() {}
    }

    /// Returns the reads that the batch did not answer.
    async fn read_batch(
        &self,
        ring: &Ring,
        handle: &threefs_client::FileHandle,
        batch: &ReadBatch,
        mut members: BTreeMap<usize, Read>,
        deadline: Deadline,
    ) -> BTreeMap<usize, Read> {
        let results = tokio::select! {
            results = self.client.read_batch(handle, batch, deadline) => results,
            () = self.wait_lost() => return members,
        };
        if let Err(error) = self.wait_servable(deadline).await {
            fail(ring, members.values(), error);
            return BTreeMap::new();
        }
        let mut completions = Vec::with_capacity(results.len());
        let mut answered = Vec::with_capacity(results.len());
        for (range, data) in results {
            let Some(read) = members.remove(&range) else { continue };
            let result = read.deliver(&data, ring.forbid_holes);
            completions.push((read.started.entry.slot, result_of(result)));
            answered.push(read);
        }
        ring.complete(&completions);
        members
    }
}

fn fail<'a>(ring: &Ring, reads: impl Iterator<Item = &'a Read>, error: Errno) {
    let completion = |read: &Read| (read.started.entry.slot, result_of(Err(error)));
    ring.complete(&reads.map(completion).collect::<Vec<_>>());
}

impl Read {
    fn new(started: Started, region: Arc<Region>, checked: &Checked, length: u64) -> Self {
        let size = length.saturating_sub(checked.file_offset).min(checked.length);
        let (memory_offset, range) = (checked.memory_offset, (checked.file_offset, size));
        Self { started, region, memory_offset, range }
    }

    fn deliver(&self, data: &[u8], forbid_holes: bool) -> Result<u64, Errno> {
        let (_, size) = self.range;
        let data = data.get(..size as usize).unwrap_or(data);
        let zeros = size as usize - data.len();
        if zeros > 0 && forbid_holes {
            return Err(Errno::NODATA);
        }
        self.region.write_at(self.memory_offset, data)?;
        self.region.zero_at(self.memory_offset + data.len() as u64, zeros)?;
        Ok(size)
    }
}
