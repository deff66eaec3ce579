//! Poll mutex: futures that are polled one at a time, in turn.
//!
//! A TLS handshake costs a signature and a key agreement, which any peer may request. Polled in
//! turn, all handshakes of a server together occupy at most one thread of its runtime.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::ready;

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// Permission to poll.
pub(super) struct PollMutex(Arc<Semaphore>);

impl Default for PollMutex {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

type Waiter = Pin<Box<dyn Future<Output = Result<OwnedSemaphorePermit, AcquireError>> + Send>>;

/// Polls `future` while no other future of `mutex` is polled. Between two polls it holds no lock.
pub(super) async fn poll_exclusive<T>(mutex: &PollMutex, future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut waiting: Option<Waiter> = None;
    std::future::poll_fn(move |context| {
        let _permit = match (waiting.take(), Arc::clone(&mutex.0).try_acquire_owned()) {
            (None, Ok(permit)) => Ok(permit),
            (waiter, _) => {
                let waiter =
                    waiter.unwrap_or_else(|| Box::pin(Arc::clone(&mutex.0).acquire_owned()));
                ready!(waiting.insert(waiter).as_mut().poll(context))
            }
        };
        waiting = None;
        future.as_mut().poll(context)
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::Poll;
    use std::time::Duration;

    use tokio::task::JoinSet;

    use super::*;

    /// Counts the futures that are inside a poll.
    struct Step<'a> {
        inside: &'a AtomicUsize,
        most: &'a AtomicUsize,
        remaining_steps: usize,
    }

    impl Future for Step<'_> {
        type Output = ();

        fn poll(mut self: Pin<&mut Self>, context: &mut std::task::Context<'_>) -> Poll<()> {
            self.most.fetch_max(self.inside.fetch_add(1, SeqCst) + 1, SeqCst);
            std::thread::sleep(Duration::from_micros(100));
            self.inside.fetch_sub(1, SeqCst);
            if self.remaining_steps == 0 {
                return Poll::Ready(());
            }
            self.remaining_steps -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn futures_are_polled_one_at_a_time_and_all_complete() {
        static INSIDE: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        let mutex = Arc::new(PollMutex::default());
        let mut tasks = JoinSet::new();
        for number in 0..64 {
            let mutex = Arc::clone(&mutex);
            let steps = Step { inside: &INSIDE, most: &MOST, remaining_steps: 5 };
            // Some are dropped while they wait, as evicted connections are.
            let patience = Duration::from_millis(if number % 8 == 0 { 1 } else { 60_000 });
            tasks.spawn(async move {
                let result = tokio::time::timeout(patience, poll_exclusive(&mutex, steps)).await;
                assert!(result.is_ok() || number % 8 == 0);
            });
        }
        while let Some(result) = tasks.join_next().await {
            result.unwrap();
        }
        assert_eq!(MOST.load(SeqCst), 1);
        assert_eq!(mutex.0.available_permits(), 1);
    }
}
