//! The threads of one target: everything that may wait for its disk runs here.
//!
//! Each target has its own, so a disk that hangs takes the threads of its target and of nothing
//! else: neither the runtime's threads, on which heartbeats are sent, nor those of other targets.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Threads of a target: as many store operations can wait for one flush together.
const THREADS_MAX: usize = 64;
/// A thread without work ends after this time.
const IDLE: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// See the module. Jobs that were given before it is dropped are still run.
pub(crate) struct Workers(Arc<Inner>);

struct Inner {
    name: String,
    state: Mutex<State>,
    ready: Condvar,
}

#[derive(Default)]
struct State {
    /// As many as the port lets in, and the few that the target gives itself.
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Workers {
    /// No thread yet.
    pub(crate) fn new(name: impl Into<String>) -> Self {
        let (state, ready) = (Mutex::default(), Condvar::new());
        Self(Arc::new(Inner { name: name.into(), state, ready }))
    }

    /// Runs a job on one of the threads, in the order of the calls as far as threads are free.
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
            tracing::warn!(name = self.0.name, %error, "a thread of a target cannot be started");
            // Its jobs wait for another thread, or for the next job: each heartbeat gives one.
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
        // Corrects the counts also when a job panics.
        let _leave = Leave(self);
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
            let (woken, waited) =
                self.ready.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.jobs.is_empty() {
                return;
            }
        }
    }
}

struct Leave<'a>(&'a Inner);

impl Drop for Leave<'_> {
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
    fn jobs_run_while_others_hang_and_all_are_run_in_the_end() {
        let workers = Workers::new("test");
        let (release, hang) = mpsc::channel::<()>();
        let hang = Arc::new(Mutex::new(hang));
        let (done, ended) = mpsc::channel();
        for _ in 0..8 {
            let (hang, done) = (Arc::clone(&hang), done.clone());
            workers.run(move || {
                let _ = hang.lock().unwrap().recv();
                done.send("hung").unwrap();
            });
        }
        let last = done.clone();
        workers.run(move || last.send("ran").unwrap());
        assert_eq!(ended.recv_timeout(LONG), Ok("ran"));
        drop(release);
        for _ in 0..8 {
            assert_eq!(ended.recv_timeout(LONG), Ok("hung"));
        }
    }

    #[test]
    fn more_jobs_than_threads_wait_and_a_panic_costs_its_thread_only() {
        let workers = Workers::new("test");
        let (done, ended) = mpsc::channel();
        for number in 0..THREADS_MAX * 4 {
            let done = done.clone();
            workers.run(move || {
                done.send(number).unwrap();
                assert!(!number.is_multiple_of(50), "as asked");
            });
        }
        let mut numbers: Vec<usize> =
            (0..THREADS_MAX * 4).map(|_| ended.recv_timeout(LONG).unwrap()).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..THREADS_MAX * 4).collect::<Vec<_>>());
        assert!(workers.0.lock().threads <= THREADS_MAX);
    }
}
