//! Connections that the daemon serves at once: at most so many per user, and a multiple of that in all,
//! so that one user cannot exhaust the limit of another.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use hfreduce_engine::driver::lock;
use hfreduce_engine::share::Share;
use hfreduce_shm::quota::{Limit, Limits};

/// Places of all users together, in those of one. Each may take the addresses of its memory and a
/// thread, so their number has an end.
const USERS: usize = 3;
/// Addresses for registered memory, which is mapped for its rank and for those that share the work
/// of its node. A process has 128 TiB.
const ADDRESS_BYTES: usize = 112 << 40;
const FEWER_ADDRESSES: &str = "lower HFREDUCE_REGISTERED_BYTES, or have fewer ranks there";
/// For a rank whose user has too few descriptors here.
const MORE_DESCRIPTORS: &str = "have fewer or smaller groups there, or start hfreduced with a higher \
                                limit (ulimit -Hn, LimitNOFILE)";
/// For a rank whose user has too little memory here.
const REMEDY: &str = "register less (HFREDUCE_REGISTERED_BYTES), have fewer ranks there, or start \
                      hfreduced with a higher --memory-max";

/// See the module's text.
pub(crate) struct ConnectionLimits {
    /// What one user may have.
    each: usize,
    /// Of the ranks of all users.
    limits: Limits,
    taken: Mutex<HashMap<u32, User>>,
}

/// One who has any.
struct User {
    places: usize,
    share: Arc<Share>,
}

/// One of them, given back when dropped.
pub(crate) struct ConnectionSlot {
    places: Arc<ConnectionLimits>,
    user: u32,
    /// What all ranks of this user share.
    pub share: Arc<Share>,
}

impl ConnectionLimits {
    /// With a limit of memory, one user has half of it, of the descriptors and of the addresses. Without
    /// one, users are not kept from each other's: a daemon of one user's ranks may give them all it has.
    pub fn new(each: usize, memory: Option<usize>, descriptors: usize) -> Arc<Self> {
        let part = |all: usize| (if memory.is_some() { all / 2 } else { all }, all);
        let bytes = part(memory.unwrap_or(usize::MAX));
        let memory = Limit::new("bytes of memory", bytes, REMEDY);
        let descriptors = Limit::new("descriptors", part(descriptors), MORE_DESCRIPTORS);
        let addresses = Limit::new("bytes of addresses", part(ADDRESS_BYTES), FEWER_ADDRESSES);
        let limits = Limits { memory, descriptors, addresses };
        Arc::new(Self { each, limits, taken: Mutex::default() })
    }

    /// How many are taken.
    pub fn taken(&self) -> usize {
        lock(&self.taken).values().map(|user| user.places).sum()
    }

    /// A place for a process of this user.
    ///
    /// # Errors
    /// There is none, in words.
    pub fn take(self: &Arc<Self>, user: u32) -> Result<ConnectionSlot, String> {
        let (each, mut taken) = (self.each, lock(&self.taken));
        if taken.get(&user).is_some_and(|own| own.places >= each) || each == 0 {
            return Err(format!(
                "all {each} places of hfreduced for user {user} are taken (--ranks-max)"
            ));
        }
        let all = each.saturating_mul(USERS);
        if taken.values().map(|user| user.places).sum::<usize>() >= all {
            return Err(format!(
                "all {all} places of hfreduced are taken ({USERS} times --ranks-max)"
            ));
        }
        let new = || User { places: 0, share: Share::of_user(user, &self.limits) };
        let own = taken.entry(user).or_insert_with(new);
        own.places += 1;
        Ok(ConnectionSlot { places: self.clone(), user, share: own.share.clone() })
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut taken = lock(&self.places.taken);
        if let Some(own) = taken.get_mut(&self.user) {
            own.places -= 1;
            if own.places == 0 {
                taken.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_who_takes_all_its_places_takes_none_of_others() {
        let places = ConnectionLimits::new(2, None, 0);
        let one: Vec<ConnectionSlot> = (0..2).map(|_| places.take(7).ok().unwrap()).collect();
        let refused = places.take(7).err().unwrap();
        assert!(refused.contains("all 2 places of hfreduced for user 7"), "{refused}");
        assert!(Arc::ptr_eq(&one[0].share, &one[1].share));
        let other = places.take(8).ok().unwrap();
        assert!(!Arc::ptr_eq(&one[0].share, &other.share), "users wait for no level of another");
        drop(one);
        assert_eq!(places.taken(), 1);
        drop((places.take(7), other));
        assert_eq!(places.taken(), 0);
        assert!(lock(&places.taken).is_empty());
    }

    #[test]
    fn all_users_together_have_a_limit() {
        let places = ConnectionLimits::new(1, None, 0);
        let held: Vec<ConnectionSlot> =
            (0..USERS as u32).map(|u| places.take(u).ok().unwrap()).collect();
        let refused = places.take(99).err().unwrap();
        assert!(refused.contains("3 times --ranks-max"), "{refused}");
        drop(held);
        assert!(places.take(99).is_ok());
    }
}
