//! Accept thread of a port: runs all handshakes without a thread for each.
//!
//! One thread polls the listener and every connection whose handshake is pending. An
//! unauthenticated peer occupies an entry of a bounded table ([`HandshakeTable`]) for at most
//! [`HANDSHAKE_TIMEOUT`]; an authenticated connection is handed over on a separate thread.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::handshake_table::{HANDSHAKES_MAX, HandshakeTable};
use super::{PortCounters, prepare};
use crate::auth::{self, Acceptor, HELLO_BYTES, Key, PROOF_BYTES, WELCOME};
use crate::class::TrafficClass;
use crate::fork::close_in_children;

/// Time that a peer has to authenticate.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a service's greeting.
pub(crate) const GREETING_BYTES_MAX: usize = 64;
/// Pause after `accept` failed for lack of descriptors while no handshake could be evicted.
const PAUSE: Duration = Duration::from_millis(10);

type Admit = dyn Fn(TcpStream, SocketAddr, &[u8]) + Send + Sync;

/// State that a port needs to admit connections.
pub(crate) struct Listener {
    pub(crate) key: Key,
    pub(crate) context: String,
    pub(crate) class: TrafficClass,
    pub(crate) greeting_bytes: usize,
    pub(crate) counters: Arc<PortCounters>,
    pub(crate) admit: Box<Admit>,
}

/// A connection whose handshake is pending.
struct Handshake {
    stream: TcpStream,
    from: SocketAddr,
    until: Instant,
    acceptor: Option<Acceptor>,
    received: [u8; GREETING_BYTES_MAX + PROOF_BYTES],
    length: usize,
}

/// Result of a handshake step.
enum Progress {
    Pending,
    Admitted,
    Refused(String),
}

impl Listener {
    /// Accepts connections until `stop` is set and `wakeup` is signalled.
    pub(crate) fn run(
        self: Arc<Self>,
        listener: &TcpListener,
        wakeup: &OwnedFd,
        stop: &AtomicBool,
    ) {
        // A forked child must not accept connections on this socket.
        let _closed_in_children = close_in_children(listener);
        let mut handshakes = HandshakeTable::new(HANDSHAKES_MAX);
        while !stop.load(Ordering::Acquire) {
            self.wait(listener, wakeup, &handshakes);
            self.accept(listener, &mut handshakes);
            self.advance(&mut handshakes);
        }
    }

    /// Waits until a socket is readable, the wakeup is signalled or the oldest handshake times out.
    fn wait(
        &self,
        listener: &TcpListener,
        wakeup: &OwnedFd,
        handshakes: &HandshakeTable<Handshake>,
    ) {
        let mut sockets =
            vec![PollFd::new(listener, PollFlags::IN), PollFd::new(wakeup, PollFlags::IN)];
        sockets.extend(handshakes.iter().map(|h| PollFd::new(&h.stream, PollFlags::IN)));
        let until = handshakes.iter().map(|handshake| handshake.until).min();
        let remaining = until.map(|until| until.saturating_duration_since(Instant::now()));
        let remaining = remaining.and_then(|remaining| Timespec::try_from(remaining).ok());
        if poll(&mut sockets, remaining.as_ref()).is_err() {
            std::thread::sleep(PAUSE); // Interrupted, or out of memory.
        }
    }

