//! Writes that are answered before they are durable, as those of a local file system: a program that
//! writes in order, or in small pieces, does not wait for each of them.
//!
//! A write is divided into pieces within one chunk. Each piece is in a slot of the journal before
//! the write is answered, so that a successor of this daemon writes it. A large piece is written
//! immediately, a small one after `GATHER` or when an operation waits for it: adjacent bytes that
//! follow are joined to it. Pieces of one chunk are written one after the other, in order, different
//! chunks concurrently.
//!
//! Operations that depend on the content or the length of a file wait for its earlier pieces.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_core::ids::InodeId;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, watch};

use crate::journal::{FormerWrite, Journal, SLOT_BYTES, SlotRecord, WRITE_SLOTS};

/// Slots that one file can have: a file whose services do not respond leaves some to others.
const SLOTS_OF_FILE_MAX: usize = WRITE_SLOTS * 3 / 4;
/// Pieces of one chunk: one that is being written, and the next.
const PIECES_OF_CHUNK_MAX: usize = 2;

/// A piece of this length is not delayed.
const LARGE_BYTES: usize = 64 << 10;
/// Delay of a small piece.
const GATHER: Duration = Duration::from_millis(2);

/// A chunk of a file that a task must write.
pub(crate) type Work = (InodeId, u32);

/// Writes of a mount that are not durable yet.
pub(crate) struct WriteBehind {
    /// Whether writes are answered early.
    pub(crate) enabled: bool,
    state: Mutex<State>,
    /// Number of pieces written so far.
    written: watch::Sender<u64>,
    /// Notified when an operation starts to wait.
    awaited: Notify,
    work: UnboundedSender<Work>,
}

#[derive(Default)]
struct State {
    files: HashMap<InodeId, PendingFile>,
    free_slots: Vec<usize>,
    next_order: u64,
    /// `next_order` when it was last checked whether slots are in use.
    checked_order: u64,
    /// Slots may have memory.
    has_memory: bool,
    /// The log names the lack of space for the state file once.
    is_full_logged: bool,
}

#[derive(Default)]
struct PendingFile {
    /// Chunks that a task writes.
    chunks: BTreeMap<u32, Chunk>,
    /// End of the last pending byte.
    end: u64,
    slots: usize,
    /// Number of operations that wait for it.
    waiting: usize,
    /// Why an answered write failed; reported once.
    error: Option<Errno>,
}

#[derive(Default)]
struct Chunk {
    pieces: VecDeque<Piece>,
    /// The first piece is being written.
    started: bool,
}

struct Piece {
    offset: u64,
    content: Content,
    slot: usize,
    order: u64,
}

/// One write's bytes are kept as they were received; those of several are joined.
enum Content {
    One(Bytes),
    Joined(BytesMut),
}

/// Bytes to write now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Flight {
    pub(crate) offset: u64,
    pub(crate) bytes: Bytes,
}

/// Result of an attempt to add bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Added {
    Pending,
    /// The chunk, or the file, has as many pieces as it can have: the next attempt is after one of
    /// them was written.
    Full,
    /// Other files use all slots.
    NoSlot,
}

impl Content {
    fn len(&self) -> usize {
        match self {
            Self::One(bytes) => bytes.len(),
            Self::Joined(bytes) => bytes.len(),
        }
    }

    fn append(&mut self, more: &[u8]) {
        if let Self::One(first) = self {
            let mut joined = BytesMut::with_capacity(2 * (first.len() + more.len()));
            joined.extend_from_slice(first);
            *self = Self::Joined(joined);
        }
        if let Self::Joined(joined) = self {
            joined.extend_from_slice(more);
        }
    }

    fn freeze(&mut self) -> Bytes {
        let bytes = match self {
            Self::One(bytes) => std::mem::take(bytes),
            Self::Joined(joined) => std::mem::take(joined).freeze(),
        };
        *self = Self::One(bytes.clone());
        bytes
    }
}

impl Piece {
    fn end(&self) -> u64 {
        self.offset + self.content.len() as u64
    }
}

impl Chunk {
    /// The piece to which `bytes` at `offset` can be joined.
    fn piece_before(&mut self, offset: u64, bytes: &[u8]) -> Option<&mut Piece> {
        if self.pieces.len() <= usize::from(self.started) {
            return None;
        }
        let last = self.pieces.back_mut()?;
        let fits = last.content.len() + bytes.len() <= SLOT_BYTES;
        (last.end() == offset && fits).then_some(last)
    }
}

impl PendingFile {
    fn has_room(&self, chunk: u32) -> bool {
        let pieces = self.chunks.get(&chunk).map_or(0, |it| it.pieces.len());
        pieces < PIECES_OF_CHUNK_MAX && self.slots < SLOTS_OF_FILE_MAX
    }

    /// Returns whether a task must be started for the chunk.
    fn push(&mut self, chunk: u32, piece: Piece) -> bool {
        self.end = self.end.max(piece.end());
        self.slots += 1;
        let is_new = !self.chunks.contains_key(&chunk);
        self.chunks.entry(chunk).or_default().pieces.push_back(piece);
        is_new
    }

