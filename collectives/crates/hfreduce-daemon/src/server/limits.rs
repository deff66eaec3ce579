//! Limits of the daemon's users: the number of connections per user and in total, so that one user
//! cannot exhaust the limit of another.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use hfreduce_engine::driver::lock;
use hfreduce_engine::share::Share;
use hfreduce_shm::quota::{Limit, Limits};

/// Maximum number of connections of all users, as a multiple of that of one. Each may take address
/// space and a thread.
const USERS: usize = 3;
/// Address space for registered memory, which is mapped for its rank and for the owners of its
/// node. A process has 128 TiB.
const ADDRESS_BYTES_MAX: usize = 112 << 40;
const FEWER_ADDRESSES: &str = "lower HFREDUCE_REGISTERED_BYTES, or use fewer ranks";
/// Remedy if the descriptors are exhausted.
const MORE_DESCRIPTORS: &str = "use fewer or smaller groups, or start hfreduced with a higher \
                                limit (ulimit -Hn, LimitNOFILE)";
/// Remedy if the memory is exhausted.
const REMEDY: &str = "register less (HFREDUCE_REGISTERED_BYTES), use fewer ranks, or start \
                      hfreduced with a higher --memory-max";

/// Connections and resources of all users.
pub(crate) struct ConnectionLimits {
    /// Maximum number of connections of one user.
    each: usize,
    /// Limits of the resources of all users.
    limits: Limits,
    users: Mutex<HashMap<u32, User>>,
}

/// A user with connections.
struct User {
    places: usize,
    share: Arc<Share>,
}

/// A connection of a user, released when dropped.
pub(crate) struct ConnectionSlot {
    places: Arc<ConnectionLimits>,
    user: u32,
    /// Resources shared by all ranks of this user.
    pub share: Arc<Share>,
}

impl ConnectionLimits {
    /// With a limit of memory, one user may have half of it, of the descriptors and of the address
    /// space. Without one, a user may have all: such a daemon serves the ranks of one user.
    pub fn new(each: usize, memory: Option<usize>, descriptors: usize) -> Arc<Self> {
        let part = |all: usize| (if memory.is_some() { all / 2 } else { all }, all);
        let bytes = part(memory.unwrap_or(usize::MAX));
        let memory = Limit::new("bytes of memory", bytes, REMEDY);
        let descriptors = Limit::new("descriptors", part(descriptors), MORE_DESCRIPTORS);
        let addresses =
            Limit::new("bytes of address space", part(ADDRESS_BYTES_MAX), FEWER_ADDRESSES);
        let limits = Limits { memory, descriptors, addresses };
        Arc::new(Self { each, limits, users: Mutex::default() })
    }

    /// Number of connections.
    pub fn in_use(&self) -> usize {
        lock(&self.users).values().map(|user| user.places).sum()
    }

    /// Takes a connection slot for a process of this user.
    ///
    /// # Errors
    /// The limit that is reached.
    pub fn take(self: &Arc<Self>, user: u32) -> Result<ConnectionSlot, String> {
        let (each, mut users) = (self.each, lock(&self.users));
        if users.get(&user).is_some_and(|own| own.places >= each) || each == 0 {
            return Err(format!(
                "user {user} has {each} ranks at hfreduced, the maximum (--ranks-max)"
            ));
        }
        let all = each.saturating_mul(USERS);
        if users.values().map(|user| user.places).sum::<usize>() >= all {
            return Err(format!(
                "hfreduced has {all} ranks, the maximum ({USERS} times --ranks-max)"
            ));
        }
        let new = || User { places: 0, share: Share::of_user(user, &self.limits) };
        let own = users.entry(user).or_insert_with(new);
        own.places += 1;
        Ok(ConnectionSlot { places: self.clone(), user, share: own.share.clone() })
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut users = lock(&self.places.users);
        if let Some(own) = users.get_mut(&self.user) {
            own.places -= 1;
            if own.places == 0 {
                users.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_cannot_exhaust_the_connections_of_others() {
        let places = ConnectionLimits::new(2, None, 0);
        let slots: Vec<ConnectionSlot> = (0..2).map(|_| places.take(7).ok().unwrap()).collect();
        let refused = places.take(7).err().unwrap();
        assert!(refused.contains("user 7 has 2 ranks at hfreduced"), "{refused}");
        assert!(Arc::ptr_eq(&slots[0].share, &slots[1].share));
        let other = places.take(8).ok().unwrap();
        assert!(!Arc::ptr_eq(&slots[0].share, &other.share), "users have separate priorities");
        drop(slots);
        assert_eq!(places.in_use(), 1);
        drop((places.take(7), other));
        assert_eq!(places.in_use(), 0);
        assert!(lock(&places.users).is_empty());
    }

    #[test]
    fn all_users_together_have_a_limit() {
        let places = ConnectionLimits::new(1, None, 0);
        let slots: Vec<ConnectionSlot> =
            (0..USERS as u32).map(|u| places.take(u).ok().unwrap()).collect();
        let refused = places.take(99).err().unwrap();
        assert!(refused.contains("3 times --ranks-max"), "{refused}");
        drop(slots);
        assert!(places.take(99).is_ok());
    }
}
