//! Quotas of the users of a process: memory, descriptors and addresses, charged to an account.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::lock;

/// Limits of the users of a daemon.
#[derive(Debug)]
pub struct Limits {
    /// Bytes of memory.
    pub memory: Arc<Limit>,
    /// File descriptors.
    pub descriptors: Arc<Limit>,
    /// Bytes of address space.
    pub addresses: Arc<Limit>,
}

/// Limit of a resource, per user and in total.
#[derive(Debug)]
pub struct Limit {
    what: &'static str,
    remedy: &'static str,
    /// Maximum per user, and for all users together.
    each: usize,
    all: usize,
    used: Mutex<HashMap<u32, usize>>,
}

/// A charge exceeds the limit of its user or of all users together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the limit of hfreduced for {scope} is reached: {requested} more {what} requested, {used} of \
     {most} in use; {remedy}"
)]
pub struct OverLimit {
    scope: Scope,
    what: &'static str,
    requested: usize,
    used: usize,
    most: usize,
    remedy: &'static str,
}

/// Whose limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    User(u32),
    AllUsers,
}

impl fmt::Display for Scope {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => write!(to, "user {user}"),
            Self::AllUsers => write!(to, "all users together"),
        }
    }
}

impl Limit {
    /// Allows `each` per user and `all` for all users together.
    pub fn new(what: &'static str, (each, all): (usize, usize), remedy: &'static str) -> Arc<Self> {
        Arc::new(Self { what, remedy, each, all, used: Mutex::default() })
    }

    /// Replaces a charge of `from` by `to`.
    fn change(&self, user: u32, from: usize, to: usize) -> Result<(), OverLimit> {
        let mut users = lock(&self.used);
        let increase = to.saturating_sub(from);
        let own = users.get(&user).copied().unwrap_or(0);
        let all = users.values().sum::<usize>();
        // A reduction is never refused.
        let limits = [(Scope::User(user), own, self.each), (Scope::AllUsers, all, self.all)];
        for (scope, users, most) in limits {
            if increase > 0 && users.saturating_add(increase) > most {
                let Self { what, remedy, .. } = *self;
                return Err(OverLimit {
                    scope,
                    what,
                    requested: increase,
                    used: users,
                    most,
                    remedy,
                });
            }
        }
        match own - from + to {
            0 => users.remove(&user),
            now => users.insert(user, now),
        };
        Ok(())
    }
}

/// The account of one user, to which charges are added.
#[derive(Clone, Debug, Default)]
pub struct Account {
    user: u32,
    /// None in a process without users.
    limit: Option<Arc<Limit>>,
}

/// Resources taken by a rank, returned when dropped.
#[derive(Debug, Default)]
pub struct Charge {
    account: Account,
    amount: usize,
}

impl Charge {
    /// Changes the charge to `amount`; on an error it keeps its value.
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
        // A reduction is never refused.
        let _ = self.set_to(0);
    }
}

impl Account {
    /// The account of `user`, bounded by `limit`.
    pub fn new(user: u32, limit: Arc<Limit>) -> Self {
        Self { user, limit: Some(limit) }
    }

    /// A charge of nothing yet.
    pub fn charge(&self) -> Charge {
        Charge { account: self.clone(), amount: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_is_bounded_per_user_and_in_total() {
        let limit = Limit::new("bytes of memory", (50, 100), "take less");
        let charge = |user| Account::new(user, limit.clone()).charge();
        let (mut first, mut same, mut two) = (charge(1), charge(1), charge(2));
        first.set_to(30).unwrap();
        let text = same.set_to(21).unwrap_err().to_string();
        assert!(text.contains("user 1 is reached: 21 more bytes of memory"), "{text}");
        assert!(text.contains("30 of 50 in use"), "{text}");
        same.set_to(20).unwrap();
        two.set_to(50).unwrap();
        let mut three = charge(3);
        let text = three.set_to(1).unwrap_err().to_string();
        assert!(text.contains("all users together is reached"), "{text}");
        assert!(text.contains("100 of 100 in use; take less"), "{text}");
        same.set_to(10).unwrap();
        three.set_to(10).unwrap();
        drop((first, same, two, three));
        assert!(lock(&limit.used).is_empty());
    }

    #[test]
    fn an_account_without_limit_accepts_any_charge() {
        Account::default().charge().set_to(usize::MAX).unwrap();
    }
}
