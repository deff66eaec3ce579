//! Descriptor limits: reserves file descriptors of this process for future connections.
//!
//! The soft limit is 1,024 by default, so that programs that call `select` keep working; the
//! administrator sets the hard limit. The soft limit is raised as far as connections require.

use std::io;
use std::sync::{Mutex, PoisonError};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Sum of all reservations of this process.
static RESERVED: Mutex<usize> = Mutex::new(0);

/// The process may not open as many descriptors as it needs.
#[derive(Debug, thiserror::Error)]
#[error(
    "{purpose} needs {need} descriptors (open files) in process {process}, {open} of them in use \
     now, and {limit}: give the process a limit of {need} or more (`ulimit -n {need}` in the shell that \
     starts it, LimitNOFILE= of its systemd unit or of the container runtime's)"
)]
pub struct TooFewDescriptors {
    purpose: String,
    /// Process id, because the errors of a daemon are shown by other processes.
    process: u32,
    need: usize,
    open: usize,
    limit: String,
}

/// A reservation of descriptors. Released when dropped.
#[derive(Debug)]
pub struct Reservation {
    count: usize,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        *RESERVED.lock().unwrap_or_else(PoisonError::into_inner) -= self.count;
    }
}

/// Raises the soft limit to the open descriptors plus all reservations plus `count`, at most to the
/// hard limit.
///
/// # Errors
/// [`TooFewDescriptors`] if the hard limit does not allow `count` more than are open.
pub fn reserve(count: usize, purpose: &str) -> Result<Reservation, TooFewDescriptors> {
    let mut reserved = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
    let open = open_descriptors();
    let need = open + count;
    let refuse = |limit| {
        let (purpose, process) = (purpose.to_owned(), std::process::id());
        TooFewDescriptors { purpose, process, need, open, limit }
    };
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let (soft, hard) = (current.unwrap_or(u64::MAX), maximum.unwrap_or(u64::MAX));
    if hard < need as u64 {
        return Err(refuse(format!("the hard limit is {hard}")));
    }
    // Some reserved descriptors are already open, so this is an upper bound.
    let wish = hard.min((need + *reserved) as u64);
    if soft < wish {
        let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(wish), maximum });
        match raised.map_err(io::Error::from) {
            Err(error) if soft < need as u64 => {
                let limit = format!("the limit of {soft} cannot be raised to {wish} ({error})");
                return Err(refuse(limit));
            }
            Err(error) => {
                tracing::warn!(soft, wish, %error, "cannot raise the limit of open files")
            }
            Ok(()) => tracing::debug!(soft, wish, "raised the limit of open files"),
        }
    }
    *reserved += count;
    Ok(Reservation { count })
}

/// Number of open descriptors; 0 if /proc is not mounted.
fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}
