//! What the ranks that one user has in this process share. A daemon has a share for each user, with
//! limits; any other process has one without.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use crate::driver::lock;
use crate::driver::priority::PriorityLevels;

/// See the module's text.
#[derive(Debug, Default)]
pub struct Share {
    /// Whose chunks go first. Levels of different users are not compared: each chooses its own.
    pub(crate) priority_levels: Arc<PriorityLevels>,
    /// Memory of this process that a user's ranks may cause to be used.
    memory: Account,
    /// Descriptors of this process.
    descriptors: Account,
    /// Addresses of this process, for registered memory.
    addresses: Account,
}

static OF_PROCESS: LazyLock<Arc<Share>> = LazyLock::new(Arc::default);

impl Share {
    /// The share of a process that serves nobody else's ranks.
    pub fn of_process() -> Arc<Self> {
        OF_PROCESS.clone()
    }

    /// The share of a user of a daemon.
    pub(crate) fn of_user(user: u32, limits: &Limits) -> Arc<Self> {
        let account = |limit: &Arc<Limit>| Account { user, limit: Some(limit.clone()) };
        let Limits { memory, descriptors, addresses } = limits;
        let (memory, descriptors) = (account(memory), account(descriptors));
        let addresses = account(addresses);
        Arc::new(Self { memory, descriptors, addresses, ..Self::default() })
    }

    /// No memory yet.
    pub(crate) fn memory(&self) -> Charge {
        Charge { account: self.memory.clone(), amount: 0 }
    }

    /// No addresses yet.
    pub(crate) fn addresses(&self) -> Charge {
        Charge { account: self.addresses.clone(), amount: 0 }
    }

    /// No descriptor yet.
    pub(crate) fn descriptors(&self) -> Charge {
        Charge { account: self.descriptors.clone(), amount: 0 }
    }

    /// One descriptor.
    ///
    /// # Errors
    /// [`OverLimit`].
    pub(crate) fn descriptor(&self) -> Result<Charge, OverLimit> {
        let mut one = self.descriptors();
        one.set_to(1).map(|()| one)
    }
}

/// What a daemon's users share.
#[derive(Debug)]
pub(crate) struct Limits {
    pub memory: Arc<Limit>,
    pub descriptors: Arc<Limit>,
    pub addresses: Arc<Limit>,
}

/// Something that the users of a daemon have to share.
#[derive(Debug)]
pub(crate) struct Limit {
    what: &'static str,
    remedy: &'static str,
    /// What one user may have, and all together.
    each: usize,
    all: usize,
    taken: Mutex<HashMap<u32, usize>>,
}

/// A rank wants more of something than its user may have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "hfreduced has too little room for user {user}: {wanted} more {what} are wanted, {taken} of \
     {most} are taken; {remedy}"
)]
pub struct OverLimit {
    user: u32,
    what: &'static str,
    wanted: usize,
    taken: usize,
    most: usize,
    remedy: &'static str,
}

impl Limit {
    /// `each` of it for a user at most, and `all` for all users together.
    pub fn new(what: &'static str, (each, all): (usize, usize), remedy: &'static str) -> Arc<Self> {
        Arc::new(Self { what, remedy, each, all, taken: Mutex::default() })
    }

    /// Takes `to` in place of `from`.
    fn change(&self, user: u32, from: usize, to: usize) -> Result<(), OverLimit> {
        let mut taken = lock(&self.taken);
        let wanted = to.saturating_sub(from);
        let own = taken.get(&user).copied().unwrap_or(0);
        let all = taken.values().sum::<usize>();
        // A reduction is never refused.
        for (taken, most) in [(own, self.each), (all, self.all)] {
            if wanted > 0 && taken.saturating_add(wanted) > most {
                let Self { what, remedy, .. } = *self;
                return Err(OverLimit { user, what, wanted, taken, most, remedy });
            }
        }
        match own - from + to {
            0 => taken.remove(&user),
            now => taken.insert(user, now),
        };
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
struct Account {
    user: u32,
    /// None in a process without users.
    limit: Option<Arc<Limit>>,
}

/// What a rank has taken, given back when dropped.
#[derive(Debug, Default)]
pub(crate) struct Charge {
    account: Account,
    amount: usize,
}

impl Charge {
    /// Has `amount` from now on, or what it had before.
    ///
    /// # Errors
    /// [`OverLimit`].
    pub fn set_to(&mut self, amount: usize) -> Result<(), OverLimit> {
        let Account { user, limit } = &self.account;
        if let Some(limit) = limit
            && amount != self.amount
        {
            limit.change(*user, self.amount, amount)?;
            self.amount = amount;
        }
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        // Giving back is never refused.
        let _ = self.set_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_its_part_at_most_and_all_have_no_more_than_there_is() {
        let limit = Limit::new("bytes of memory", (50, 100), "take less");
        let limits =
            Limits { memory: limit.clone(), descriptors: limit.clone(), addresses: limit.clone() };
        let share = |user| Share::of_user(user, &limits).memory();
        let (mut one, mut same, mut two) = (share(1), share(1), share(2));
        one.set_to(30).unwrap();
        let refused = same.set_to(21).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("user 1: 21 more bytes of memory are wanted, 30 of 50"), "{text}");
        same.set_to(20).unwrap();
        two.set_to(50).unwrap();
        let mut three = share(3);
        let text = three.set_to(1).unwrap_err().to_string();
        assert!(text.contains("100 of 100 are taken; take less"), "{text}");
        same.set_to(10).unwrap();
        three.set_to(10).unwrap();
        drop((one, same, two, three));
        assert!(lock(&limit.taken).is_empty());
    }

    #[test]
    fn a_process_without_users_has_no_limit() {
        Share::of_process().memory().set_to(usize::MAX).unwrap();
    }
}
