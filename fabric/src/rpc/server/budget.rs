//! What a server lets in: calls and bytes of each class, shared fairly by connections.
//!
//! A class is a number in a frame's header; its meaning belongs to the service. Each has separate
//! budgets, so a service whose calls wait for calls to other nodes gives each step a class of its
//! own: as long as a call waits only for calls of *higher* classes, no cycle of full budgets can
//! form, whatever the budgets' sizes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Semaphore, oneshot};

use super::call_slots::{CallSlot, CallSlots};
use super::credit::{CreditRequest, Credits};
use crate::deadline::Deadline;

/// Bounds of one class of calls, over all connections of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Calls between their first byte read and their last byte written.
    pub calls_max: usize,
    /// Bytes of requests that are too large to be sent unasked. One that is larger than all of it
    /// takes all of it.
    pub bytes_max: usize,
    /// Bytes of replies for which handlers reserve room (`ReplyMemory::reserve`).
    pub reply_bytes_max: usize,
    /// A connection may hold at most one part in so many of the bytes, or one request. All holders
    /// of one volume's tickets together may have one part in so many of the calls and of the bytes,
    /// of these more while as much stays free.
    pub shares: usize,
}

impl Default for Budget {
    /// For a service whose calls wait for no other service: 8,192 calls, 256 MiB, eighths.
    fn default() -> Self {
        Self { calls_max: 8192, bytes_max: 256 << 20, reply_bytes_max: 256 << 20, shares: 8 }
    }
}

/// The budgets of a server.
pub(super) struct Budgets(Vec<Class>);

struct Class {
    calls: CallSlots,
    requests: Arc<Bytes>,
    replies: Arc<Bytes>,
}

impl Budgets {
    /// At least one class.
    pub(super) fn new(budgets: &[Budget]) -> Self {
        let class = |budget: &Budget| Class {
            calls: CallSlots::new(budget.calls_max, budget.shares),
            requests: Bytes::new(budget.bytes_max, budget.shares),
            replies: Bytes::new(budget.reply_bytes_max, budget.shares),
        };
        let first = budgets.is_empty().then(Budget::default);
        Self(first.iter().chain(budgets).map(class).collect())
    }

    /// An unknown class counts as the first one.
    fn class(&self, class: u8) -> &Class {
        self.0.get(usize::from(class)).unwrap_or(&self.0[0])
    }

    /// A place for one call of a service, or of a volume; `None` when there is none.
    pub(super) fn call(&self, class: u8, volume: Option<u64>) -> Option<CallSlot> {
        self.class(class).calls.take(volume)
    }

    pub(super) fn requests(&self, class: u8) -> &Arc<Bytes> {
        &self.class(class).requests
    }

    pub(super) fn replies(&self, class: u8) -> &Arc<Bytes> {
        &self.class(class).replies
    }

    /// A semaphore of `permits` for each class.
    pub(super) fn each_class(&self, permits: usize) -> Vec<Arc<Semaphore>> {
        self.0.iter().map(|_| Arc::new(Semaphore::new(permits))).collect()
    }

    /// Whether replies that a service or a volume does not take keep others out, those of the same
    /// volume too: one waits for their memory, or there is no place for a call that its own calls
    /// leave.
    pub(super) fn replies_are_short(&self, volume: Option<u64>) -> bool {
        self.0.iter().any(|it| it.calls.are_exhausted(volume) || it.replies.is_short(volume))
    }

    /// Ends when no call is in flight; new ones are refused from then on.
    pub(super) async fn drained(&self) {
        for class in &self.0 {
            class.calls.drained().await;
        }
    }
}

/// Who holds memory: a connection, of a service or with a request of a volume.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owner {
    pub connection: u64,
    pub volume: Option<u64>,
}

/// Credits with waiters: the driver of [`Credits`].
pub(super) struct Bytes {
    state: Mutex<State>,
}

struct State {
    credits: Credits<u64>,
    waiting: HashMap<CreditRequest, oneshot::Sender<()>>,
}

impl Bytes {
    fn new(bytes_max: usize, shares: usize) -> Arc<Self> {
        let credits = Credits::new(bytes_max, bytes_max / shares.max(1));
        Arc::new(Self { state: Mutex::new(State { credits, waiting: HashMap::new() }) })
    }

    /// Waits for `bytes`, in turn with others; `None` when the deadline passes first.
    pub(super) async fn acquire(
        self: &Arc<Self>,
        Owner { connection, volume }: Owner,
        bytes: usize,
        deadline: Deadline,
    ) -> Option<Credit> {
        let (sender, granted) = oneshot::channel();
        let mut pending = {
            let mut state = self.lock();
            let request = state.credits.request(connection, volume, bytes);
            state.waiting.insert(request, sender);
            let bytes = state.credits.counted(bytes);
            state.wake();
            PendingCredit { of: Arc::clone(self), connection, request: Some(request), bytes }
        };
        match tokio::time::timeout_at(deadline.instant().into(), granted).await {
            Ok(Ok(())) => Some(pending.granted()),
            // Dropping what was pending takes it back, also if it is granted at this moment.
            _ => None,
        }
    }

