//! `Completions`: a queue of operations that have ended, which threads of Python wait for.
//!
//! The threads that move data put tokens in and never call Python; threads of Python take them out
//! and run what belongs to them. The queue is bounded by the operations that are watched.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pyo3::prelude::*;

use crate::arguments::seconds;
use crate::work::Work;

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Default)]
struct State {
    ended: VecDeque<Py<PyAny>>,
    stopped: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, token: Py<PyAny>) {
        self.lock().ended.push_back(token);
        self.bell.notify_one();
    }

    /// The next token; none if there is none until `until`, or none is left and it was stopped.
    fn take(&self, until: Instant) -> Option<Py<PyAny>> {
        let mut state = self.lock();
        loop {
            if let Some(token) = state.ended.pop_front() {
                return Some(token);
            }
            let remaining = until.saturating_duration_since(Instant::now());
            if state.stopped || remaining.is_zero() {
                return None;
            }
            state = match self.bell.wait_timeout(state, remaining) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

/// The operations behind one token that have not ended.
struct Watched {
    remaining: AtomicUsize,
    token: Mutex<Option<Py<PyAny>>>,
    queue: Arc<Queue>,
}

impl Watched {
    fn count_end(&self) {
        if self.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            let token = self.token.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(token) = token {
                self.queue.put(token);
            }
        }
    }
}

/// See the module's text.
#[pyclass(module = "hfreduce._native", frozen)]
pub struct Completions {
    queue: Arc<Queue>,
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> Self {
        Self { queue: Arc::default() }
    }

    /// Puts `token` into the queue once all of `works` have ended, in success or failure.
    fn watch(&self, works: Vec<Py<Work>>, token: Py<PyAny>) {
        let watched = Arc::new(Watched {
            // One more than there are, so that the last of them cannot end it before this call does.
            remaining: AtomicUsize::new(works.len() + 1),
            token: Mutex::new(Some(token)),
            queue: self.queue.clone(),
        });
        for work in &works {
            let watched = watched.clone();
            work.get().on_end(Box::new(move || watched.count_end()));
        }
        watched.count_end();
    }

    /// The token that has waited longest; None after `timeout_seconds` without one, and immediately
    /// if the queue is empty and stopped.
    fn next(&self, py: Python<'_>, timeout_seconds: f64) -> PyResult<Option<Py<PyAny>>> {
        let timeout = seconds(timeout_seconds)?.min(std::time::Duration::from_secs(3600));
        Ok(py.detach(|| self.queue.take(Instant::now() + timeout)))
    }

    /// No `next` waits from now on.
    fn stop(&self) {
        self.queue.lock().stopped = true;
        self.queue.bell.notify_all();
    }
}
