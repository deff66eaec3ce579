//! Admission of a connection: authenticates the rank's request and connects its group.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use fabric::arena::Arena;
use fabric::deadline::Deadline;
use fabric::shm;

use super::connection::ClientConnection;
use super::reconfigure::{CONNECTS_WITHIN, send_reconfigured};
use super::session::Session;
use crate::protocol::{
    ANSWER, MESSAGE_BYTES_MAX, Open, PHASE, Request, Response, VERSION, await_message,
};
use hfreduce_core::error::{CollectiveError, ErrorKind};
use hfreduce_engine::communicator::Communicator;
use hfreduce_engine::endpoint::{Endpoint, Newcomer, Options, refused};
use hfreduce_engine::share::Share;
use hfreduce_shm::flight::Folders;
use hfreduce_transport::message_socket::MessageSocket;

/// Maximum time before a rank connects, or a newcomer joins.
const MEETS_WITHIN: Duration = Duration::from_secs(3600);

/// Maximum length of a job's name, and of a reason, in the log.
const JOB_LOGGED: usize = 64;
const WHY_LOGGED: usize = 400;
/// Maximum length of the name of a job, node or zone: it is part of every error of the group.
const NAME_BYTES_MAX: usize = 1024;
/// Maximum size of a message before a rank is admitted: the placement of ten thousand ranks.
const OPEN_BYTES_MAX: usize = 4 << 20;

/// Conditions for a connection.
pub(crate) struct Terms {
    /// Folders of the flight recorders and their dumps.
    pub folders: Folders,
    /// Resources shared with other ranks of its user.
    pub share: Arc<Share>,
    /// Maximum of registered memory of a rank: ranks of other users need address space, too.
    pub registered_max: usize,
}

/// A rank that has a port and no group yet.
enum Opened {
    Rank(Box<Endpoint>),
    Newcomer(Box<Newcomer>),
}

impl Opened {
    fn new(options: Options, key: &[u8], newcomer: bool) -> Result<Self, CollectiveError> {
        match newcomer {
            true => Newcomer::new(options, key).map(|newcomer| Self::Newcomer(Box::new(newcomer))),
            false => Endpoint::new(options, key).map(|endpoint| Self::Rank(Box::new(endpoint))),
        }
    }

    fn arena(&self) -> io::Result<Arc<Arena>> {
        match self {
            Self::Rank(endpoint) => endpoint.arena(),
            Self::Newcomer(newcomer) => newcomer.arena(),
        }
    }

    fn info(&self) -> Vec<u8> {
        match self {
            Self::Rank(endpoint) => endpoint.info(),
            Self::Newcomer(newcomer) => newcomer.info(),
        }
    }
}

/// Serves a connection until it ends.
pub(crate) fn receive(stream: UnixStream, terms: Terms, stop: &AtomicBool) {
    let Terms { folders, share, registered_max } = terms;
    if let Err(error) = stream.set_nonblocking(true) {
        tracing::warn!(%error, "connection dropped");
        return;
    }
    let mut client = ClientConnection::new(MessageSocket::with_limit(stream, OPEN_BYTES_MAX), stop);
    let open = match await_message(&mut client.line, Instant::now() + ANSWER) {
        Ok(Request::Open(open)) => {
            Open { options: Options { served: true, folders, share, ..open.options }, ..*open }
        }
        Ok(_) => return tracing::warn!("connection closed: its first message is not Open"),
        Err(why) => return tracing::warn!(why = cut(&why, WHY_LOGGED), "connection closed"),
    };
    client.line.set_message_bytes_max(MESSAGE_BYTES_MAX);
    let job = cut(&open.options.job, JOB_LOGGED);
    let (rank, id) = (open.options.rank, open.process);
    match admit(client, open, registered_max) {
        Err(why) => {
            let why = cut(&why, WHY_LOGGED);
            tracing::warn!(rank, job, process = id, why, "rank rejected");
        }
        Ok(mut session) => {
            tracing::info!(rank, job, process = id, "rank connected");
            session.run();
            tracing::info!(rank, job, process = id, "rank disconnected");
        }
    }
}

