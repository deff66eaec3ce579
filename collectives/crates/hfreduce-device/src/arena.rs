//! Pinned memory: mapped on the GPU's memory node, registered with the driver, used again.
//!
//! A block goes back to the arena when it is dropped, and only whoever knows that no copy touches it
//! any more drops it; otherwise it is left to the process for good (`abandon`), with its
//! registration, its mapping and the context.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::context::Context;
use crate::error::DeviceError;
use crate::numa;

/// Registering costs about as much for a page as for a few of them.
const BLOCK_BYTES_MIN: usize = 64 << 10;

/// Registered memory. Given back when dropped.
#[derive(Debug)]
struct Slab {
    context: Arc<Context>,
    memory: *mut u8,
    bytes: usize,
}

// SAFETY: an address range; who uses it when is the blocks' matter.
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
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        if memory == libc::MAP_FAILED {
            return Err(host(std::io::Error::last_os_error()));
        }
        let memory: *mut u8 = memory.cast();
        // A forked child would share these pages until one of both writes, and the GPU's copy
        // would land in the wrong one's.
        // SAFETY: our mapping.
        unsafe { libc::madvise(memory.cast(), bytes, libc::MADV_DONTFORK) };
        if let Some(node) = node
            && let Err(error) = numa::prefer(memory.addr(), bytes, node)
        {
            tracing::info!(%error, node, "pinned memory cannot be placed beside the GPU");
        }
        let current = context.enter();
        // SAFETY: mapped until `drop`, which unregisters first.
        let pinned =
            current.and_then(|_current| unsafe { context.cuda.register(ordinal, memory, bytes) });
        if let Err(error) = pinned {
            // SAFETY: our mapping, which nobody else has seen.
            unsafe { libc::munmap(memory.cast(), bytes) };
            return Err(error);
        }
        Ok(Self { context: context.clone(), memory, bytes })
    }
}

static ABANDONED: Mutex<Vec<Box<dyn Any + Send>>> = Mutex::new(Vec::new());

/// Keeps what the GPU may still write to as long as the process: it is lost, but no leak.
pub(crate) fn abandon(kept: impl Any + Send) {
    ABANDONED.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(kept));
}

impl Drop for Slab {
    fn drop(&mut self) {
        let _current = self.context.enter();
        match self.context.cuda.unregister(self.context.ordinal, self.memory) {
            // SAFETY: our mapping; no copy uses it and the driver has let go of it.
            Ok(()) => unsafe {
                libc::munmap(self.memory.cast(), self.bytes);
            },
            // The GPU may still know these pages: nobody else may get them.
            Err(error) => tracing::warn!(%error, bytes = self.bytes, "pinned memory stays pinned"),
        }
    }
}

#[derive(Debug, Default)]
struct Pool {
    free: Vec<Slab>,
    used_bytes: usize,
    free_bytes: usize,
}

/// All pinned memory of one device.
#[derive(Debug)]
pub struct Arena {
    context: Arc<Context>,
    node: Option<usize>,
    limit_bytes: usize,
    pool: Mutex<Pool>,
    bell: Condvar,
}

impl Arena {
    pub(crate) fn new(context: Arc<Context>, node: Option<usize>, limit_bytes: usize) -> Arc<Self> {
        let (pool, bell) = (Mutex::default(), Condvar::new());
        Arc::new(Self { context, node, limit_bytes, pool, bell })
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block of at least `bytes`; waits until `deadline` for others to come back.
    pub(crate) fn take(
        self: &Arc<Self>,
        bytes: usize,
        until: Instant,
    ) -> Result<Block, DeviceError> {
        // Larger ones are refused below, whatever their class.
        let wanted = size_class(bytes.min(self.limit_bytes + 1)).max(bytes);
        let mut pool = self.pool();
        loop {
            let full = DeviceError::Full {
                wanted,
                used: pool.used_bytes,
                limit: self.limit_bytes,
                device: self.context.ordinal,
            };
            if wanted > self.limit_bytes {
                return Err(full);
            }
            if let Some(at) = pool.free.iter().position(|slab| slab.bytes == wanted) {
                let slab = pool.free.swap_remove(at);
                pool.free_bytes -= wanted;
                pool.used_bytes += wanted;
                return Ok(Block { arena: self.clone(), slab: Some(slab) });
            }
            if pool.used_bytes + wanted <= self.limit_bytes {
                let mut old = Vec::new();
                while pool.used_bytes + pool.free_bytes + wanted > self.limit_bytes {
                    let Some(slab) = pool.free.pop() else { break };
                    pool.free_bytes -= slab.bytes;
                    old.push(slab);
                }
                pool.used_bytes += wanted;
                drop(pool);
                drop(old);
                // Pinning takes milliseconds; nobody else waits for it.
                return match Slab::new(&self.context, wanted, self.node) {
                    Ok(slab) => Ok(Block { arena: self.clone(), slab: Some(slab) }),
                    Err(error) => {
                        self.pool().used_bytes -= wanted;
                        self.bell.notify_all();
                        Err(error)
                    }
                };
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(full);
            }
            pool = match self.bell.wait_timeout(pool, left) {
                Ok((pool, _)) => pool,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// Gives back what nobody uses.
    pub(crate) fn purge(&self) {
        let mut pool = self.pool();
        pool.free_bytes = 0;
        let free = std::mem::take(&mut pool.free);
        drop(pool);
        drop(free);
    }

    /// Pinned bytes, used or kept for the next operation.
    pub(crate) fn pinned_bytes(&self) -> usize {
        let pool = self.pool();
        pool.used_bytes + pool.free_bytes
    }
}

/// Sizes that are used again by tensors of about the same size; at most a quarter is wasted.
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
        // SAFETY: inside the mapping, or just behind it.
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
            self.arena.bell.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_little_and_repeat() {
        for bytes in [0, 1, 65_536, 65_537, 1 << 20, 25 << 20, (25 << 20) + 12, 1 << 30] {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(4096), "{bytes}");
            assert!(class - bytes <= (bytes / 4).max(BLOCK_BYTES_MIN), "{bytes} {class}");
            assert_eq!(size_class(class), class);
        }
    }
}
