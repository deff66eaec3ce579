//! What the lock-free protocols are written over: the processor's atomics, or (in tests) those of a
//! model checker, which tries every order of threads and everything that a load may see.
//!
//! Zeroed memory is a valid atomic of either width, so that shared memory needs no constructor.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A family of atomics.
pub trait Atomics: 'static {
    /// 32 bits.
    type U32: Atomic<u32> + Default + Send + Sync;
    /// 64 bits.
    type U64: Atomic<u64> + Default + Send + Sync;

    /// As [`std::sync::atomic::fence`].
    fn fence(order: Ordering);
}

/// One atomic; the methods are those of the standard library.
pub trait Atomic<T> {
    fn load(&self, order: Ordering) -> T;
    fn store(&self, value: T, order: Ordering);
    fn swap(&self, value: T, order: Ordering) -> T;
    fn fetch_add(&self, value: T, order: Ordering) -> T;
    fn fetch_sub(&self, value: T, order: Ordering) -> T;
    fn compare_exchange(&self, old: T, new: T, yes: Ordering, no: Ordering) -> Result<T, T>;
}

/// The processor's.
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

#[cfg(test)]
#[path = "atomics_model.rs"]
pub mod model;