/// Connects the group of a rank. On an error the rank has been notified.
fn admit(
    mut client: ClientConnection<'_>,
    open: Open,
    registered_max: usize,
) -> Result<Session<'_>, String> {
    let Open { version, options, key, newcomer, .. } = open;
    if version != VERSION {
        let detail = format!(
            "hfreduced has protocol version {VERSION} and this rank {version}: install one release"
        );
        let error = refused(&options, ErrorKind::Mismatch, PHASE, detail);
        return Err(turn_away(client.line, error));
    }
    if let Some(bytes) = longest_name(&options).filter(|bytes| *bytes > NAME_BYTES_MAX) {
        let detail = format!(
            "a name of {bytes} bytes (job, node or zone) exceeds the maximum of {NAME_BYTES_MAX} of \
             hfreduced: use shorter names"
        );
        let nameless = Options { served: true, ..Options::new(0, Vec::new()) };
        let error = refused(&nameless, ErrorKind::Invalid, PHASE, detail);
        return Err(turn_away(client.line, error));
    }
    if options.registered_bytes > registered_max {
        let detail = format!(
            "registered memory of {} bytes exceeds the maximum of {registered_max} that hfreduced allows \
             a rank: lower HFREDUCE_REGISTERED_BYTES, or start it with a lower --ranks-max",
            options.registered_bytes
        );
        let error = refused(&options, ErrorKind::Invalid, PHASE, detail);
        return Err(turn_away(client.line, error));
    }
    let (liveness, own, memory) = (options.liveness, options.clone(), options.share.memory());
    let io = |error: io::Error| refused(&own, ErrorKind::Io, PHASE, error.to_string());
    let opened = Opened::new(options, &key, newcomer)
        .and_then(|opened| Ok((opened.arena().map_err(io)?, opened)));
    let (arena, opened) = match opened {
        Ok(opened) => opened,
        Err(error) => return Err(turn_away(client.line, error)),
    };
    client.delegate(&arena).map_err(|error| error.to_string())?;
    let info = String::from_utf8_lossy(&opened.info()).into_owned();
    client.line.send(&Response::Opened { info, process: std::process::id() });
    let (communicator, arena) = match opened {
        Opened::Rank(endpoint) => (connect(&mut client, *endpoint)?, arena),
        Opened::Newcomer(newcomer) => join(&mut client, &newcomer, &arena)?,
    };
    if let Err(error) = communicator.watch_client(client.line.stream()) {
        return Err(refuse(client.line, io(error)));
    }
    Ok(Session::new(client, communicator, arena, liveness, memory))
}

/// Truncates a text of a rank for the log, which all users share.
fn cut(text: &str, characters: usize) -> String {
    text.chars().take(characters).collect()
}

fn longest_name(options: &Options) -> Option<usize> {
    let places = options.placement.iter().chain(&options.bridge);
    let names = places.flat_map(|(node, zone)| [node, zone]).chain([&options.job]);
    names.map(String::len).max()
}

fn connect(client: &mut ClientConnection<'_>, endpoint: Endpoint) -> Result<Communicator, String> {
    let (infos, timeout_ms) = match await_message(&mut client.line, Instant::now() + MEETS_WITHIN)?
    {
        Request::Connect { infos, timeout_ms } => (infos, timeout_ms),
        Request::Leave { .. } => return Err("it left before it connected".to_owned()),
        _ => return Err("unexpected message instead of Connect".to_owned()),
    };
    let infos: Vec<Vec<u8>> = infos.into_iter().map(String::into_bytes).collect();
    let timeout = Duration::from_millis(timeout_ms).min(CONNECTS_WITHIN);
    let communicator = endpoint.connect(&infos, timeout).map_err(|error| {
        let why = error.to_string();
        client.line.send(&Response::Refused(Box::new(error)));
        why
    })?;
    client.line.send(&Response::Connected { channels: communicator.channels() });
    Ok(communicator)
}

/// Handles requests to join until one succeeds.
fn join(
    client: &mut ClientConnection<'_>,
    newcomer: &Newcomer,
    arena: &Arc<Arena>,
) -> Result<(Communicator, Arc<Arena>), String> {
    loop {
        let timeout_ms = match await_message(&mut client.line, Instant::now() + MEETS_WITHIN)? {
            Request::Join { timeout_ms } => timeout_ms,
            _ => return Err("unexpected message instead of Join".to_owned()),
        };
        let timeout = Duration::from_millis(timeout_ms).min(CONNECTS_WITHIN);
        match newcomer.join_for(timeout, &mut || client.is_over()) {
            Ok(communicator) => {
                let arena = send_reconfigured(client, &communicator, arena)?;
                return Ok((communicator, arena));
            }
            Err(error) => client.line.send(&Response::Refused(Box::new(error))),
        }
    }
}

/// Rejects a rank; returns the reason for the log.
fn refuse(mut line: MessageSocket<UnixStream>, error: CollectiveError) -> String {
    let why = error.to_string();
    line.send(&Response::Refused(Box::new(error)));
    why
}

/// The same for a rank that expects memory first.
fn turn_away(line: MessageSocket<UnixStream>, error: CollectiveError) -> String {
    // A rank that has exited has closed the connection.
    let _ = shm::send_descriptors(line.stream(), &[0; 8], &[], Deadline::after(ANSWER));
    refuse(line, error)
}

/// Rejects a connection before its first message.
pub fn full(stream: UnixStream, detail: String) {
    if stream.set_nonblocking(true).is_ok() {
        let empty = Options::new(0, Vec::new());
        let error = refused(&empty, ErrorKind::Io, PHASE, detail);
        turn_away(MessageSocket::with_limit(stream, MESSAGE_BYTES_MAX), error);
    }
}
