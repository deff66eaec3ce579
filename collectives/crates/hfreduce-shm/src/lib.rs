//! Memory that the ranks of a node share, and the protocols in it.
//!
//! - [`segment`]: the shared-memory segment of a node's ranks.
//! - [`peer_memory`]: segments of other nodes of the machine, mapped to read.
//! - [`arenas`]: registered memory of the node's ranks.
//! - [`watermarks`]: progress of a buffer that fills and drains during its operation.
//! - [`flight`]: the flight recorder.
//! - [`quota`]: what the users of a process may take of it.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub mod arenas;
pub mod flight;
pub mod peer_memory;
pub mod quota;
pub mod segment;
pub mod watermarks;

/// Locks a mutex that a thread may have poisoned: its data is consistent between statements.
#[inline]
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
