//! Endpoints of ranks and of newcomers that a daemon serves.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fabric::arena::Arena;
use fabric::deadline::Deadline;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::arena::{MemoryError, receive_arena};
use super::session::{Answer, ClientSession, answer_deadline, await_answer};
use crate::protocol::{
    ANSWER, MESSAGE_BYTES_MAX, Open, PHASE, Request, Response, VERSION, await_message,
};
use hfreduce_core::error::{CollectiveError, ErrorKind};
use hfreduce_engine::communicator::Communicator;
use hfreduce_engine::driver::lock;
use hfreduce_engine::endpoint::{Options, placed, refused};
use hfreduce_transport::message_socket::{MessageSocket, framed};

/// Minimum size of the arena, in which buffers are staged.
const ARENA_BYTES_MIN: usize = 1 << 20;

/// An endpoint at a daemon.
pub struct DaemonEndpoint {
    accepted: Accepted,
    line: MessageSocket<UnixStream>,
}

/// A newcomer at a daemon.
pub struct DaemonNewcomer {
    accepted: Accepted,
    /// The connection, until the newcomer has joined.
    line: Mutex<Option<MessageSocket<UnixStream>>>,
}

/// A session that the daemon has opened.
struct Accepted {
    options: Options,
    arena: Arc<Arena>,
    info: String,
    /// Name of the daemon, for messages.
    name: String,
}

impl DaemonEndpoint {
    /// Connects to the daemon that listens at `socket`.
    ///
    /// # Errors
    /// The daemon is not reachable or has reached a limit, or the options are invalid.
    pub fn open(options: Options, key: &[u8], socket: &Path) -> Result<Self, CollectiveError> {
        let (accepted, line) = enter(options, key, socket, false)?;
        Ok(Self { accepted, line })
    }

    /// The info that the other ranks need.
    pub fn info(&self) -> Vec<u8> {
        self.accepted.info.clone().into_bytes()
    }

    /// Requests that the daemon connects to all ranks, given the infos of all ranks in rank order.
    ///
    /// # Errors
    /// A rank is missing or does not match, or the daemon has ended.
    pub fn connect(
        mut self,
        infos: &[Vec<u8>],
        timeout: Duration,
    ) -> Result<Communicator, CollectiveError> {
        let Accepted { options, arena, name, .. } = self.accepted;
        let text = |info: &Vec<u8>| String::from_utf8_lossy(info).into_owned();
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.line.send(&Request::Connect { infos: infos.iter().map(text).collect(), timeout_ms });
        let daemon_error = |why: &str| {
            let detail = format!("{name} on this node: {why}; see its log");
            refused(&options, ErrorKind::PeerDied, PHASE, detail)
        };
        let channels = match await_message(&mut self.line, answer_deadline(timeout)) {
            Ok(Response::Connected { channels }) => channels,
            Ok(Response::Refused(error)) => return Err(*error),
            Ok(other) => return Err(daemon_error(&format!("unexpected message {other:?}"))),
            Err(why) => return Err(daemon_error(&why)),
        };
        let read = infos.iter().map(|info| serde_json::from_slice(info));
        let read =
            read.collect::<Result<_, _>>().map_err(|error| daemon_error(&error.to_string()))?;
        ClientSession::new(options, arena, name, read, 0).start(self.line, channels)
    }
}

impl DaemonNewcomer {
    /// Connects to the daemon that listens at `socket`. The placement in `options` has one entry,
    /// for the newcomer.
    ///
    /// # Errors
    /// As [`DaemonEndpoint::open`].
    pub fn open(options: Options, key: &[u8], socket: &Path) -> Result<Self, CollectiveError> {
        let (accepted, line) = enter(options, key, socket, true)?;
        Ok(Self { accepted, line: Mutex::new(Some(line)) })
    }

    /// The info that the members need to accept the newcomer.
    pub fn info(&self) -> Vec<u8> {
        self.accepted.info.clone().into_bytes()
    }

    /// Waits until a member's `reconfigure` names the newcomer, and connects. May be called again after an
    /// error.
    ///
    /// # Errors
    /// A rank is missing or does not match, or the daemon has ended.
    pub fn join(&self, timeout: Duration) -> Result<Communicator, CollectiveError> {
        let Accepted { options, arena, name, .. } = &self.accepted;
        let mut line = lock(&self.line).take().ok_or_else(|| {
            let detail =
                "this newcomer is in a group, or is joining one: create another".to_owned();
            refused(options, ErrorKind::Invalid, "joining", detail)
        })?;
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        line.send(&Request::Join { timeout_ms });
        let daemon_error = |why: &str| {
            let detail = format!("{name} on this node: {why}; see its log");
            refused(options, ErrorKind::PeerDied, PHASE, detail)
        };
        match await_answer(&mut line, answer_deadline(timeout)).map_err(|why| daemon_error(&why))? {
            Answer::Refused(error) => {
                *lock(&self.line) = Some(line);
                Err(*error)
            }
            Answer::Reconfigured(update) => {
                let channels = update.channels;
                let session = ClientSession::following((options, arena, name), &mut line, *update);
                session.map_err(|why| daemon_error(&why))?.start(line, channels)
            }
        }
    }
}

fn enter(
    mut options: Options,
    key: &[u8],
    socket: &Path,
    newcomer: bool,
) -> Result<(Accepted, MessageSocket<UnixStream>), CollectiveError> {
    options.served = true;
    placed(&options)?;
    let refuse = |kind, detail: String| refused(&options, kind, PHASE, detail);
    if options.registered_bytes < ARENA_BYTES_MIN {
        let detail = format!(
            "registered memory of {} bytes is too small: set HFREDUCE_REGISTERED_BYTES to \
             {ARENA_BYTES_MIN} or more, lift the limit of address space, or unset HFREDUCE_DAEMON",
            options.registered_bytes
        );
        return Err(refuse(ErrorKind::Invalid, detail));
    }
    let at = socket.display();
    let absent = |error: &dyn std::fmt::Display| {
        let detail = format!(
            "{at}: {error}; start hfreduced there, or unset HFREDUCE_DAEMON to run without it"
        );
        refuse(ErrorKind::Io, detail)
    };
    let deadline = Deadline::after(ANSWER);
    let mut stream = dial(socket).map_err(|error| absent(&error))?;
    let (process, key) = (std::process::id(), key.to_vec());
    let open = Open { version: VERSION, process, options: options.clone(), key, newcomer };
    // A daemon at its limit rejects the rank, possibly before it has read the request.
    let written = stream.write_all(&framed(&Request::Open(Box::new(open))));
    let arena = receive_arena(&stream, deadline);
    stream.set_nonblocking(true).map_err(|error| absent(&error))?;
    let arena = match arena {
        Err(MemoryError::None(error)) => return Err(absent(&written.err().unwrap_or(error))),
        received => received,
    };
    let mut line = MessageSocket::with_limit(stream, MESSAGE_BYTES_MAX);
    let answer = await_message::<Response>(&mut line, Instant::now() + ANSWER);
    let (info, process) = match answer.map_err(|why| absent(&why))? {
        Response::Opened { info, process } => (info, process),
        Response::Refused(error) => return Err(*error),
        other => return Err(absent(&format!("unexpected first message {other:?}"))),
    };
    let arena = arena.map_err(|error| refuse(ErrorKind::Io, error.to_string()))?;
    let name = format!("hfreduced (process {process}, {at})");
    Ok((Accepted { options, arena, info, name }, line))
}

/// Connects with a timeout, in case the daemon does not accept.
fn dial(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(ANSWER))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}
