//! Worker threads of one target: everything that may wait for its disk runs here.
//!
//! Each target has separate threads, so a hanging disk blocks only the threads of its target:
//! neither the runtime's threads, which send heartbeats, nor those of other targets.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum number of threads per target, and so of store operations that share one flush.
const THREADS_MAX: usize = 64;
/// A thread exits after being idle for this long.
const IDLE: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// A worker pool, see the module. Jobs submitted before it is dropped still run.
pub(crate) struct Workers(Arc<Inner>);

struct Inner {
    name: String,
    state: Mutex<State>,
    ready: Condvar,
}

#[derive(Default)]
struct State {
    /// Bounded by the calls in flight of the port, plus a few jobs of the target itself.
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Workers {
    /// Creates a pool without threads.
    pub(crate) fn new(name: impl Into<String>) -> Self {
        let (state, ready) = (Mutex::default(), Condvar::new());
        Self(Arc::new(Inner { name: name.into(), state, ready }))
    }

    /// Queues a job; jobs start in the order of the calls as threads become free.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.0.lock();
        state.jobs.push_back(Box::new(job));
        if state.idle >= state.jobs.len() {
            drop(state);
            self.0.ready.notify_one();
        } else if state.threads < THREADS_MAX {
            state.threads += 1;
            drop(state);
            self.start_thread();
        }
    }

    fn start_thread(&self) {
        let inner = Arc::clone(&self.0);
        let thread = std::thread::Builder::new().name(inner.name.clone());
        if let Err(error) = thread.spawn(move || inner.work()) {
            tracing::warn!(name = self.0.name, %error, "cannot start a worker thread of a target");
            // Its jobs wait for another thread, or for the next job, such as that of a heartbeat.
            self.0.lock().threads -= 1;
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.ready.notify_all();
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        // Corrects the count even if a job panics.
        let _guard = ThreadGuard(self);
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.lock();
                continue;
            }
            if state.closed {
                return;
            }
            state.idle += 1;
            let (woken, timeout) =
                self.ready.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if timeout.timed_out() && state.jobs.is_empty() {
                return;
            }
        }
    }
}

struct ThreadGuard<'a>(&'a Inner);

impl Drop for ThreadGuard<'_> {
    fn drop(&mut self) {
        self.0.lock().threads -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn jobs_run_while_others_hang_and_all_run_eventually() {
        let workers = Workers::new("test");
        let (release, hang) = mpsc::channel::<()>();
        let hang = Arc::new(Mutex::new(hang));
        let (sender, completions) = mpsc::channel();
        for _ in 0..8 {
            let (hang, sender) = (Arc::clone(&hang), sender.clone());
            workers.run(move || {
                let _ = hang.lock().unwrap().recv();
                sender.send("hung").unwrap();
            });
        }
        let last = sender.clone();
        workers.run(move || last.send("ran").unwrap());
        assert_eq!(completions.recv_timeout(LONG), Ok("ran"));
        drop(release);
        for _ in 0..8 {
            assert_eq!(completions.recv_timeout(LONG), Ok("hung"));
        }
    }

    #[test]
    fn excess_jobs_wait_and_a_panic_ends_only_its_thread() {
        let workers = Workers::new("test");
        let (sender, numbers_of_jobs) = mpsc::channel();
        for number in 0..THREADS_MAX * 4 {
            let sender = sender.clone();
            workers.run(move || {
                sender.send(number).unwrap();
                assert!(!number.is_multiple_of(50), "expected panic");
            });
        }
        let mut numbers: Vec<usize> =
            (0..THREADS_MAX * 4).map(|_| numbers_of_jobs.recv_timeout(LONG).unwrap()).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..THREADS_MAX * 4).collect::<Vec<_>>());
        assert!(workers.0.lock().threads <= THREADS_MAX);
    }
}
