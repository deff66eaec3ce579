//! Advisory locks of one file, as POSIX (fcntl) and Linux (flock) define them. Pure: the rows of a
//! store hold this state, and `ops::locks` runs these functions in transactions.
//!
//! Waiting requests are granted in order by whatever makes room for them. As on Linux, a request that
//! conflicts with no lock that is held does not wait for earlier requests: its owner may hold what
//! they wait for.

mod ranges;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use threefs_core::ids::ClientId;

use crate::protocol::{LockKind, LockRequest};
pub(crate) use ranges::Held;

/// Maximum number of separate ranges of an owner in one file.
pub(crate) const RANGES_MAX: usize = 256;
/// Maximum number of ranges of all owners in one file: one row holds them.
pub(crate) const FILE_RANGES_MAX: usize = 2048;
/// Maximum number of requests that wait for one file.
pub(crate) const WAITERS_MAX: usize = 1024;

/// Owner of locks of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Owner {
    pub client: ClientId,
    pub kind: LockKind,
    pub number: u64,
}

/// A range with the access that a lock grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Wanted {
    pub owner: Owner,
    pub first: u64,
    pub last: u64,
    pub exclusive: bool,
    pub pid: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    owner: Owner,
    /// Sorted and disjoint.
    ranges: Vec<Held>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Waiter {
    wait: u64,
    wanted: Wanted,
}

/// All locks of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileLocks {
    holders: Vec<Holder>,
    waiting: Vec<Waiter>,
}

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Granted,
    Waiting,
    Conflict(Owner, Held),
}

/// A bound of a file's locks is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooMany {
    pub what: &'static str,
    pub max: usize,
}

impl Owner {
    pub(crate) fn of(client: ClientId, lock: &LockRequest) -> Self {
        Self { client, kind: lock.kind, number: lock.owner }
    }
}

impl Wanted {
    /// Locks of flock and append leases cover the whole file.
    pub(crate) fn of(client: ClientId, lock: &LockRequest) -> Self {
        let (first, last) = match lock.kind {
            LockKind::Posix => (lock.first, lock.last),
            LockKind::Flock | LockKind::Append => (0, u64::MAX),
        };
        let owner = Owner::of(client, lock);
        Self { owner, first, last, exclusive: lock.exclusive, pid: lock.pid }
    }

    fn held(&self) -> Held {
        Held { first: self.first, last: self.last, exclusive: self.exclusive, pid: self.pid }
    }
}

/// Stands in the row of an append lease for holders that have lost it.
const LOST: Owner = Owner { client: ClientId(0), kind: LockKind::Append, number: 0 };

impl FileLocks {
    /// The holder of the append lease.
    pub(crate) fn append_holder(&self) -> Option<Owner> {
        self.holders.iter().map(|holder| holder.owner).find(|owner| *owner != LOST)
    }

    /// A holder of the append lease did not release it: the end of the file is unknown.
    pub(crate) fn mark_lost(&mut self) {
        if !self.is_marked_lost() {
            self.holders.push(Holder { owner: LOST, ranges: Vec::new() });
        }
    }

    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(crate) fn is_marked_lost(&self) -> bool {
        self.holds(LOST)
    }

    /// The length of the file includes all appends.
    pub(crate) fn clear_lost(&mut self) {
        self.remove(LOST);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.holders.is_empty() && self.waiting.is_empty()
    }

    /// A lock of another owner that conflicts.
    pub(crate) fn conflict(&self, wanted: &Wanted) -> Option<(Owner, Held)> {
        self.conflicts(wanted).next()
    }

    fn conflicts<'a>(&'a self, wanted: &'a Wanted) -> impl Iterator<Item = (Owner, Held)> + 'a {
        let others = self.holders.iter().filter(|holder| {
            holder.owner != wanted.owner && holder.owner.kind == wanted.owner.kind
        });
        others.flat_map(|holder| {
            let conflicting = holder.ranges.iter().filter(|held| held.conflicts(&wanted.held()));
            conflicting.map(|held| (holder.owner, *held))
        })
    }

    /// Takes a lock if no other owner's conflicts; otherwise it waits if it has a number for that.
    /// Follow it with [`FileLocks::grant_waiting`].
    pub(crate) fn request(
        &mut self,
        wanted: Wanted,
        wait: Option<u64>,
    ) -> Result<Outcome, TooMany> {
        if self.waits(wanted.owner, wait) {
            return Ok(Outcome::Waiting);
        }
        if wanted.owner.kind == LockKind::Flock && !self.covers(&wanted) {
            // As on Linux, a conversion releases the lock first: two owners that convert shared
            // locks to exclusive ones would wait for each other.
            self.set(wanted.owner, wanted.first, wanted.last, None);
            self.grant_waiting();
        }
        match (self.conflict(&wanted), wait) {
            (None, _) => {
                self.has_room_for(&wanted)?;
                self.grant(&wanted);
                Ok(Outcome::Granted)
            }
            (Some((owner, held)), None) => Ok(Outcome::Conflict(owner, held)),
            (Some(_), Some(_)) if self.waiting.len() >= WAITERS_MAX => {
                Err(TooMany { what: "requests that wait", max: WAITERS_MAX })
            }
            (Some(_), Some(wait)) => {
                self.waiting.push(Waiter { wait, wanted });
                Ok(Outcome::Waiting)
            }
        }
    }

