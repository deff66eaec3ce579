//! Protocol between a rank and `hfreduced`: length-prefixed JSON messages over a UNIX socket.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use hfreduce_core::error::{AbortReason, CollectiveError, ErrorKind};
use hfreduce_core::{FINGERPRINT_BYTES, OUTSTANDING_MAX};
use hfreduce_engine::endpoint::{Member, Options};
use hfreduce_engine::operation::Transfer;
use hfreduce_transport::message_socket::MessageSocket;

/// Version of the protocol; a rank of another release is rejected.
pub(crate) const VERSION: u32 = 4;
/// Maximum size of a message: the infos of ten thousand ranks.
pub(crate) const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Phase of errors that occur before a rank has been admitted.
pub(crate) const PHASE: &str = "attaching to hfreduced";
/// Interval of heartbeats.
pub(crate) const BEAT: Duration = Duration::from_secs(1);
/// Maximum time for an answer that does not depend on other ranks.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);
/// Maximum number of calls of a rank in progress, each about 1 KiB; further ones wait in the
/// socket.
pub(crate) const CALLS_MAX: usize = COLLECTIVES_MAX + 2 * MESSAGES_MAX;
/// Of these, collective operations: more than one window, so that the engine always has the next.
pub(crate) const COLLECTIVES_MAX: usize = 2 * OUTSTANDING_MAX;
/// Maximum number of sends, and of receives: separate, since sends may be what lets another rank's
/// sends reach the receives. Any number of messages may be in progress if they are received in the
/// order in which they are sent; of others, no more than this may wait for an earlier one.
pub(crate) const MESSAGES_MAX: usize = 32 << 10;

/// A message of a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    Open(Box<Open>),
    Connect {
        infos: Vec<String>,
        timeout_ms: u64,
    },
    /// Join as a newcomer.
    Join {
        timeout_ms: u64,
    },
    Call(Box<CallRequest>),
    /// The bytes before `end` of a pipelined call's input are in the arena.
    Arrived {
        ticket: u64,
        end: usize,
    },
    Abort {
        kind: ErrorKind,
        reason: String,
    },
    Beat,
    Reconfigure(Reconfigure),
    /// Ready for the memory of another epoch, which follows.
    Memory,
    Leave {
        timeout_ms: u64,
    },
}

/// Opens a session.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Open {
    pub(crate) version: u32,
    pub(crate) process: u32,
    pub(crate) options: Options,
    pub(crate) key: Vec<u8>,
    /// The rank is a newcomer: its placement has one entry, and it has no rank yet.
    pub(crate) newcomer: bool,
}

/// Reconfigure with these members; all operations of the rank have ended.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Reconfigure {
    pub(crate) members: Vec<Member>,
    /// Operations that completed on the rank.
    pub(crate) completed: u64,
    /// The rank has revoked its memory and needs another arena.
    pub(crate) retired: bool,
    pub(crate) timeout_ms: u64,
}

/// An operation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CallRequest {
    pub(crate) ticket: u64,
    pub(crate) fingerprint: [u8; FINGERPRINT_BYTES],
    pub(crate) input: Region,
    pub(crate) output: Region,
    pub(crate) transfers: Vec<Transfer>,
    pub(crate) timeout_ms: u64,
    /// Input and output are reported in pieces.
    pub(crate) pipelined: bool,
}

/// A range of the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Region {
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

/// A completed call.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) ticket: u64,
    /// The sender of a receive from any rank.
    pub(crate) source: Option<u32>,
}

/// The rank is in another epoch.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Reconfigured {
    /// The infos of all ranks, in rank order.
    pub(crate) infos: Vec<String>,
    pub(crate) rank: u32,
    pub(crate) epoch: u32,
    pub(crate) channels: usize,
    /// The rank has another arena, which it requests.
    pub(crate) other_memory: bool,
}

/// A message of the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Response {
    Opened {
        info: String,
        process: u32,
    },
    Connected {
        channels: usize,
    },
    Reconfigured(Box<Reconfigured>),
    Refused(Box<CollectiveError>),
    /// The bytes before `end` of a pipelined call's output are final.
    Delivered {
        ticket: u64,
        end: usize,
    },
    Done(Vec<Done>),
    Broken {
        cause: AbortReason,
        record: Option<String>,
        retired: bool,
    },
    Beat,
    Left,
}

/// Waits for the next message until `until`.
pub(crate) fn await_message<W: DeserializeOwned>(
    line: &mut MessageSocket<impl Read + Write + AsFd>,
    until: Instant,
) -> Result<W, String> {
    loop {
        line.flush();
        if let Some(message) = line.next_message() {
            return Ok(message);
        }
        if let Some(why) = line.end_reason() {
            return Err(why.to_owned());
        }
        let remaining = until.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err("no message before the deadline".to_owned());
        }
        let events = if line.unsent() > 0 { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        sleep(&mut [PollFd::new(line.stream(), events)], remaining);
    }
}

/// Waits for an event, for `most` at most.
pub(crate) fn sleep(at: &mut [PollFd<'_>], most: Duration) {
    let most = Timespec {
        tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(most.subsec_nanos()),
    };
    // The only possible error is an interruption.
    let _ = poll(at, Some(&most));
}
