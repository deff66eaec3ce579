//! Statuses, and the last error of each thread.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use hfreduce_bootstrap::{JoinError, TcpRendezvousError};
use hfreduce_engine::{CollectiveError, ErrorKind};

/// `hfr_status`.
pub type Status = i32;

/// The statuses in the order of their numbers, with their names.
pub const STATUSES: [(&str, Status); 14] = [
    ("ok", 0),
    ("invalid", 1),
    ("peer_died", 2),
    ("peer_stalled", 3),
    ("peer_left", 4),
    ("timed_out", 5),
    ("mismatch", 6),
    ("protocol", 7),
    ("aborted", 8),
    ("io", 9),
    ("rendezvous", 10),
    ("still_running", 11),
    ("internal", 12),
    ("device", 13),
];

pub(crate) const OK: Status = 0;
pub(crate) const INVALID: Status = 1;
const IO: Status = 9;
const RENDEZVOUS: Status = 10;
pub(crate) const STILL_RUNNING: Status = 11;
const INTERNAL: Status = 12;

/// `hfr_error`.
#[repr(C)]
#[derive(Clone)]
pub struct ErrorRecord {
    /// The caller's `sizeof(hfr_error)`.
    pub size: usize,
    /// The status.
    pub status: Status,
    /// The reporting rank.
    pub rank: i32,
    /// The rank that caused the error.
    pub peer: i32,
    /// The rank that detected it first.
    pub seen_by: i32,
    /// The operation's number.
    pub sequence: i64,
    /// The job.
    pub job: [u8; 128],
    /// Node of the reporting rank.
    pub node: [u8; 64],
    /// Node of the rank that caused the error.
    pub peer_node: [u8; 64],
    /// The operation.
    pub operation: [u8; 128],
    /// The phase of the reporting rank.
    pub phase: [u8; 128],
    /// The whole error in one sentence.
    pub message: [u8; 1024],
}

/// An error before it is returned to C.
pub struct Failure {
    status: Status,
    message: String,
    engine: Option<Box<CollectiveError>>,
}

struct Last {
    record: ErrorRecord,
    message: CString,
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

impl Failure {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self { status: INVALID, message: message.into(), engine: None }
    }

    pub(crate) fn still_running(message: String) -> Self {
        Self { status: STILL_RUNNING, message, engine: None }
    }

    fn keep(self) -> Status {
        let status = self.status;
        let mut record = empty();
        record.status = status;
        cut(&mut record.message, &self.message);
        if let Some(error) = self.engine {
            let cause = &error.cause;
            let number = |rank: u32| i32::try_from(rank).unwrap_or(-1);
            record.rank = number(error.rank);
            record.peer = cause.peer.map_or(-1, number);
            record.seen_by = number(cause.seen_by);
            record.sequence = error.sequence;
            cut(&mut record.job, &error.job);
            cut(&mut record.node, &error.node);
            cut(&mut record.peer_node, cause.peer_node.as_deref().unwrap_or_default());
            cut(&mut record.operation, &error.operation);
            cut(&mut record.phase, &error.phase);
        }
        let message = CString::new(self.message.replace('\0', " ")).unwrap_or_default();
        // A thread that is ending has no storage for the error, and cannot read it later.
        let _ = LAST.try_with(|last| *last.borrow_mut() = Some(Last { record, message }));
        status
    }
}

impl From<CollectiveError> for Failure {
    fn from(error: CollectiveError) -> Self {
        let status = match error.cause.kind {
            ErrorKind::Invalid => INVALID,
            ErrorKind::Io => IO,
            kind => STATUSES
                .iter()
                .find(|(name, _)| *name == kind.name())
                .map_or(INTERNAL, |(_, status)| *status),
        };
        Self { status, message: error.to_string(), engine: Some(Box::new(error)) }
    }
}

impl From<JoinError> for Failure {
    fn from(error: JoinError) -> Self {
        let message = error.to_string();
        let status = match error {
            JoinError::Engine(error) => return error.into(),
            JoinError::Setting(_)
            | JoinError::Topology(_)
            | JoinError::Rendezvous(TcpRendezvousError::Invalid(_)) => INVALID,
            JoinError::Rendezvous(
                TcpRendezvousError::Listen { .. } | TcpRendezvousError::Descriptors(_),
            ) => IO,
            JoinError::Rendezvous(_) => RENDEZVOUS,
            JoinError::Disagreement(_) => 6,
        };
        Self { status, message, engine: None }
    }
}

