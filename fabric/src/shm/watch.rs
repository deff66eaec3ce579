//! Whether a peer still has a segment that was handed to it.
//!
//! Pages count for the control group of the process that touches them first, and live as long as
//! anybody has the segment: who gave memory away and then forgets it may run out of memory all the
//! same. The kernel counts who has a file open or mapped, and grants a lease for writing to the only one.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use super::{Mode, OFlags, Segment};

/// Has a segment open next to those that it was handed to. It keeps the pages, too.
#[derive(Debug)]
pub struct Watch(OwnedFd);

impl Segment {
    /// A descriptor to hand to a peer, and what tells when the peer, and every process that has it from
    /// the peer, has neither the descriptor nor a mapping any more.
    ///
    /// # Errors
    /// What the kernel says; `NotFound` where `/proc` is not mounted.
    pub fn watched_fd(&self) -> io::Result<(OwnedFd, Watch)> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        let open = || rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        Ok((open()?, Watch(open()?)))
    }
}

impl Watch {
    /// True if nobody has it any more, or the kernel does not tell.
    pub fn is_over(&self) -> bool {
        let ask = |kind: libc::c_int| {
            // SAFETY: a descriptor of ours and a number; no memory is involved.
            unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_SETLEASE, kind) }
        };
        if ask(libc::F_WRLCK) == 0 {
            ask(libc::F_UNLCK);
            return true;
        }
        io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_a_descriptor_or_a_mapping_is_seen() {
        let segment = Segment::create("watched", 8192).unwrap();
        let (fd, watch) = segment.watched_fd().unwrap();
        assert!(!watch.is_over());
        let again = fd.try_clone().unwrap();
        let peer = Segment::open(fd, 8192).unwrap();
        drop(again);
        assert!(!watch.is_over());
        let reader = peer.read_only_fd().unwrap();
        drop(peer);
        assert!(!watch.is_over());
        drop(reader);
        assert!(watch.is_over());
    }
}
