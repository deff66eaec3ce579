//! Locks of a file against a model that keeps one state for each byte.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Bytes of the model; the last one stands for all from there to the end.
const BYTES: u64 = 12;
const OWNERS: u64 = 4;

fn owner(number: u64, kind: LockKind) -> Owner {
    // Owners of the same number differ by their client.
    Owner { client: ClientId(u128::from(number % 2)), kind, number: number / 2 }
}

fn wanted(number: u64, kind: LockKind, first: u64, last: u64, exclusive: bool) -> Wanted {
    let last = if last >= BYTES - 1 { u64::MAX } else { last };
    let (first, last) = if kind == LockKind::Flock { (0, u64::MAX) } else { (first, last) };
    Wanted { owner: owner(number, kind), first, last, exclusive, pid: 7 }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Request { owner: u64, kind: LockKind, first: u64, last: u64, exclusive: bool, wait: bool },
    Release { owner: u64, kind: LockKind, first: u64, last: u64 },
    Cancel { owner: u64, kind: LockKind, wait: u64 },
    Remove { owner: u64, kind: LockKind },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kind = prop_oneof![4 => Just(LockKind::Posix), 1 => Just(LockKind::Flock)];
    let range = (0..BYTES, 0..BYTES).prop_map(|(a, b)| (a.min(b), a.max(b)));
    let step = (0..10u8, 0..OWNERS, kind, range, any::<bool>(), 0..40u64).prop_map(
        |(what, owner, kind, (first, last), flag, wait)| match what {
            0..=5 => {
                Step::Request { owner, kind, first, last, exclusive: flag, wait: wait % 3 == 0 }
            }
            6 | 7 => Step::Release { owner, kind, first, last },
            8 => Step::Cancel { owner, kind, wait },
            _ => Step::Remove { owner, kind },
        },
    );
    prop::collection::vec(step, 1..60)
}

/// The access of each owner to each byte: absent, shared or exclusive; and the waiting requests.
#[derive(Default)]
struct Model {
    held: BTreeMap<(Owner, u64), bool>,
    waiting: Vec<(u64, Wanted)>,
}

fn bytes(first: u64, last: u64) -> impl Iterator<Item = u64> {
    first..=last.min(BYTES - 1)
}

impl Model {
    fn conflicts(&self, wanted: &Wanted) -> bool {
        self.held.iter().any(|((owner, byte), exclusive)| {
            *owner != wanted.owner
                && owner.kind == wanted.owner.kind
                && (wanted.first..=wanted.last).contains(byte)
                && (*exclusive || wanted.exclusive)
        })
    }

    fn grant(&mut self, wanted: &Wanted) {
        for byte in bytes(wanted.first, wanted.last) {
            self.held.insert((wanted.owner, byte), wanted.exclusive);
        }
    }

    fn release(&mut self, owner: Owner, first: u64, last: u64) {
        self.held.retain(|(held_by, byte), _| *held_by != owner || !(first..=last).contains(byte));
    }

    fn covers(&self, wanted: &Wanted) -> bool {
        bytes(wanted.first, wanted.last).all(|byte| {
            self.held.get(&(wanted.owner, byte)).is_some_and(|held| *held || !wanted.exclusive)
        })
    }

    fn grant_waiting(&mut self) {
        let mut at = 0;
        let mut passes = 0;
        while passes <= self.waiting.len() {
            match self.waiting.get(at).copied() {
                None => (at, passes) = (0, passes + 1),
                Some((_, wanted)) if self.conflicts(&wanted) => at += 1,
                Some((_, wanted)) => {
                    self.grant(&wanted);
                    self.waiting.remove(at);
                    passes = 0;
                }
            }
        }
    }
}