    /// Whether the bounds allow a change of a range; always if it does not add ranges.
    fn check_room(
        &self,
        owner: Owner,
        first: u64,
        last: u64,
        held: Option<&Held>,
    ) -> Result<(), TooMany> {
        let holder = self.holders.iter().find(|holder| holder.owner == owner);
        let before = holder.map_or(&[][..], |holder| &holder.ranges);
        let after = ranges::with(before, first, last, held).len();
        if after <= before.len() {
            return Ok(());
        }
        if after > RANGES_MAX {
            return Err(TooMany { what: "ranges of one owner", max: RANGES_MAX });
        }
        let all: usize = self.holders.iter().map(|holder| holder.ranges.len()).sum();
        match all - before.len() + after {
            0..=FILE_RANGES_MAX => Ok(()),
            _ => Err(TooMany { what: "ranges of all owners", max: FILE_RANGES_MAX }),
        }
    }

    fn has_room_for(&self, wanted: &Wanted) -> Result<(), TooMany> {
        self.check_room(wanted.owner, wanted.first, wanted.last, Some(&wanted.held()))
    }

    fn grant(&mut self, wanted: &Wanted) {
        self.set(wanted.owner, wanted.first, wanted.last, Some(&wanted.held()));
    }

    fn set(&mut self, owner: Owner, first: u64, last: u64, held: Option<&Held>) {
        let at = match self.holders.iter().position(|holder| holder.owner == owner) {
            Some(at) => at,
            None if held.is_none() => return,
            None => {
                self.holders.push(Holder { owner, ranges: Vec::new() });
                self.holders.len() - 1
            }
        };
        if let Some(holder) = self.holders.get_mut(at) {
            holder.ranges = ranges::with(&holder.ranges, first, last, held);
            if holder.ranges.is_empty() {
                self.holders.swap_remove(at);
            }
        }
    }

    /// Releases what an owner holds of a range. Follow it with [`FileLocks::grant_waiting`].
    pub(crate) fn release(&mut self, owner: Owner, first: u64, last: u64) -> Result<(), TooMany> {
        // It may split a range.
        self.check_room(owner, first, last, None)?;
        self.set(owner, first, last, None);
        Ok(())
    }

    /// Ends a wait; false if there is none.
    pub(crate) fn cancel(&mut self, owner: Owner, wait: u64) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|it| it.wanted.owner != owner || it.wait != wait);
        self.waiting.len() < before
    }

    /// Releases all locks of an owner and ends its waits.
    pub(crate) fn remove(&mut self, owner: Owner) {
        self.holders.retain(|holder| holder.owner != owner);
        self.waiting.retain(|it| it.wanted.owner != owner);
    }

    /// Grants waiting requests, in order, as far as possible. Returns whether any was granted.
    pub(crate) fn grant_waiting(&mut self) -> bool {
        let before = self.waiting.len();
        // A request that weakens a lock of its owner makes room for earlier ones.
        while self.grant_once() {}
        self.waiting.len() < before
    }

    fn grant_once(&mut self) -> bool {
        let waiting = std::mem::take(&mut self.waiting);
        let before = waiting.len();
        for waiter in waiting {
            let wanted = &waiter.wanted;
            if self.conflict(wanted).is_some() || self.has_room_for(wanted).is_err() {
                self.waiting.push(waiter);
            } else {
                self.grant(wanted);
            }
        }
        self.waiting.len() < before
    }

    /// Whether an owner still waits with this number.
    pub(crate) fn waits(&self, owner: Owner, wait: Option<u64>) -> bool {
        self.waiting.iter().any(|it| it.wanted.owner == owner && Some(it.wait) == wait)
    }

    /// Whether its owner holds all of a lock, or a stronger one.
    pub(crate) fn covers(&self, wanted: &Wanted) -> bool {
        let holder = self.holders.iter().find(|holder| holder.owner == wanted.owner);
        holder.is_some_and(|holder| ranges::cover(&holder.ranges, &wanted.held()))
    }

    /// Whether an owner holds or waits for a lock.
    pub(crate) fn uses(&self, owner: Owner) -> bool {
        self.holds(owner) || self.waiting.iter().any(|it| it.wanted.owner == owner)
    }

    pub(crate) fn holds(&self, owner: Owner) -> bool {
        self.holders.iter().any(|holder| holder.owner == owner)
    }

    /// The owners of a client that hold or wait for locks.
    pub(crate) fn owners_of(&self, client: ClientId) -> BTreeSet<Owner> {
        let holders = self.holders.iter().map(|holder| holder.owner);
        let all = holders.chain(self.waiting.iter().map(|it| it.wanted.owner));
        all.filter(|owner| owner.client == client).collect()
    }

    /// Whether any owner of a client holds or waits for a lock.
    pub(crate) fn is_used_by(&self, client: ClientId) -> bool {
        self.holders.iter().any(|holder| holder.owner.client == client)
            || self.waiting.iter().any(|it| it.wanted.owner.client == client)
    }

    /// The owners for which an owner waits.
    pub(crate) fn blockers(&self, owner: Owner) -> Vec<Owner> {
        let waits = self.waiting.iter().filter(|it| it.wanted.owner == owner);
        let mut blockers: Vec<Owner> =
            waits.flat_map(|it| self.conflicts(&it.wanted)).map(|(owner, _)| owner).collect();
        blockers.sort_unstable();
        blockers.dedup();
        blockers
    }
}
