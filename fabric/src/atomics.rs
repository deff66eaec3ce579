//! Atomics of the lock-free protocols: those of the processor, or in tests those of a model
//! checker, which tries every order of threads and every value that a load may return.
//!
//! Zeroed memory is a valid atomic of either width, so that shared memory needs no constructor.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A family of atomics.
pub trait Atomics: 'static {
    /// An atomic of 32 bits.
    type U32: Atomic<u32> + Default + Send + Sync;
    /// An atomic of 64 bits.
    type U64: Atomic<u64> + Default + Send + Sync;

    /// As [`std::sync::atomic::fence`].
    fn fence(order: Ordering);
}

/// One atomic; the methods are those of the standard library.
pub trait Atomic<T> {
    /// See [`AtomicU64::load`].
    fn load(&self, order: Ordering) -> T;
    /// See [`AtomicU64::store`].
    fn store(&self, value: T, order: Ordering);
    /// See [`AtomicU64::swap`].
    fn swap(&self, value: T, order: Ordering) -> T;
    /// See [`AtomicU64::fetch_add`].
    fn fetch_add(&self, value: T, order: Ordering) -> T;
    /// See [`AtomicU64::fetch_sub`].
    fn fetch_sub(&self, value: T, order: Ordering) -> T;
    /// See [`AtomicU64::compare_exchange`].
    fn compare_exchange(&self, old: T, new: T, yes: Ordering, no: Ordering) -> Result<T, T>;
}

/// The atomics of the processor.
#[derive(Debug)]
pub enum Native {}

impl Atomics for Native {
    type U32 = AtomicU32;
    type U64 = AtomicU64;

    #[inline(always)]
    fn fence(order: Ordering) {
        std::sync::atomic::fence(order);
    }
}

macro_rules! atomic {
    ($atomic:ty, $value:ty) => {
        impl Atomic<$value> for $atomic {
            #[inline(always)]
            fn load(&self, order: Ordering) -> $value {
                self.load(order)
            }
            #[inline(always)]
            fn store(&self, value: $value, order: Ordering) {
                self.store(value, order);
            }
            #[inline(always)]
            fn swap(&self, value: $value, order: Ordering) -> $value {
                self.swap(value, order)
            }
            #[inline(always)]
            fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                self.fetch_add(value, order)
            }
            #[inline(always)]
            fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                self.fetch_sub(value, order)
            }
            #[inline(always)]
            fn compare_exchange(
                &self,
                old: $value,
                new: $value,
                yes: Ordering,
                no: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(old, new, yes, no)
            }
        }
    };
}

atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);

#[cfg(any(test, feature = "model"))]
#[path = "atomics_model.rs"]
pub mod model;
