//! Writes that are answered before they are durable: what is pending, and when operations wait for
//! it. See [`crate::write_behind`].

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_core::ids::InodeId;
use tokio::sync::mpsc::UnboundedReceiver;

use super::data::now;
use super::handles::leaves_pages;
use crate::daemon::{Call, Daemon};
use crate::files::OpenFile;
use crate::journal::SLOT_BYTES;
use crate::wire::{is_of_page, is_synchronous};
use crate::write_behind::{Added, Flight, Work};

/// Pause before pending bytes that no service has accepted in time are written again.
const RETRY: Duration = Duration::from_millis(500);

impl Daemon {
    /// Whether a write of a system call may be answered before it is durable. Bytes that are written
    /// under a lock are durable before the lock can be lost.
    pub(super) fn is_deferrable(&self, call: &Call<'_>, handle: u64, open: &OpenFile) -> bool {
        let id = self.inode(call.request.node);
        self.pending.enabled
            && !leaves_pages(handle)
            && !is_of_page(call.request)
            && !is_synchronous(call.request)
            && !self.locks.is_locked(id)
            // Not lost, either.
            && matches!(self.locks.required(id), Ok(None))
            && !open.state().file.is_in_snapshot()
    }

    /// Writes bytes of an open file: in the journal when it returns, durable later.
    pub(super) async fn write_later(
        &self,
        id: InodeId,
        open: &OpenFile,
        offset: u64,
        payload: Bytes,
        deadline: Deadline,
    ) -> Result<(), Errno> {
        self.pending.take_error(id)?;
        let end = offset.checked_add(payload.len() as u64).ok_or(Errno::FBIG)?;
        let (chunk_bytes, length_max) = {
            let layout = &open.state().file.layout;
            (u64::from(layout.chunk_bytes), layout.length_max())
        };
        if end > length_max {
            return Err(Errno::FBIG);
        }
        self.reserve(open, end, deadline).await?;
        let (mut at, mut rest) = (offset, payload);
        while !rest.is_empty() {
            let room = (chunk_bytes - at % chunk_bytes).min(SLOT_BYTES as u64);
            let piece = rest.split_to(rest.len().min(room as usize));
            let length = piece.len() as u64;
            // Below the maximum length.
            let chunk = (at / chunk_bytes) as u32;
            self.add_pending(open, (id, chunk), at, piece, deadline).await?;
            at += length;
        }
        open.state().written = now();
        Ok(())
    }

    async fn add_pending(
        &self,
        open: &OpenFile,
        work: Work,
        offset: u64,
        piece: Bytes,
        deadline: Deadline,
    ) -> Result<(), Errno> {
        loop {
            match self.pending.add(&self.journal, work, offset, &piece) {
                Added::Pending => return Ok(()),
                Added::Full => self.pending.wait_room(work, deadline).await?,
                // The services of other files may not respond: this one does not wait for them.
                Added::NoSlot => {
                    return self.write_payload(work.0, open, offset, piece, deadline).await;
                }
            }
        }
    }

    /// Waits for the pending bytes of a file, if there are any.
    pub(crate) async fn drain(&self, id: InodeId, deadline: Deadline) -> Result<(), Errno> {
        self.pending.drain(id, deadline).await
    }

    /// Makes the pending bytes of a file durable, and reports if earlier ones could not be written.
    pub(super) async fn sync_pending(&self, id: InodeId, deadline: Deadline) -> Result<(), Errno> {
        self.drain(id, deadline).await?;
        self.pending.take_error(id)
    }

    /// Writes pending bytes, each chunk in a task.
    pub(crate) async fn run_write_behind(self: Arc<Self>, mut work: UnboundedReceiver<Work>) {
        while let Some(work) = work.recv().await {
            let daemon = Arc::clone(&self);
            tokio::spawn(async move {
                while let Some(flight) = daemon.pending.next(work).await {
                    let written = daemon.write_flight(work.0, flight).await;
                    daemon.pending.finish(&daemon.journal, work, written.err());
                    if let Err(error) = written {
                        tracing::error!(
                            inode = work.0.0,
                            errno = error.raw_os_error(),
                            "a write that was answered has failed; the next fsync or close of the \
                             file reports it"
                        );
                        // They show what was not written.
                        let deadline = Deadline::after(daemon.timeout);
                        daemon.drop_pages(work.0, 0, 0, deadline).await;
                    }
                }
            });
        }
    }

    /// Writes bytes, for as long as the services do not respond: the program has been told that
    /// they are written.
    async fn write_flight(&self, id: InodeId, flight: Flight) -> Result<(), Errno> {
        loop {
            let deadline = Deadline::after(self.timeout);
            let written = match self.open_pending(id, deadline).await {
                Ok(open) => {
                    let Flight { offset, bytes } = flight.clone();
                    self.write_payload(id, &open, offset, bytes, deadline).await
                }
                Err(error) => Err(error),
            };
            match written {
                Err(Errno::TIMEDOUT | Errno::BUSY | Errno::AGAIN) => {
                    tokio::time::sleep(RETRY).await;
                }
                written => return written,
            }
        }
    }

    /// The file of pending bytes: open, or left by a previous daemon.
    async fn open_pending(&self, id: InodeId, deadline: Deadline) -> Result<Arc<OpenFile>, Errno> {
        match self.files.get(id) {
            Some(open) => Ok(open),
            None => self.open_former(id, true, deadline).await,
        }
    }
}
