//! State of an operation that the caller's handle and the worker share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hfreduce_engine::{Callback, CollectiveError};

use crate::error::DeviceError;

/// The reason why an operation ended.
#[derive(Clone, Debug)]
pub enum Failure {
    /// A failure before the engine had it.
    Device(DeviceError),
    /// The error that every rank reports.
    Collective(CollectiveError),
}

/// State of an operation that the caller's handle and the worker share.
#[derive(Default)]
pub struct Settled {
    ended: AtomicBool,
    state: Mutex<State>,
    callbacks: Mutex<Vec<Callback>>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub struct State {
    /// The whole input is in host memory.
    pub arrived: bool,
    /// Result, once it has ended.
    pub end: Option<Result<(), Failure>>,
    /// Its copies have left the queues.
    pub drained: bool,
    /// A thread is about to submit the block to the engine.
    pub claimed: bool,
}

impl Settled {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True once it has ended: no further copy starts.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Reserves the block for the engine, unless the operation has ended already.
    pub fn claim(&self) -> bool {
        let mut state = self.state();
        state.claimed = state.end.is_none();
        state.claimed
    }

    /// Records that the engine did not accept it.
    pub fn disclaim(&self) {
        self.state().claimed = false;
    }

    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// Ends the operation, unless it has ended before.
    pub fn end(&self, how: Result<(), Failure>) {
        self.change(|state| {
            state.end.get_or_insert(how);
            self.ended.store(true, Ordering::Release);
        });
        let callbacks = std::mem::take(&mut *self.callbacks());
        for callback in callbacks {
            callback();
        }
    }

    /// Runs `callback` once the operation has ended: on the thread that ends it, or immediately.
    pub fn on_end(&self, callback: Callback) {
        {
            let mut callbacks = self.callbacks();
            if !self.is_ended() {
                callbacks.push(callback);
                return;
            }
        }
        callback();
    }

    fn callbacks(&self) -> MutexGuard<'_, Vec<Callback>> {
        self.callbacks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `until` for the condition `ready`; returns the result, if the operation ended.
    pub fn wait(
        &self,
        until: Instant,
        ready: impl Fn(&State) -> bool,
    ) -> Option<Result<(), Failure>> {
        let mut state = self.state();
        while !ready(&state) {
            let remaining = until.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                break;
            }
            state = match self.changed.wait_timeout(state, remaining) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        state.end.clone()
    }
}
