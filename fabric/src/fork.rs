//! Sockets that a forked child must not keep open.
//!
//! A connection lives until its last descriptor is closed. A child that was forked off a rank (a data
//! loader's worker) has copies of all of them, so peers would not see the rank's end while the child
//! lives; close-on-exec does not help, because such children do not exec. In a child of `fork` every
//! registered descriptor is replaced by one of `/dev/null`: the number stays valid, so that whatever is
//! dropped in the child closes nothing else.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Once, OnceLock};

/// No descriptor is registered here.
const FREE: RawFd = -1;
/// Descriptors of one block of the list.
const BLOCK: usize = 256;

/// A list that only grows, so that the handler reads it without a lock: it must be async-signal-safe.
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

/// Keeps a descriptor registered. Drop it before the descriptor is closed: a number that is used anew
/// must not be replaced in children.
#[derive(Debug)]
pub struct Registration(&'static AtomicI32);

impl Drop for Registration {
    fn drop(&mut self) {
        self.0.store(FREE, Ordering::Release);
    }
}

/// Replaces `descriptor` in every child that is forked while the registration lives.
pub fn close_in_children(descriptor: &impl AsRawFd) -> Registration {
    prepare();
    let wanted = descriptor.as_raw_fd();
    let mut block = &FIRST;
    loop {
        for slot in &block.slots {
            let taken =
                slot.compare_exchange(FREE, wanted, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if taken {
                return Registration(slot);
            }
        }
        block = next_of(block);
    }
}

/// The block after this one, made if there is none.
fn next_of(block: &'static Block) -> &'static Block {
    let found = block.next.load(Ordering::Acquire);
    if found.is_null() {
        let new = Box::into_raw(Box::new(Block::new()));
        let null = std::ptr::null_mut();
        let set = block.next.compare_exchange(null, new, Ordering::AcqRel, Ordering::Acquire);
        if set.is_err() {
            // SAFETY: another thread was first, and nobody has the address of ours.
            drop(unsafe { Box::from_raw(new) });
        }
    }
    // SAFETY: not null any more, and blocks are never freed or changed but through atomics.
    unsafe { &*block.next.load(Ordering::Acquire) }
}

/// Opens what takes a socket's place, and has the handler called in children; once.
fn prepare() {
    static NULL: OnceLock<Option<OwnedFd>> = OnceLock::new();
    static HANDLER: Once = Once::new();
    let null = NULL.get_or_init(|| File::open("/dev/null").ok().map(OwnedFd::from));
    if let Some(null) = null {
        NOTHING.store(null.as_raw_fd(), Ordering::Release);
    }
    HANDLER.call_once(|| {
        // SAFETY: the handler does only what is async-signal-safe: atomic loads and `dup3`.
        unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
    });
}

unsafe extern "C" fn in_the_child() {
    let nothing = NOTHING.load(Ordering::Acquire);
    if nothing == FREE {
        return; // There was no descriptor left for it: children keep theirs, as without this.
    }
    let mut block = &FIRST;
    loop {
        for slot in &block.slots {
            let registered = slot.load(Ordering::Acquire);
            if registered != FREE {
                // SAFETY: replaces a descriptor of this child alone; nothing of it is used here.
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

    /// A child that lives until it is told to end.
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
            // SAFETY: our own child, which nobody else waits for.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
        }
    }

    #[test]
    fn a_peer_sees_the_end_while_a_forked_child_lives() {
        // More than one block of them.
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
    fn what_is_registered_no_more_is_left_to_children() {
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
