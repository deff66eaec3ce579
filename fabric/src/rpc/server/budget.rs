//! Admission control of a server: calls and bytes per class, shared fairly among connections.
//!
//! A class is a number in a frame's header; the service defines its meaning. Each class has
//! separate budgets, so a service whose calls wait for calls to other nodes assigns a separate
//! class to each step: as long as a call waits only for calls of *higher* classes, exhausted
//! budgets cannot form a cycle, whatever their sizes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Semaphore, oneshot};

use super::call_slots::{CallSlot, CallSlots};
use super::credit::{CreditRequest, Credits};
use crate::deadline::Deadline;

/// Limits of one class of calls, over all connections of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Maximum calls between the first byte read and the last byte written.
    pub calls_max: usize,
    /// Maximum bytes of requests that are too large to be sent without a grant. A single request
    /// that is larger than the budget takes all of it.
    pub bytes_max: usize,
    /// Maximum bytes of replies for which handlers reserve memory (`ReplyMemory::reserve`).
    pub reply_bytes_max: usize,
    /// Each connection may hold at most 1/`shares` of the bytes, or one request. All holders of one
    /// volume's tickets together may have 1/`shares` of the calls and of the bytes; they may hold
    /// more bytes while at least as many stay free.
    pub shares: usize,
}

impl Default for Budget {
    /// For a service whose calls wait for no other service: 8,192 calls, 256 MiB, shares of 1/8.
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
    /// Uses the default budget if `budgets` is empty.
    pub(super) fn new(budgets: &[Budget]) -> Self {
        let class = |budget: &Budget| Class {
            calls: CallSlots::new(budget.calls_max, budget.shares),
            requests: Bytes::new(budget.bytes_max, budget.shares),
            replies: Bytes::new(budget.reply_bytes_max, budget.shares),
        };
        let first = budgets.is_empty().then(Budget::default);
        Self(first.iter().chain(budgets).map(class).collect())
    }

    /// An unknown class counts as the first class.
    fn class(&self, class: u8) -> &Class {
        self.0.get(usize::from(class)).unwrap_or(&self.0[0])
    }

    /// A slot for one call of a service, or of a volume; `None` if no slot is free.
    pub(super) fn call(&self, class: u8, volume: Option<u64>) -> Option<CallSlot> {
        self.class(class).calls.take(volume)
    }

    pub(super) fn requests(&self, class: u8) -> &Arc<Bytes> {
        &self.class(class).requests
    }

    pub(super) fn replies(&self, class: u8) -> &Arc<Bytes> {
        &self.class(class).replies
    }

    /// Creates a semaphore of `permits` for each class.
    pub(super) fn each_class(&self, permits: usize) -> Vec<Arc<Semaphore>> {
        self.0.iter().map(|_| Arc::new(Semaphore::new(permits))).collect()
    }

    /// True if unread replies of a service or a volume block other callers, including those of the
    /// same volume: a caller waits for reply memory, or finds no call slot because these calls hold
    /// them.
    pub(super) fn replies_are_short(&self, volume: Option<u64>) -> bool {
        self.0.iter().any(|it| it.calls.are_exhausted(volume) || it.replies.is_short(volume))
    }

    /// Completes when no call is in flight; new calls are refused from then on.
    pub(super) async fn drained(&self) {
        for class in &self.0 {
            class.calls.drained().await;
        }
    }
}

/// Holder of memory: a connection of a service, or a connection with a request of a volume.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owner {
    pub connection: u64,
    pub volume: Option<u64>,
}

/// Credits with waiters: async driver of [`Credits`].
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

    /// Waits for `bytes` in fair order; `None` if the deadline passes first.
    pub(super) async fn acquire(
        self: &Arc<Self>,
        Owner { connection, volume }: Owner,
        bytes: usize,
        deadline: Deadline,
    ) -> Option<Credit> {
        let (sender, grant) = oneshot::channel();
        let mut pending = {
            let mut state = self.lock();
            let request = state.credits.request(connection, volume, bytes);
            state.waiting.insert(request, sender);
            let bytes = state.credits.credits_of(bytes);
            state.wake();
            PendingCredit { of: Arc::clone(self), connection, request: Some(request), bytes }
        };
        match tokio::time::timeout_at(deadline.instant().into(), grant).await {
            Ok(Ok(())) => Some(pending.take_credit()),
            // Dropping the pending request withdraws it, even if it is granted at this moment.
            _ => None,
        }
    }

    /// Takes `bytes` if they are free and no other request is waiting.
    pub(super) fn try_acquire(
        self: &Arc<Self>,
        Owner { connection, volume }: Owner,
        bytes: usize,
    ) -> Option<Credit> {
        let mut state = self.lock();
        let request = state.credits.request(connection, volume, bytes);
        let grants = state.credits.grant();
        let is_granted = grants.contains(&request);
        for other in grants.into_iter().filter(|it| *it != request) {
            state.notify(other);
        }
        if !is_granted {
            state.credits.cancel(connection, request);
            return None;
        }
        let bytes = state.credits.credits_of(bytes);
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
            // A request that has just timed out finds itself granted and returns the credits
            // (`PendingCredit`).
            let _ = sender.send(());
        }
    }
}

/// A pending request for credits; withdrawn when dropped.
struct PendingCredit {
    of: Arc<Bytes>,
    connection: u64,
    request: Option<CreditRequest>,
    bytes: usize,
}

impl PendingCredit {
    fn take_credit(&mut self) -> Credit {
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
            // The request was granted between the deadline and this point.
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
    /// True if the memory is sufficient for a body of this length.
    pub(super) fn covers(&self, bytes: usize) -> bool {
        self.of.lock().credits.credits_of(bytes) <= self.bytes
    }

    /// Returns the memory in excess of `bytes`.
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
        let credit = bytes.acquire(service(1), 10, soon()).await.unwrap();
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
        drop(credit);
        let mut next = next.await.unwrap().unwrap();
        assert!(next.covers(10) && next.covers(1_000), "all there is covers anything");
        next.shrink(3);
        assert!(!next.covers(4));
        let rest = bytes.try_acquire(service(3), 7).unwrap();
        drop((next, rest));
        assert!(bytes.try_acquire(service(3), 10).is_some());
    }

    /// A connection is tracked only while it holds or requests credits.
    #[tokio::test]
    async fn a_credit_of_zero_bytes_is_not_recorded() {
        let bytes = Bytes::new(10, 1);
        for connection in 0..100 {
            drop(bytes.acquire(service(connection), 0, soon()).await.unwrap());
        }
        assert!(bytes.lock().credits.is_idle());
    }

    #[tokio::test]
    async fn a_dropped_waiter_is_removed() {
        let bytes = Bytes::new(10, 1);
        let credit = bytes.acquire(service(1), 10, soon()).await.unwrap();
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
        drop(credit);
        assert!(bytes.try_acquire(service(3), 10).is_some());
    }
}
