//! Limits of the memory that a server shares with its clients. Pure.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::CONNECTION_BYTES;

/// A user has at most this part of the connections, so that one user's clients leave memory for
/// those of others.
const USER_PARTS: usize = 2;

/// Connections through shared memory: in total, and by the user of the client's process.
pub(super) struct Memory {
    connections_max: usize,
    by_user: Mutex<HashMap<u32, usize>>,
}

impl Memory {
    /// At most this much memory in all connections together.
    pub(super) fn new(bytes_max: usize) -> Arc<Self> {
        let connections_max = bytes_max / CONNECTION_BYTES;
        Arc::new(Self { connections_max, by_user: Mutex::default() })
    }

    /// Memory for a connection of a user, or `None`.
    pub(super) fn take(self: &Arc<Self>, user: u32) -> Option<Share> {
        let mut by_user = self.lock();
        let of_user = by_user.get(&user).copied().unwrap_or(0);
        let user_max = self.connections_max.div_ceil(USER_PARTS);
        if of_user >= user_max || by_user.values().sum::<usize>() >= self.connections_max {
            return None;
        }
        by_user.insert(user, of_user + 1);
        Some(Share { memory: Arc::clone(self), user })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, usize>> {
        self.by_user.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory of one connection, returned when dropped.
pub(super) struct Share {
    memory: Arc<Memory>,
    user: u32,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut by_user = self.memory.lock();
        if let Some(of_user) = by_user.get_mut(&self.user) {
            *of_user -= 1;
            if *of_user == 0 {
                by_user.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_leaves_half_of_the_memory_to_others() {
        let memory = Memory::new(5 * CONNECTION_BYTES);
        let of_one: Vec<_> = (0..3).map(|_| memory.take(1).unwrap()).collect();
        assert!(memory.take(1).is_none());
        let of_two = [memory.take(2).unwrap(), memory.take(2).unwrap()];
        assert!(memory.take(2).is_none() && memory.take(3).is_none(), "all is in use");
        drop(of_one);
        let _again = memory.take(3).unwrap();
        drop(of_two);
        assert_eq!(memory.lock().iter().collect::<Vec<_>>(), [(&3, &1)]);
    }

    #[test]
    fn less_memory_than_for_one_connection_is_none() {
        assert!(Memory::new(CONNECTION_BYTES - 1).take(1).is_none());
    }
}