    /// Accepts pending connections until the listener or the table is exhausted.
    fn accept(&self, listener: &TcpListener, handshakes: &mut HandshakeTable<Handshake>) {
        for _ in 0..HANDSHAKES_MAX {
            match listener.accept() {
                Ok((stream, from)) => {
                    let prepared =
                        prepare(&stream, self.class).and_then(|()| stream.set_nonblocking(true));
                    if let Err(error) = prepared {
                        self.refuse(from, &error.to_string());
                        continue;
                    }
                    let until = Instant::now() + HANDSHAKE_TIMEOUT;
                    let received = [0; GREETING_BYTES_MAX + PROOF_BYTES];
                    let new =
                        Handshake { stream, from, until, acceptor: None, received, length: 0 };
                    if let Some(old) = handshakes.add(from.ip(), new) {
                        self.refuse(old.from, "too many handshakes at once");
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Out of descriptors: an old handshake holds one. Or the connection was already
                // closed.
                Err(_) => match handshakes.evict() {
                    Some(old) => self.refuse(old.from, "out of descriptors"),
                    None => return std::thread::sleep(PAUSE),
                },
            }
        }
    }

    /// Reads available bytes and completes or refuses handshakes that are complete, invalid or
    /// late.
    fn advance(self: &Arc<Self>, handshakes: &mut HandshakeTable<Handshake>) {
        let now = Instant::now();
        let mut ends = Vec::new();
        let finished = handshakes.take_if(|handshake| match self.step(handshake, now) {
            Progress::Pending => false,
            end => {
                ends.push(end);
                true
            }
        });
        for (handshake, end) in finished.into_iter().zip(ends) {
            match end {
                Progress::Refused(why) => self.refuse(handshake.from, &why),
                _ => self.hand_over(handshake),
            }
        }
    }

    fn step(&self, handshake: &mut Handshake, now: Instant) -> Progress {
        match self.try_step(handshake) {
            Ok(true) => Progress::Admitted,
            Ok(false) if now < handshake.until => Progress::Pending,
            Ok(false) => Progress::Refused("the handshake timed out".to_owned()),
            Err(why) => Progress::Refused(why),
        }
    }

    /// True once the peer has proved that it holds the key.
    fn try_step(&self, handshake: &mut Handshake) -> Result<bool, String> {
        let broken = |error: io::Error| format!("the handshake failed: {error}");
        loop {
            let expected_bytes = match handshake.acceptor {
                None => HELLO_BYTES,
                Some(_) => self.greeting_bytes + PROOF_BYTES,
            };
            while handshake.length < expected_bytes {
                let room = &mut handshake.received[handshake.length..expected_bytes];
                match (&handshake.stream).read(room) {
                    Ok(0) => return Err(broken(io::ErrorKind::UnexpectedEof.into())),
                    Ok(bytes) => handshake.length += bytes,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(broken(error)),
                }
            }
            handshake.length = 0;
            // The buffer of a new connection has space for these bytes: it is never full.
            match &handshake.acceptor {
                None => {
                    let mut hello = [0; HELLO_BYTES];
                    hello.copy_from_slice(&handshake.received[..HELLO_BYTES]);
                    let nonce = auth::nonce().map_err(broken)?;
                    let (acceptor, challenge) =
                        Acceptor::new(&self.key, &self.context, &hello, nonce)
                            .map_err(|error| error.to_string())?;
                    (&handshake.stream).write_all(&challenge).map_err(broken)?;
                    handshake.acceptor = Some(acceptor);
                }
                Some(acceptor) => {
                    let (greeting, rest) = handshake.received.split_at(self.greeting_bytes);
                    let mut proof = [0; PROOF_BYTES];
                    proof.copy_from_slice(&rest[..PROOF_BYTES]);
                    acceptor.check_greeting(greeting, &proof).map_err(|error| error.to_string())?;
                    handshake.stream.set_nonblocking(false).map_err(broken)?;
                    (&handshake.stream).write_all(&[WELCOME]).map_err(broken)?;
                    return Ok(true);
                }
            }
        }
    }

    fn hand_over(self: &Arc<Self>, handshake: Handshake) {
        self.counters.admitted.fetch_add(1, Ordering::Relaxed);
        let (listener, from) = (self.clone(), handshake.from);
        let Handshake { stream, received, .. } = handshake;
        let spawned = std::thread::Builder::new().name("fabric-admit".into()).spawn(move || {
            (listener.admit)(stream, from, &received[..listener.greeting_bytes]);
        });
        if let Err(error) = spawned {
            self.refuse(from, &format!("no thread for the connection: {error}"));
        }
    }

    fn refuse(&self, from: SocketAddr, why: &str) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(%from, context = %self.context, why, "connection refused");
    }
}
