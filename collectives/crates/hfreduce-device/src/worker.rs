//! The worker thread of a device: queues copies, queries their completion, and notifies engine and callers.
//!
//! Completion of a copy has no descriptor to sleep on, and the driver's blocking wait has no deadline. So the
//! worker polls: continuously while there is progress, then with growing pauses of at most [`PAUSE_MAX`]. While
//! only the engine works it sleeps, and output that the engine delivers wakes it.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::error::DeviceError;
use crate::job::{Job, Lane};

/// A copy of 64 KiB takes about this long.
const PAUSE_MIN: Duration = Duration::from_micros(5);
const PAUSE_MAX: Duration = Duration::from_micros(200);
/// Poll interval of an operation that only waits for other ranks.
const GLANCE: Duration = Duration::from_millis(10);

/// Queue of jobs for the worker.
#[derive(Default)]
pub struct Inbox {
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Default)]
struct State {
    new: Vec<Job>,
    stopped: bool,
    ended: bool,
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a job; returns it if the worker has been stopped.
    pub fn put(&self, job: Job) -> Result<(), Box<Job>> {
        let mut state = self.state();
        if state.stopped {
            return Err(Box::new(job));
        }
        state.new.push(job);
        Ok(())
    }

    /// Stops the worker: it accepts no more jobs and ends the present ones.
    pub fn stop(&self) {
        self.state().stopped = true;
    }

    /// Records that the worker has released its resources, as far as possible.
    pub fn ended(&self) {
        self.state().ended = true;
        self.bell.notify_all();
    }

    /// Waits for the end of the worker, for at most `grace_period`.
    pub fn wait_for_end(&self, grace_period: Duration) -> bool {
        let waited = self.bell.wait_timeout_while(self.state(), grace_period, |state| !state.ended);
        waited.is_ok_and(|(state, _)| state.ended)
    }

    fn take(&self) -> (Vec<Job>, bool) {
        let mut state = self.state();
        (std::mem::take(&mut state.new), state.stopped)
    }
}

/// Runs until it is stopped and has no jobs left, or for `grace_period` after it was stopped.
pub fn run(inbox: &Inbox, lane: &mut Lane, grace_period: Duration) {
    let mut jobs: VecDeque<Job> = VecDeque::new();
    let mut pause = PAUSE_MIN;
    let mut closing: Option<Instant> = None;
    loop {
        let (new, stopped) = inbox.take();
        jobs.extend(new);
        if stopped && closing.is_none() {
            closing = Some(Instant::now() + grace_period);
            let ordinal = lane.context.ordinal;
            let closed = DeviceError::Closed { device: ordinal, why: "was closed" };
            for job in jobs.iter_mut().filter(|job| !job.is_over()) {
                job.fail(&closed);
            }
        }
        let moved = advance(&mut jobs, lane);
        let before = jobs.len();
        jobs.retain(|job| !job.is_over());
        if closing.is_some_and(|end| jobs.is_empty() || Instant::now() >= end) {
            return;
        }
        if moved || jobs.len() < before {
            pause = PAUSE_MIN;
        } else if jobs.iter().any(Job::is_asking) || closing.is_some() {
            lane.counters.pauses.fetch_add(1, Ordering::Relaxed);
            std::thread::park_timeout(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        } else if jobs.is_empty() {
            std::thread::park();
        } else {
            std::thread::park_timeout(GLANCE);
        }
    }
}

fn advance(jobs: &mut VecDeque<Job>, lane: &mut Lane) -> bool {
    if jobs.is_empty() {
        return false;
    }
    let context: Arc<Context> = lane.context.clone();
    let current = match context.enter() {
        Ok(current) => current,
        Err(error) => {
            for job in jobs.iter_mut() {
                job.fail(&error);
                job.record_query_failure();
            }
            return true;
        }
    };
    let (mut moved, mut free) = (false, true);
    for job in jobs.iter_mut() {
        moved |= job.advance(lane, free);
        free &= !job.holds_the_way_down();
    }
    drop(current);
    moved
}
