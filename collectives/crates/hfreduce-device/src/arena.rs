//! Pinned memory: allocated on the GPU's NUMA node, registered with the driver, and reused.
//!
//! A block returns to the arena when it is dropped, which requires that no copy accesses it any more. Otherwise
//! it is leaked deliberately (`abandon`), together with its registration, its mapping and the context.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::context::Context;
use crate::error::DeviceError;
use crate::numa;

/// Registering one page costs about as much as registering a few.
const BLOCK_BYTES_MIN: usize = 64 << 10;

/// Registered memory. Unregistered and unmapped when dropped.
#[derive(Debug)]
struct Slab {
    context: Arc<Context>,
    memory: *mut u8,
    bytes: usize,
}

// SAFETY: an address range; the blocks' owners synchronise the accesses.
unsafe impl Send for Slab {}

impl Slab {
    fn new(context: &Arc<Context>, bytes: usize, node: Option<usize>) -> Result<Self, DeviceError> {
        let ordinal = context.ordinal;
        let host = |why: std::io::Error| DeviceError::Host {
            what: "mapping memory to pin",
            device: ordinal,
            why: why.to_string(),
        };
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let flags = flags | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address chosen by the kernel.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        if memory == libc::MAP_FAILED {
            return Err(host(std::io::Error::last_os_error()));
        }
        let memory: *mut u8 = memory.cast();
        // A forked child would share these pages until one of the two processes writes, and the GPU's copy
        // would then write to the wrong process's pages.
        // SAFETY: a mapping of this function.
        unsafe { libc::madvise(memory.cast(), bytes, libc::MADV_DONTFORK) };
        if let Some(node) = node
            && let Err(error) = numa::prefer(memory.addr(), bytes, node)
        {
            tracing::info!(%error, node, "cannot place pinned memory on the GPU's NUMA node");
        }
        let current = context.enter();
        // SAFETY: mapped until `drop`, which unregisters first.
        let pinned =
            current.and_then(|_current| unsafe { context.cuda.register(ordinal, memory, bytes) });
        if let Err(error) = pinned {
            // SAFETY: a mapping of this function, with no other reference to it.
            unsafe { libc::munmap(memory.cast(), bytes) };
            return Err(error);
        }
        Ok(Self { context: context.clone(), memory, bytes })
    }
}

static ABANDONED: Mutex<Vec<Box<dyn Any + Send>>> = Mutex::new(Vec::new());

/// Keeps memory that the GPU may still write to until the process ends: a bounded, deliberate leak.
pub(crate) fn abandon(memory: impl Any + Send) {
    ABANDONED.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(memory));
}

impl Drop for Slab {
    fn drop(&mut self) {
        let _current = self.context.enter();
        match self.context.cuda.unregister(self.context.ordinal, self.memory) {
            // SAFETY: this slab's mapping; no copy uses it and the driver has unregistered it.
            Ok(()) => unsafe {
                libc::munmap(self.memory.cast(), self.bytes);
            },
            // The GPU may still access these pages: they must not be reused.
            Err(error) => {
                tracing::warn!(%error, bytes = self.bytes, "cannot unregister pinned memory")
            }
        }
    }
}

#[derive(Debug, Default)]
struct Pool {
    free: Vec<Slab>,
    used_bytes: usize,
    free_bytes: usize,
}

/// The pinned memory of one device.
#[derive(Debug)]
pub struct Arena {
    context: Arc<Context>,
    node: Option<usize>,
    limit_bytes: usize,
    pool: Mutex<Pool>,
    returned: Condvar,
}

impl Arena {
    pub(crate) fn new(context: Arc<Context>, node: Option<usize>, limit_bytes: usize) -> Arc<Self> {
        let (pool, returned) = (Mutex::default(), Condvar::new());
        Arc::new(Self { context, node, limit_bytes, pool, returned })
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a block of at least `bytes`; waits until `deadline` for blocks to be returned.
    pub(crate) fn take(
        self: &Arc<Self>,
        bytes: usize,
        until: Instant,
    ) -> Result<Block, DeviceError> {
        // Larger requests are refused below, whatever their size class.
        let class_bytes = size_class(bytes.min(self.limit_bytes + 1)).max(bytes);
        let mut pool = self.pool();
        loop {
            let full = DeviceError::Full {
                requested: class_bytes,
                used: pool.used_bytes,
                limit: self.limit_bytes,
                device: self.context.ordinal,
            };
            if class_bytes > self.limit_bytes {
                return Err(full);
            }
            if let Some(at) = pool.free.iter().position(|slab| slab.bytes == class_bytes) {
                let slab = pool.free.swap_remove(at);
                pool.free_bytes -= class_bytes;
                pool.used_bytes += class_bytes;
                return Ok(Block { arena: self.clone(), slab: Some(slab) });
            }
            if pool.used_bytes + class_bytes <= self.limit_bytes {
                let mut old = Vec::new();
                while pool.used_bytes + pool.free_bytes + class_bytes > self.limit_bytes {
                    let Some(slab) = pool.free.pop() else { break };
                    pool.free_bytes -= slab.bytes;
                    old.push(slab);
                }
                pool.used_bytes += class_bytes;
                drop(pool);
                drop(old);
                // Pinning takes milliseconds; other threads do not wait for it.
                return match Slab::new(&self.context, class_bytes, self.node) {
                    Ok(slab) => Ok(Block { arena: self.clone(), slab: Some(slab) }),
                    Err(error) => {
                        self.pool().used_bytes -= class_bytes;
                        self.returned.notify_all();
                        Err(error)
                    }
                };
            }
            let remaining = until.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(full);
            }
            pool = match self.returned.wait_timeout(pool, remaining) {
                Ok((pool, _)) => pool,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// Releases unused memory.
    pub(crate) fn purge(&self) {
        let mut pool = self.pool();
        pool.free_bytes = 0;
        let free = std::mem::take(&mut pool.free);
        drop(pool);
        drop(free);
    }

    /// Pinned bytes, in use or cached for the next operation.
    pub(crate) fn pinned_bytes(&self) -> usize {
        let pool = self.pool();
        pool.used_bytes + pool.free_bytes
    }
}

/// Size classes, so that tensors of similar size reuse blocks; at most a quarter is wasted.
fn size_class(bytes: usize) -> usize {
    let step = (bytes.next_power_of_two() / 8).max(BLOCK_BYTES_MIN);
    bytes.max(1).next_multiple_of(step)
}

/// Pinned memory for one operation.
#[derive(Debug)]
pub struct Block {
    arena: Arc<Arena>,
    slab: Option<Slab>,
}

impl Block {
    /// The address of a byte.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        let slab = self.slab.as_ref().filter(|slab| offset <= slab.bytes);
        // SAFETY: inside the mapping, or one past its end.
        slab.map_or(std::ptr::null_mut(), |slab| unsafe { slab.memory.add(offset) })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(slab) = self.slab.take() {
            let mut pool = self.arena.pool();
            pool.used_bytes -= slab.bytes;
            pool.free_bytes += slab.bytes;
            pool.free.push(slab);
            drop(pool);
            self.arena.returned.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_waste_little_and_are_stable() {
        for bytes in [0, 1, 65_536, 65_537, 1 << 20, 25 << 20, (25 << 20) + 12, 1 << 30] {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(4096), "{bytes}");
            assert!(class - bytes <= (bytes / 4).max(BLOCK_BYTES_MIN), "{bytes} {class}");
            assert_eq!(size_class(class), class);
        }
    }
}
