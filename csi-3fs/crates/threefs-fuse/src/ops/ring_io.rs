//! Execution of submissions in rings.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_core::ids::InodeId;
use threefs_rings::{Checked, FileTerms, Submission, check};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::daemon::Daemon;
use crate::files::OpenFile;
use crate::rings::{Region, Ring, Session, Work};

/// Maximum bytes of a read, and of a write, under one deadline.
const READ_BYTES_MAX: u64 = 64 << 20;
const WRITE_BYTES_MAX: u64 = 4 << 20;
/// Maximum number of submissions that are started together.
const STARTED_MAX: usize = 64;

/// A submission that is executed, with its permits of the ring and of all rings.
pub(super) struct Started {
    pub entry: Submission,
    pub _permits: (OwnedSemaphorePermit, OwnedSemaphorePermit),
}

/// The number of bytes, or a negative errno.
pub(super) fn result_of(result: Result<u64, Errno>) -> i64 {
    match result {
        Ok(bytes) => i64::try_from(bytes).unwrap_or(i64::MAX),
        Err(error) => -i64::from(error.raw_os_error()),
    }
}

impl Daemon {
    /// Executes rings with new submissions until it is cancelled.
    pub(crate) async fn run_rings(self: &Arc<Self>, work: &mut UnboundedReceiver<Work>) {
        while let Some((session, ring)) = work.recv().await {
            tokio::spawn(Arc::clone(self).run_ring(session, ring));
        }
    }

    /// Starts a ring's submissions until its queue is empty. Rings take turns: each waits for a
    /// permit for one submission, and then takes only those that are left.
    async fn run_ring(self: Arc<Self>, session: Arc<Session>, ring: Arc<Ring>) {
        loop {
            let own = Arc::clone(&ring.limit).acquire_owned().await;
            let shared = Arc::clone(&self.rings.submissions).acquire_owned().await;
            let (Ok(own), Ok(shared)) = (own, shared) else { return };
            let Some(entry) = ring.next() else { return };
            let mut all = vec![Started { entry, _permits: (own, shared) }];
            while all.len() < STARTED_MAX
                && let Some(started) = self.next_started(&ring)
            {
                all.push(started);
            }
            self.start_entries(&session, &ring, all);
        }
    }

    /// The next submission, if there is one and permits are left.
    fn next_started(&self, ring: &Ring) -> Option<Started> {
        let own = Arc::clone(&ring.limit).try_acquire_owned().ok()?;
        let shared = Arc::clone(&self.rings.submissions).try_acquire_owned().ok()?;
        Some(Started { entry: ring.next_queued()?, _permits: (own, shared) })
    }

    /// Executes one submission.
    pub(super) fn start_entry(
        self: &Arc<Self>,
        session: &Arc<Session>,
        ring: &Arc<Ring>,
        started: Started,
    ) {
        let (daemon, session, ring) = (Arc::clone(self), Arc::clone(session), Arc::clone(ring));
        tokio::spawn(async move {
            let result = daemon.run_entry(&session, &ring, &started.entry).await;
            ring.complete(&[(started.entry.slot, result)]);
            drop(started);
        });
    }

    /// The number of bytes, or a negative errno.
    async fn run_entry(
        self: &Arc<Self>,
        session: &Session,
        ring: &Ring,
        entry: &Submission,
    ) -> i64 {
        let (region, file) = (session.memory(entry.region), session.file(entry.file));
        let memory_terms = region.as_ref().map(|region| region.terms);
        let file_terms = file.map(|file| FileTerms { access: file.access });
        let result = match check(entry, ring.terms, memory_terms, file_terms) {
            Ok(checked) => match (region, file) {
                (Some(region), Some(file)) => {
                    self.transfer(ring, file.inode, &region, &checked).await
                }
                _ => Err(Errno::INVAL),
            },
            Err(error) => Err(error),
        };
        result_of(result)
    }

    async fn transfer(
        self: &Arc<Self>,
        ring: &Ring,
        id: InodeId,
        region: &Region,
        range: &Checked,
    ) -> Result<u64, Errno> {
        // The file stays open until its new length is recorded, even if the session ends.
        let open = self.files.retain(id).ok_or(Errno::STALE)?;
        let done = self.transfer_pieces(ring, id, &open, region, range).await;
        if let Ok(bytes @ 1..) = done
            && !ring.terms.for_read
        {
            // The kernel does not see what rings write.
            let deadline = Deadline::after(self.timeout);
            self.drop_pages(id, range.file_offset, bytes, deadline).await;
        }
        self.release_retained(id, &open).await;
        done
    }

