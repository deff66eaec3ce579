//! The model checker's atomics, correct and weakened. A model that passes with weakened atomics
//! proves nothing: every test names a weakening that it detects.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use loom::sync::atomic::{AtomicU32, AtomicU64};

use super::{Atomic, Atomics};

atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);

/// The atomics of the model checker.
pub enum Modelled {}

impl Atomics for Modelled {
    type U32 = AtomicU32;
    type U64 = AtomicU64;

    fn fence(order: Ordering) {
        loom::sync::atomic::fence(order);
    }
}

/// Stores do not release.
pub const NO_RELEASE: u8 = 1;
/// Loads do not acquire.
pub const NO_ACQUIRE: u8 = 2;
/// Fences are left out.
pub const NO_FENCE: u8 = 4;
/// Fences are not ordered with each other.
pub const NO_TOTAL_ORDER: u8 = 8;

/// Atomics with weaker guarantees.
pub struct Weak<const WHAT: u8>;

impl<const WHAT: u8> Weak<WHAT> {
    fn order(order: Ordering) -> Ordering {
        let (release, acquire) = (WHAT & NO_RELEASE == 0, WHAT & NO_ACQUIRE == 0);
        match order {
            Ordering::Release if !release => Ordering::Relaxed,
            Ordering::Acquire if !acquire => Ordering::Relaxed,
            Ordering::AcqRel if !release && !acquire => Ordering::Relaxed,
            Ordering::AcqRel if !release => Ordering::Acquire,
            Ordering::AcqRel if !acquire => Ordering::Release,
            other => other,
        }
    }
}

impl<const WHAT: u8> Atomics for Weak<WHAT> {
    type U32 = Weakened<WHAT, AtomicU32>;
    type U64 = Weakened<WHAT, AtomicU64>;

    fn fence(order: Ordering) {
        match order {
            _ if WHAT & NO_FENCE != 0 => {}
            Ordering::SeqCst if WHAT & NO_TOTAL_ORDER != 0 => Modelled::fence(Ordering::AcqRel),
            _ => Modelled::fence(order),
        }
    }
}

/// An atomic of [`Weak`].
pub struct Weakened<const WHAT: u8, T>(T);

impl<const WHAT: u8, V, T: Atomic<V>> Atomic<V> for Weakened<WHAT, T> {
    fn load(&self, order: Ordering) -> V {
        self.0.load(Weak::<WHAT>::order(order))
    }
    fn store(&self, value: V, order: Ordering) {
        self.0.store(value, Weak::<WHAT>::order(order));
    }
    fn swap(&self, value: V, order: Ordering) -> V {
        self.0.swap(value, Weak::<WHAT>::order(order))
    }
    fn fetch_add(&self, value: V, order: Ordering) -> V {
        self.0.fetch_add(value, Weak::<WHAT>::order(order))
    }
    fn fetch_sub(&self, value: V, order: Ordering) -> V {
        self.0.fetch_sub(value, Weak::<WHAT>::order(order))
    }
    fn compare_exchange(&self, old: V, new: V, yes: Ordering, no: Ordering) -> Result<V, V> {
        self.0.compare_exchange(old, new, Weak::<WHAT>::order(yes), Weak::<WHAT>::order(no))
    }
}

impl<const WHAT: u8, T: Default> Default for Weakened<WHAT, T> {
    fn default() -> Self {
        Self(T::default())
    }
}

/// Checks every order of the threads of `model` with at most three preemptions; loom's limit of
/// branches ends an endless loop.
pub fn every_order(model: impl Fn() + Sync + Send + 'static) {
    let mut checker = loom::model::Builder::new();
    checker.preemption_bound = Some(3);
    checker.check(model);
}

/// True if some order breaks an assertion of the model or races.
pub fn breaks(model: impl Fn() + Sync + Send + 'static) -> bool {
    catch_unwind(AssertUnwindSafe(|| every_order(model))).is_err()
}
