//! Sockets that are closed in forked children.
//!
//! A connection stays open until its last descriptor is closed. A child that a rank forks, such as
//! a data loader's worker, inherits copies of all descriptors, so peers would not see the rank exit
//! while the child lives. Close-on-exec does not help, because such children do not exec. In a
//! child of `fork` every registered descriptor is replaced by one of `/dev/null`: the number stays
//! valid, so that dropping the owner in the child closes no other descriptor.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Once, OnceLock};

/// Marks a free entry of the list.
const FREE: RawFd = -1;
/// Entries per block of the list.
const BLOCK: usize = 256;

/// An append-only list, so that the fork handler, which must be async-signal-safe, reads it without
/// a lock.
struct Block {
    slots: [AtomicI32; BLOCK],
    next: AtomicPtr<Block>,
}

impl Block {
    const fn new() -> Self {
        Self {
            slots: [const { AtomicI32::new(FREE) }; BLOCK],
            next: AtomicPtr::new(std::ptr::null_mut()),
        }
    }
}

static FIRST: Block = Block::new();
static NOTHING: AtomicI32 = AtomicI32::new(FREE);

/// Keeps a descriptor registered. Drop it before closing the descriptor, so that a reused number is
/// not replaced in children.
#[derive(Debug)]
pub struct Registration(&'static AtomicI32);

impl Drop for Registration {
    fn drop(&mut self) {
        self.0.store(FREE, Ordering::Release);
    }
}

/// Replaces `descriptor` in every child that is forked while the registration exists.
pub fn close_in_children(descriptor: &impl AsRawFd) -> Registration {
    prepare();
    let fd = descriptor.as_raw_fd();
    let mut block = &FIRST;
    loop {
        for slot in &block.slots {
            let claimed =
                slot.compare_exchange(FREE, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if claimed {
                return Registration(slot);
            }
        }
        block = next_of(block);
    }
}

/// The next block, which is created if it does not exist.
fn next_of(block: &'static Block) -> &'static Block {
    let next = block.next.load(Ordering::Acquire);
    if next.is_null() {
        let new = Box::into_raw(Box::new(Block::new()));
        let null = std::ptr::null_mut();
        let set = block.next.compare_exchange(null, new, Ordering::AcqRel, Ordering::Acquire);
        if set.is_err() {
            // SAFETY: another thread was first, and no other thread has the address of this block.
            drop(unsafe { Box::from_raw(new) });
        }
    }
    // SAFETY: not null at this point; blocks are never freed and change only through atomics.
    unsafe { &*block.next.load(Ordering::Acquire) }
}

/// Opens the replacement for sockets and registers the fork handler; runs once.
fn prepare() {
    static NULL: OnceLock<Option<OwnedFd>> = OnceLock::new();
    static HANDLER: Once = Once::new();
    let null = NULL.get_or_init(|| File::open("/dev/null").ok().map(OwnedFd::from));
    if let Some(null) = null {
        NOTHING.store(null.as_raw_fd(), Ordering::Release);
    }
    HANDLER.call_once(|| {
        // SAFETY: the handler performs only async-signal-safe operations: atomic loads and `dup3`.
        unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
    });
}

unsafe extern "C" fn in_the_child() {
    let nothing = NOTHING.load(Ordering::Acquire);
    if nothing == FREE {
        return; // No descriptor was available: children keep their copies.
    }
    let mut block = &FIRST;
    loop {
        for slot in &block.slots {
            let registered = slot.load(Ordering::Acquire);
            if registered != FREE {
                // SAFETY: replaces a descriptor of this child only, and the child does not use it
                // here.
                unsafe { libc::dup3(nothing, registered, libc::O_CLOEXEC) };
            }
        }
        let next = block.next.load(Ordering::Acquire);
        if next.is_null() {
            return;
        }
        // SAFETY: blocks are never freed.
        block = unsafe { &*next };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    /// A child that runs until it is killed.
    struct Child(libc::pid_t);

    impl Child {
        fn fork() -> Self {
            // SAFETY: the child waits for a signal and runs nothing else.
            let child = unsafe { libc::fork() };
            if child == 0 {
                loop {
                    // SAFETY: async-signal-safe.
                    unsafe { libc::pause() };
                }
            }
            Self(child)
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: our own child, and no other thread waits for it.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
        }
    }

    #[test]
    fn a_peer_sees_the_close_while_a_forked_child_lives() {
        // More descriptors than one block holds.
        let pairs: Vec<_> = (0..BLOCK + 10).map(|_| pair()).collect();
        let registered: Vec<_> = pairs.iter().map(|(own, _)| close_in_children(own)).collect();
        let _child = Child::fork();
        drop(registered);
        for (own, mut peer) in pairs {
            drop(own);
            peer.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
            assert_eq!(peer.read(&mut [0]).unwrap(), 0, "the child keeps it open");
        }
    }

    #[test]
    fn memory_that_is_no_longer_registered_is_inherited_by_children() {
        let (own, mut peer) = pair();
        drop(close_in_children(&own));
        let child = Child::fork();
        drop(own);
        peer.set_read_timeout(Some(std::time::Duration::from_millis(50))).unwrap();
        assert!(peer.read(&mut [0]).is_err(), "the child has it");
        drop(child);
        peer.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    }
}