/// All locks, byte by byte.
fn state_of(locks: &FileLocks) -> BTreeMap<(Owner, u64), bool> {
    let mut state = BTreeMap::new();
    for holder in &locks.holders {
        let mut end = None;
        for held in &holder.ranges {
            assert!(end.is_none_or(|end| end < held.first), "sorted and disjoint");
            assert!(held.first <= held.last);
            end = Some(held.last);
            for byte in bytes(held.first, held.last) {
                state.insert((holder.owner, byte), held.exclusive);
            }
        }
        assert!(!holder.ranges.is_empty());
        for pair in holder.ranges.windows(2) {
            let joined = pair[0].exclusive == pair[1].exclusive;
            assert!(!joined || pair[0].last + 1 < pair[1].first, "neighbors are merged: {pair:?}");
        }
    }
    state
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn locks_equal_a_model_of_single_bytes(steps in steps()) {
        let (mut locks, mut model) = (FileLocks::default(), Model::default());
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Request { owner: by, kind, first, last, exclusive, wait } => {
                    let wanted = wanted(by, kind, first, last, exclusive);
                    let wait = wait.then_some(number as u64);
                    if kind == LockKind::Flock && !model.covers(&wanted) {
                        model.release(wanted.owner, 0, u64::MAX);
                        model.grant_waiting();
                    }
                    match locks.request(wanted, wait).unwrap() {
                        Outcome::Granted => {
                            prop_assert!(!model.conflicts(&wanted));
                            model.grant(&wanted);
                        }
                        Outcome::Waiting => {
                            prop_assert!(model.conflicts(&wanted));
                            model.waiting.push((wait.unwrap(), wanted));
                        }
                        Outcome::Conflict(owner, held) => {
                            prop_assert!(wait.is_none() && model.conflicts(&wanted));
                            prop_assert!(owner != wanted.owner && held.conflicts(&wanted.held()));
                        }
                    }
                }
                Step::Release { owner: by, kind, first, last } => {
                    let range = wanted(by, kind, first, last, false);
                    locks.release(range.owner, range.first, range.last).unwrap();
                    model.release(range.owner, range.first, range.last);
                }
                Step::Cancel { owner: by, kind, wait } => {
                    let owner = owner(by, kind);
                    let waits = model.waiting.len();
                    model.waiting.retain(|(it, wanted)| wanted.owner != owner || *it != wait);
                    prop_assert_eq!(locks.cancel(owner, wait), model.waiting.len() < waits);
                }
                Step::Remove { owner: by, kind } => {
                    let owner = owner(by, kind);
                    locks.remove(owner);
                    model.release(owner, 0, u64::MAX);
                    model.waiting.retain(|(_, wanted)| wanted.owner != owner);
                    prop_assert!(!locks.uses(owner));
                }
            }
            locks.grant_waiting();
            model.grant_waiting();
            prop_assert_eq!(state_of(&locks), model.held.clone());
            let waiting: Vec<(u64, Wanted)> =
                locks.waiting.iter().map(|it| (it.wait, it.wanted)).collect();
            prop_assert_eq!(&waiting, &model.waiting);
            // Conflicts, as GETLK reports them, and coverage.
            for by in 0..OWNERS {
                for (first, last) in [(0, 0), (3, 7), (BYTES - 1, BYTES - 1), (0, BYTES)] {
                    for exclusive in [false, true] {
                        let wanted = wanted(by, LockKind::Posix, first, last, exclusive);
                        prop_assert_eq!(
                            locks.conflict(&wanted).is_some(),
                            model.conflicts(&wanted)
                        );
                        prop_assert_eq!(locks.covers(&wanted), model.covers(&wanted));
                    }
                }
            }
        }
    }
}

