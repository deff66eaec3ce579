//! Poller: sockets, processes and doorbells of other ranks in one wait.

use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fd::{AsFd, OwnedFd};

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The token under which the descriptor was registered.
    pub token: u64,
    /// The descriptor is readable or has ended.
    pub readable: bool,
    /// The descriptor is writable.
    pub writable: bool,
}

/// An epoll instance.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

/// Maximum number of events per call.
const BATCH: usize = 64;

impl Poller {
    /// Creates a poller.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)? })
    }

    /// Watches for input (level-triggered).
    ///
    /// # Errors
    /// A system call failed.
    #[inline]
    pub fn watch(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(token), EventFlags::IN)?)
    }

    /// Watches an [`eventfd`] that is never read (edge-triggered): each write is one event.
    ///
    /// # Errors
    /// A system call failed.
    #[inline]
    pub fn watch_edges(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(token), flags)?)
    }

    /// Sets whether writability is watched too.
    ///
    /// # Errors
    /// A system call failed.
    #[inline]
    pub fn want_room(&self, fd: impl AsFd, token: u64, enabled: bool) -> io::Result<()> {
        let flags = if enabled { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
        Ok(epoll::modify(&self.epoll, fd, EventData::new_u64(token), flags)?)
    }

    /// Stops watching.
    #[inline]
    pub fn forget(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events, at most `timeout`, and stores them in `ready`.
    ///
    /// # Errors
    /// A system call failed; an interruption is not an error.
    pub fn wait(&self, timeout: Duration, ready: &mut Vec<Ready>) -> io::Result<()> {
        ready.clear();
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let mut space = [const { MaybeUninit::<Event>::uninit() }; BATCH];
        let events: &[Event] = match epoll::wait(&self.epoll, &mut space, Some(&timeout)) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => &[],
            Err(error) => return Err(error.into()),
        };
        let closed = EventFlags::HUP | EventFlags::ERR;
        ready.extend(events.iter().map(|event| {
            let flags = event.flags;
            Ready {
                token: event.data.u64(),
                readable: flags.intersects(EventFlags::IN | closed),
                writable: flags.intersects(EventFlags::OUT | closed),
            }
        }));
        Ok(())
    }
}

/// Creates a doorbell that any process with the descriptor can notify.
///
/// # Errors
/// The process is out of descriptors.
#[inline]
pub fn doorbell() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Notifies a doorbell. The write fails only if the counter is full: then it has been notified.
#[inline]
pub fn notify(doorbell: impl AsFd) {
    let _ = rustix::io::write(doorbell, &1_u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unread_doorbell_notifies_each_time() {
        let poller = Poller::new().unwrap();
        let doorbell = doorbell().unwrap();
        poller.watch_edges(&doorbell, 7).unwrap();
        let mut ready = Vec::new();
        for _ in 0..3 {
            notify(&doorbell);
            poller.wait(Duration::from_secs(5), &mut ready).unwrap();
            assert_eq!(ready, [Ready { token: 7, readable: true, writable: false }]);
            poller.wait(Duration::ZERO, &mut ready).unwrap();
            assert!(ready.is_empty());
        }
    }
}