    /// `bytes` if they are free now and nobody else has been waiting.
    pub(super) fn try_acquire(
        self: &Arc<Self>,
        Owner { connection, volume }: Owner,
        bytes: usize,
    ) -> Option<Credit> {
        let mut state = self.lock();
        let request = state.credits.request(connection, volume, bytes);
        let granted = state.credits.grant();
        let mine = granted.contains(&request);
        for other in granted.into_iter().filter(|it| *it != request) {
            state.notify(other);
        }
        if !mine {
            state.credits.cancel(connection, request);
            return None;
        }
        let bytes = state.credits.counted(bytes);
        Some(Credit { of: Arc::clone(self), connection, bytes })
    }

    fn is_short(&self, volume: Option<u64>) -> bool {
        self.lock().credits.is_short(volume)
    }

    fn release(&self, connection: u64, bytes: usize) {
        let mut state = self.lock();
        state.credits.release(connection, bytes);
        state.wake();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn wake(&mut self) {
        for request in self.credits.grant() {
            self.notify(request);
        }
    }

    fn notify(&mut self, request: CreditRequest) {
        if let Some(sender) = self.waiting.remove(&request) {
            // One that has just given up finds its request granted and gives it back (`PendingCredit`).
            let _ = sender.send(());
        }
    }
}

/// A request for credits; taken back when it is dropped.
struct PendingCredit {
    of: Arc<Bytes>,
    connection: u64,
    request: Option<CreditRequest>,
    bytes: usize,
}

impl PendingCredit {
    fn granted(&mut self) -> Credit {
        self.request = None;
        Credit { of: Arc::clone(&self.of), connection: self.connection, bytes: self.bytes }
    }
}

impl Drop for PendingCredit {
    fn drop(&mut self) {
        let Some(request) = self.request else { return };
        let mut state = self.of.lock();
        if state.waiting.remove(&request).is_some() {
            state.credits.cancel(self.connection, request);
        } else {
            // It was granted between the deadline and now.
            state.credits.release(self.connection, self.bytes);
        }
        state.wake();
    }
}

/// Memory that one call may use, until it is dropped.
pub(super) struct Credit {
    of: Arc<Bytes>,
    connection: u64,
    bytes: usize,
}

impl Credit {
    /// Enough for a body of this length?
    pub(super) fn covers(&self, bytes: usize) -> bool {
        self.of.lock().credits.counted(bytes) <= self.bytes
    }

    /// Gives back what is not needed.
    pub(super) fn shrink(&mut self, bytes: usize) {
        if bytes < self.bytes {
            self.of.release(self.connection, self.bytes - bytes);
            self.bytes = bytes;
        }
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.of.release(self.connection, self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn service(connection: u64) -> Owner {
        Owner { connection, volume: None }
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    #[tokio::test]
    async fn a_credit_goes_to_the_next_when_it_is_dropped() {
        let bytes = Bytes::new(10, 1);
        let held = bytes.acquire(service(1), 10, soon()).await.unwrap();
        assert!(bytes.try_acquire(service(2), 1).is_none());
        let late = bytes.acquire(service(2), 1, Deadline::after(Duration::from_millis(10))).await;
        assert!(late.is_none(), "the deadline ends the wait");
        let next = tokio::spawn({
            let bytes = Arc::clone(&bytes);
            async move { bytes.acquire(service(2), 10, soon()).await }
        });
        while !bytes.is_short(None) {
            tokio::task::yield_now().await;
        }
        drop(held);
        let mut next = next.await.unwrap().unwrap();
        assert!(next.covers(10) && next.covers(1_000), "all there is covers anything");
        next.shrink(3);
        assert!(!next.covers(4));
        let rest = bytes.try_acquire(service(3), 7).unwrap();
        drop((next, rest));
        assert!(bytes.try_acquire(service(3), 10).is_some());
    }

    /// A connection is known only while it holds or wants something.
    #[tokio::test]
    async fn a_credit_of_no_bytes_leaves_nothing_behind() {
        let bytes = Bytes::new(10, 1);
        for connection in 0..100 {
            drop(bytes.acquire(service(connection), 0, soon()).await.unwrap());
        }
        assert!(bytes.lock().credits.is_idle());
    }

    #[tokio::test]
    async fn a_waiter_that_is_dropped_leaves_nothing_behind() {
        let bytes = Bytes::new(10, 1);
        let held = bytes.acquire(service(1), 10, soon()).await.unwrap();
        let waiter = tokio::spawn({
            let bytes = Arc::clone(&bytes);
            async move { bytes.acquire(service(2), 10, soon()).await }
        });
        while !bytes.is_short(None) {
            tokio::task::yield_now().await;
        }
        waiter.abort();
        assert!(waiter.await.is_err());
        assert!(bytes.lock().waiting.is_empty());
        drop(held);
        assert!(bytes.try_acquire(service(3), 10).is_some());
    }
}