#[test]
fn waiting_requests_are_granted_in_order_and_once() {
    let mut locks = FileLocks::default();
    let lock = |owner, exclusive| wanted(owner, LockKind::Posix, 0, 5, exclusive);
    assert_eq!(locks.request(lock(0, false), Some(1)), Ok(Outcome::Granted));
    assert_eq!(locks.request(lock(1, true), Some(2)), Ok(Outcome::Waiting));
    assert_eq!(locks.request(lock(2, true), Some(3)), Ok(Outcome::Waiting));
    assert_eq!(locks.request(lock(2, true), Some(3)), Ok(Outcome::Waiting), "repeated");
    assert_eq!(locks.waiting.len(), 2);
    assert_eq!(locks.request(lock(3, false), Some(4)), Ok(Outcome::Granted));
    locks.remove(lock(0, false).owner);
    assert!(!locks.grant_waiting());
    locks.remove(lock(3, false).owner);
    assert!(locks.grant_waiting());
    assert!(locks.covers(&lock(1, true)) && locks.waits(lock(2, true).owner, Some(3)));
    assert_eq!(locks.request(lock(1, true), Some(2)), Ok(Outcome::Granted), "repeated");
    assert_eq!(locks.blockers(lock(2, true).owner), [lock(1, true).owner]);
    locks.release(lock(1, true).owner, 0, u64::MAX).unwrap();
    assert!(locks.grant_waiting() && locks.covers(&lock(2, true)));
}

#[test]
fn two_conversions_of_flock_do_not_wait_for_each_other() {
    let mut locks = FileLocks::default();
    let lock = |owner, exclusive| wanted(owner, LockKind::Flock, 0, 0, exclusive);
    for owner in [0, 1] {
        assert_eq!(locks.request(lock(owner, false), None), Ok(Outcome::Granted));
    }
    assert_eq!(locks.request(lock(0, true), Some(1)), Ok(Outcome::Waiting));
    assert_eq!(locks.request(lock(1, true), Some(2)), Ok(Outcome::Waiting));
    assert!(locks.covers(&lock(0, true)));
    // As on Linux, a conversion that fails has lost the lock.
    locks.remove(lock(1, true).owner);
    assert!(matches!(locks.request(lock(1, false), None), Ok(Outcome::Conflict(..))));
    // A weaker lock is a conversion without a gap.
    assert_eq!(locks.request(lock(0, false), None), Ok(Outcome::Granted));
    assert_eq!(locks.request(lock(1, false), None), Ok(Outcome::Granted));
}

#[test]
fn ranges_and_waiters_of_a_file_are_bounded() {
    let mut locks = FileLocks::default();
    let of = |number: u64, first: u64| Wanted {
        owner: Owner { client: ClientId(9), kind: LockKind::Posix, number },
        first,
        last: first,
        exclusive: true,
        pid: 1,
    };
    for range in 0..RANGES_MAX as u64 {
        assert_eq!(locks.request(of(0, 2 * range), None), Ok(Outcome::Granted));
    }
    let error = locks.request(of(0, 10_000), None).unwrap_err();
    assert_eq!(error.max, RANGES_MAX);
    assert_eq!(locks.request(of(0, 1), None), Ok(Outcome::Granted), "it merges");
    for wait in 0..WAITERS_MAX as u64 {
        assert_eq!(locks.request(of(1, 0), Some(wait)), Ok(Outcome::Waiting));
    }
    assert_eq!(locks.request(of(2, 0), Some(1)).unwrap_err().max, WAITERS_MAX);
    // Two ranges were merged.
    let all = FILE_RANGES_MAX - (RANGES_MAX - 1);
    for owner in 2..2 + all as u64 {
        assert_eq!(locks.request(of(owner, 10_000 + owner), None), Ok(Outcome::Granted));
    }
    assert_eq!(locks.request(of(1, 9_000), None).unwrap_err().max, FILE_RANGES_MAX);
    assert_eq!(locks.request(of(2, 10_002), None), Ok(Outcome::Granted), "it holds it");
    // A release in the middle adds a range, too.
    let mut locks = FileLocks::default();
    let all = Wanted { first: 0, last: u64::MAX, ..of(0, 0) };
    assert_eq!(locks.request(all, None), Ok(Outcome::Granted));
    let split = (1..).find(|at| locks.release(all.owner, 2 * at, 2 * at).is_err());
    assert_eq!(split, Some(RANGES_MAX as u64));
    locks.release(all.owner, 0, u64::MAX).unwrap();
    assert!(locks.is_empty());
}