/// Runs the body of a function; no panic unwinds out of it.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => OK,
        Ok(Err(failure)) => failure.keep(),
        Err(panic) => {
            let message = format!("a fault of the library: {}", panic_message(&*panic));
            Failure { status: INTERNAL, message, engine: None }.keep()
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

fn empty() -> ErrorRecord {
    ErrorRecord {
        size: size_of::<ErrorRecord>(),
        status: OK,
        rank: -1,
        peer: -1,
        seen_by: -1,
        sequence: -1,
        job: [0; 128],
        node: [0; 64],
        peer_node: [0; 64],
        operation: [0; 128],
        phase: [0; 128],
        message: [0; 1024],
    }
}

/// Copies a string, truncated so that a null byte follows it.
fn cut(to: &mut [u8], text: &str) {
    let mut end = text.len().min(to.len() - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    to[..end].copy_from_slice(&text.as_bytes()[..end]);
}

/// See the header.
///
/// # Safety
/// `error` is null or points to `error->size` writable bytes, the first of which hold that number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_last_error(error: *mut ErrorRecord) -> Status {
    guard(|| {
        if error.is_null() {
            return Err(Failure::invalid("error is NULL"));
        }
        // SAFETY: the header demands that the first field of the struct is its size.
        let size = unsafe { error.cast::<usize>().read() };
        if size < size_of::<usize>() + size_of::<Status>() {
            return Err(Failure::invalid(format!(
                "error->size is {size}: set it to sizeof(hfr_error)"
            )));
        }
        let mut record = LAST
            .try_with(|last| last.borrow().as_ref().map(|last| last.record.clone()))
            .ok()
            .flatten()
            .unwrap_or_else(empty);
        record.size = size;
        let bytes = size.min(size_of::<ErrorRecord>());
        // SAFETY: `bytes` of both; older callers have a shorter struct, newer ones a longer one.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const record).cast::<u8>(), error.cast(), bytes);
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn hfr_last_message() -> *const c_char {
    let message = LAST.try_with(|last| last.borrow().as_ref().map(|last| last.message.as_ptr()));
    message.ok().flatten().unwrap_or(c"".as_ptr())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn hfr_status_name(status: Status) -> *const c_char {
    let name = match status {
        0 => c"ok",
        1 => c"invalid",
        2 => c"peer_died",
        3 => c"peer_stalled",
        4 => c"peer_left",
        5 => c"timed_out",
        6 => c"mismatch",
        7 => c"protocol",
        8 => c"aborted",
        9 => c"io",
        10 => c"rendezvous",
        11 => c"still_running",
        12 => c"internal",
        13 => c"device",
        _ => c"unknown",
    };
    name.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status_with_its_message() {
        let status = guard(|| panic!("seven"));
        assert_eq!(status, INTERNAL);
        // SAFETY: the message is valid until this thread's next call.
        let text = unsafe { std::ffi::CStr::from_ptr(hfr_last_message()) };
        assert!(text.to_str().unwrap().contains("seven"));
    }

    #[test]
    fn every_status_has_its_name() {
        for (expected, status) in STATUSES {
            // SAFETY: a literal.
            let name = unsafe { std::ffi::CStr::from_ptr(hfr_status_name(status)) };
            assert_eq!(name.to_str().unwrap(), expected);
        }
    }

    #[test]
    fn structs_of_other_sizes_are_filled_as_far_as_they_go() {
        guard(|| Err(Failure::invalid("é".repeat(2000))));
        let mut record = empty();
        record.size = 16;
        record.peer = 77;
        // SAFETY: the record is larger than its `size` field.
        assert_eq!(unsafe { hfr_last_error(&raw mut record) }, OK);
        assert_eq!((record.status, record.rank, record.peer), (INVALID, -1, 77));
        record.size = size_of::<ErrorRecord>();
        // SAFETY: as above.
        assert_eq!(unsafe { hfr_last_error(&raw mut record) }, OK);
        assert_eq!((record.message[1023], record.message[1021]), (0, 0xa9));
        record.size = 3;
        // SAFETY: as above.
        assert_eq!(unsafe { hfr_last_error(&raw mut record) }, INVALID);
    }
}