    fn orders(&self) -> impl Iterator<Item = u64> {
        self.chunks.values().flat_map(|chunk| chunk.pieces.iter().map(|piece| piece.order))
    }
}

impl State {
    fn oldest_order(&self, inode: InodeId) -> Option<u64> {
        self.files.get(&inode)?.orders().min()
    }

    fn forget_if_idle(&mut self, inode: InodeId) {
        let is_idle = |file: &PendingFile| {
            file.chunks.is_empty() && file.error.is_none() && file.waiting == 0
        };
        if self.files.get(&inode).is_some_and(is_idle) {
            self.files.remove(&inode);
        }
    }
}

impl WriteBehind {
    /// `former`: writes that predecessors have answered. Also returns the queue of chunks to write.
    pub(crate) fn new(
        enabled: bool,
        mut former: Vec<FormerWrite>,
    ) -> (Self, UnboundedReceiver<Work>) {
        former.sort_by_key(|write| write.order);
        let (work, queue) = unbounded_channel();
        let mut state = State { free_slots: (0..WRITE_SLOTS).collect(), ..State::default() };
        for FormerWrite { slot, inode, offset, order, chunk, bytes } in former {
            state.free_slots.retain(|free| *free != slot);
            (state.next_order, state.has_memory) = (order + 1, true);
            let piece = Piece { offset, content: Content::One(bytes.into()), slot, order };
            if state.files.entry(inode).or_default().push(chunk, piece) {
                // The receiver is below.
                let _ = work.send((inode, chunk));
            }
        }
        let (state, written) = (Mutex::new(state), watch::Sender::new(0));
        let awaited = Notify::new();
        (Self { enabled, state, written, awaited, work }, queue)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds bytes of one chunk, at most [`SLOT_BYTES`]; they are in the journal when this returns
    /// [`Added::Pending`].
    pub(crate) fn add(
        &self,
        journal: &Journal,
        (inode, chunk): (InodeId, u32),
        offset: u64,
        bytes: &Bytes,
    ) -> Added {
        let slot = {
            let mut state = self.lock();
            if state.join(journal, (inode, chunk), offset, bytes) {
                return Added::Pending;
            }
            if state.files.get(&inode).is_some_and(|file| !file.has_room(chunk)) {
                return Added::Full;
            }
            match state.free_slots.pop() {
                Some(slot) => slot,
                None if state.files.get(&inode).is_some_and(|file| file.slots > 0) => {
                    return Added::Full;
                }
                None => return Added::NoSlot,
            }
        };
        // Without the lock: copying takes a while.
        let filled = journal.fill_slot(slot, bytes);
        let mut state = self.lock();
        if let Err(error) = filled {
            state.free_slots.push(slot);
            if !std::mem::replace(&mut state.is_full_logged, true) {
                tracing::warn!(%error, "no space for the state of the mount: writes wait until they are durable");
            }
            return Added::NoSlot;
        }
        let order = state.next_order;
        let file = state.files.entry(inode).or_default();
        if !file.has_room(chunk) {
            state.free_slots.push(slot);
            return Added::Full;
        }
        journal.use_slot(slot, SlotRecord { inode, chunk, offset, order }, bytes.len());
        let piece = Piece { offset, content: Content::One(bytes.clone()), slot, order };
        if file.push(chunk, piece) {
            // The receiver ends with the daemon only.
            let _ = self.work.send((inode, chunk));
        }
        state.next_order += 1;
        state.has_memory = true;
        Added::Pending
    }

    /// The next piece of a chunk, when it should be written. Only for the task that writes the chunk,
    /// which ends at `None`.
    pub(crate) async fn next(&self, work: Work) -> Option<Flight> {
        self.gather(work).await;
        self.start(work)
    }

    /// Waits until the next piece of a chunk should be written.
    async fn gather(&self, work: Work) {
        let awaited = self.awaited.notified();
        tokio::pin!(awaited);
        awaited.as_mut().enable();
        if self.gathers(work) {
            // Another file may be awaited: its bytes are few.
            let _ = tokio::time::timeout(GATHER, awaited).await;
        }
    }

    /// Whether the next piece is small and no operation waits for it.
    fn gathers(&self, (inode, chunk): Work) -> bool {
        let state = self.lock();
        let file = state.files.get(&inode).filter(|file| file.waiting == 0);
        let first = file.and_then(|file| file.chunks.get(&chunk)?.pieces.front());
        first.is_some_and(|piece| piece.content.len() < LARGE_BYTES)
    }

    fn start(&self, (inode, chunk): Work) -> Option<Flight> {
        let mut state = self.lock();
        let file = state.files.get_mut(&inode)?;
        let queue = file.chunks.get_mut(&chunk)?;
        let Some(piece) = queue.pieces.front_mut() else {
            file.chunks.remove(&chunk);
            state.forget_if_idle(inode);
            return None;
        };
        queue.started = true;
        Some(Flight { offset: piece.offset, bytes: piece.content.freeze() })
    }

    /// The piece that was started is durable and recorded, or has failed.
    pub(crate) fn finish(&self, journal: &Journal, (inode, chunk): Work, error: Option<Errno>) {
        let mut state = self.lock();
        let Some(file) = state.files.get_mut(&inode) else { return };
        let Some(queue) = file.chunks.get_mut(&chunk) else { return };
        queue.started = false;
        let Some(piece) = queue.pieces.pop_front() else { return };
        file.slots -= 1;
        file.error = file.error.or(error);
        if file.slots == 0 {
            file.end = 0;
        }
        journal.free_slot(piece.slot);
        state.free_slots.push(piece.slot);
        drop(state);
        self.written.send_modify(|count| *count += 1);
    }

    /// End of the pending bytes of a file; 0: none.
    pub(crate) fn end(&self, inode: InodeId) -> u64 {
        self.lock().files.get(&inode).map_or(0, |file| file.end)
    }

    /// Number of files with pending bytes.
    pub(crate) fn files(&self) -> usize {
        self.lock().files.values().filter(|file| file.slots > 0).count()
    }

    /// Returns the memory of the slots to the system if none was used since the last call.
    pub(crate) fn release_unused_memory(&self, journal: &Journal) {
        let mut state = self.lock();
        let is_unused =
            state.free_slots.len() == WRITE_SLOTS && state.checked_order == state.next_order;
        state.checked_order = state.next_order;
        if state.has_memory && is_unused {
            // Under the lock: no slot may be filled meanwhile.
            journal.release_slot_memory();
            state.has_memory = false;
        }
    }

    /// Reports why an answered write failed, once.
    pub(crate) fn take_error(&self, inode: InodeId) -> Result<(), Errno> {
        let mut state = self.lock();
        let error = state.files.get_mut(&inode).and_then(|file| file.error.take());
        state.forget_if_idle(inode);
        error.map_or(Ok(()), Err)
    }

    /// Waits for the bytes of a file that are pending now.
    pub(crate) async fn drain(&self, inode: InodeId, deadline: Deadline) -> Result<(), Errno> {
        within(deadline, self.outlast(inode)).await
    }

    /// As `drain`, however long the services do not respond. Bytes that are added meanwhile are of
    /// handles that are still open.
    pub(crate) async fn outlast(&self, inode: InodeId) {
        let Some((_wait, end)) = self.start_wait(inode) else { return };
        self.wait_until(|state| state.oldest_order(inode).is_none_or(|oldest| oldest >= end)).await;
    }

    /// `None`: nothing is pending. Otherwise also returns the order of the next piece.
    fn start_wait(&self, inode: InodeId) -> Option<(Wait<'_>, u64)> {
        let mut state = self.lock();
        let end = state.next_order;
        let file = state.files.get_mut(&inode).filter(|file| file.slots > 0)?;
        file.waiting += 1;
        self.awaited.notify_waiters();
        Some((Wait { pending: self, inode }, end))
    }

    /// Waits until no bytes of any file are pending.
    pub(crate) async fn drain_all(&self, deadline: Deadline) -> Result<(), Errno> {
        let done = |state: &State| state.files.values().all(|file| file.slots == 0);
        within(deadline, self.wait_until(done)).await
    }

    /// Waits until the file has room for another piece of the chunk.
    pub(crate) async fn wait_room(
        &self,
        (inode, chunk): Work,
        deadline: Deadline,
    ) -> Result<(), Errno> {
        let room = |state: &State| {
            state.files.get(&inode).is_none_or(|file| {
                file.slots == 0 || (file.has_room(chunk) && !state.free_slots.is_empty())
            })
        };
        within(deadline, self.wait_until(room)).await
    }

    async fn wait_until(&self, is_done: impl Fn(&State) -> bool) {
        let mut written = self.written.subscribe();
        while !is_done(&self.lock()) {
            if written.changed().await.is_err() {
                return;
            }
        }
    }
}

impl State {
    /// Joins bytes to the last piece of their chunk, if they follow it and it is not being written.
    fn join(
        &mut self,
        journal: &Journal,
        (inode, chunk): Work,
        offset: u64,
        bytes: &Bytes,
    ) -> bool {
        let Some(file) = self.files.get_mut(&inode) else { return false };
        let queue = file.chunks.get_mut(&chunk);
        let Some(last) = queue.and_then(|queue| queue.piece_before(offset, bytes)) else {
            return false;
        };
        if journal.extend_slot(last.slot, last.content.len(), bytes).is_err() {
            return false;
        }
        last.content.append(bytes);
        file.end = file.end.max(last.end());
        true
    }
}

/// An operation that waits for the bytes of a file.
struct Wait<'a> {
    pending: &'a WriteBehind,
    inode: InodeId,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let mut state = self.pending.lock();
        if let Some(file) = state.files.get_mut(&self.inode) {
            file.waiting -= 1;
        }
        state.forget_if_idle(self.inode);
    }
}

async fn within(deadline: Deadline, done: impl Future<Output = ()>) -> Result<(), Errno> {
    let done = tokio::time::timeout_at(deadline.instant().into(), done).await;
    done.map_err(|_| Errno::TIMEDOUT)
}

#[cfg(test)]
#[path = "write_behind_test.rs"]
mod tests;