    /// Closes a file that was retained for a transfer.
    pub(super) async fn release_retained(&self, id: InodeId, open: &OpenFile) {
        let last = open.state().handles <= 1;
        if last {
            self.release_registered(id, Deadline::after(self.timeout)).await;
        } else if self.files.close(id) {
            self.note_closed(id);
        }
    }

    async fn transfer_pieces(
        &self,
        ring: &Ring,
        id: InodeId,
        open: &OpenFile,
        region: &Region,
        range: &Checked,
    ) -> Result<u64, Errno> {
        let mut done = 0;
        while done < range.length {
            let deadline = Deadline::after(self.timeout);
            let piece = Checked {
                memory_offset: range.memory_offset + done,
                file_offset: range.file_offset + done,
                length: range.length - done,
            };
            let result = async {
                self.wait_servable(deadline).await?;
                self.drain(id, deadline).await?;
                let bytes = tokio::select! {
                    bytes = self.transfer_piece(ring, id, open, region, &piece, deadline) => bytes?,
                    () = self.wait_lost() => return Err(Errno::IO),
                };
                self.wait_servable(deadline).await?;
                Ok(bytes)
            };
            match result.await {
                Ok(0) => break,
                Ok(bytes) => done += bytes,
                Err(error) if done == 0 => return Err(error),
                // As read(2) and write(2): the part that succeeded counts.
                Err(_) => break,
            }
        }
        Ok(done)
    }

    async fn transfer_piece(
        &self,
        ring: &Ring,
        id: InodeId,
        open: &OpenFile,
        region: &Region,
        range: &Checked,
        deadline: Deadline,
    ) -> Result<u64, Errno> {
        if ring.terms.for_read {
            self.read_to(ring, open, region, range, deadline).await
        } else {
            self.write_from(id, open, region, range, deadline).await
        }
    }

    async fn read_to(
        &self,
        ring: &Ring,
        open: &OpenFile,
        region: &Region,
        range: &Checked,
        deadline: Deadline,
    ) -> Result<u64, Errno> {
        let id = open.state().file.inode;
        self.wait_locks(id, deadline).await?;
        let (file, length) = {
            let state = open.state();
            (state.file.clone(), state.length)
        };
        let size = length.saturating_sub(range.file_offset).min(range.length).min(READ_BYTES_MAX);
        if size == 0 {
            return Ok(0);
        }
        let (mut failed, mut holes) = (None, BTreeSet::new());
        let deliver = |at: usize, length: usize, data: Bytes| {
            let to = range.memory_offset + at as u64;
            let zeros = length - data.len();
            let written = region
                .write_at(to, &data)
                .and_then(|()| region.zero_at(to + data.len() as u64, zeros));
            failed = failed.or(written.err());
            if zeros > 0 {
                holes.insert(at);
            } else {
                holes.remove(&at);
            }
        };
        let read = self.client.read_range_with(&file, range.file_offset, size, deadline, deliver);
        read.await.map_err(|error| self.errno_of(&format!("read {}", file.inode), &error, true))?;
        self.wait_locks(id, deadline).await?;
        match failed {
            Some(error) => Err(error),
            None if ring.forbid_holes && !holes.is_empty() => Err(Errno::NODATA),
            None => Ok(size),
        }
    }

    async fn write_from(
        &self,
        id: InodeId,
        open: &OpenFile,
        region: &Region,
        range: &Checked,
        deadline: Deadline,
    ) -> Result<u64, Errno> {
        let size = range.length.min(WRITE_BYTES_MAX);
        // At most 4096.
        let kib = size.div_ceil(1024) as u32;
        let room = Arc::clone(&self.rings.write_kib).acquire_many_owned(kib);
        let room = tokio::time::timeout_at(deadline.instant().into(), room).await;
        let _room = room.map_err(|_| Errno::TIMEDOUT)?;
        // Copied once: the caller may change its memory while the bytes are sent to the replicas.
        let mut payload = vec![0; size as usize];
        region.read_at(range.memory_offset, &mut payload)?;
        self.write_payload(id, open, range.file_offset, Bytes::from(payload), deadline).await?;
        Ok(size)
    }
}
