//! What the caller's handle and the worker share of one operation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hfreduce_engine::{Callback, CollectiveError};

use crate::error::DeviceError;

/// Why an operation ended.
#[derive(Clone, Debug)]
pub enum Failure {
    /// Before the engine had it.
    Device(DeviceError),
    /// As every rank hears it.
    Collective(CollectiveError),
}

/// What the caller's handle and the worker share.
#[derive(Default)]
pub struct Settled {
    ended: AtomicBool,
    state: Mutex<State>,
    callbacks: Mutex<Vec<Callback>>,
    bell: Condvar,
}

#[derive(Debug, Default)]
pub struct State {
    /// The whole input is in host memory.
    pub arrived: bool,
    /// How it ended.
    pub end: Option<Result<(), Failure>>,
    /// No copy of it is queued any more.
    pub drained: bool,
    /// Somebody is about to give the block to the engine.
    pub claimed: bool,
}

impl Settled {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True once it has ended: no new copy begins.
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Keeps the block for the engine, unless it has ended already.
    pub fn claim(&self) -> bool {
        let mut state = self.state();
        state.claimed = state.end.is_none();
        state.claimed
    }

    /// The engine did not take it.
    pub fn disclaim(&self) {
        self.state().claimed = false;
    }

    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.bell.notify_all();
    }

    /// Ends it in this way, unless it has ended before.
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

    /// Runs `callback` once it has ended: on the thread that ends it, or at once.
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

    /// Waits until `until` for what `ready` looks for; how it ended, if it did.
    pub fn wait(
        &self,
        until: Instant,
        ready: impl Fn(&State) -> bool,
    ) -> Option<Result<(), Failure>> {
        let mut state = self.state();
        while !ready(&state) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = match self.bell.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        state.end.clone()
    }
}
