//! Connections of an endpoint to other nodes: dialing, accepting, and the hello message.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use fabric::auth::Key;
use fabric::class::TrafficClass;
use fabric::deadline::Deadline;
use fabric::interfaces::Interface;
use fabric::tcp::{self, Port};

use super::info::{Info, context, first_eight};
use super::options::{STREAMS, STREAMS_MAX};
use super::{Endpoint, HANDSHAKE_TIMEOUT, Options};
use crate::driver::tree_links::TreeLinks;
use crate::driver::{Shared, lock};
use crate::share::Share;
use hfreduce_core::Flows;
use hfreduce_core::error::{CollectiveError, ErrorKind};
use hfreduce_shm::peer_memory::{self, MappingListener, PeerMemory};
use hfreduce_shm::quota::{Charge, OverLimit};
use hfreduce_shm::segment::{Shape, ShmSegment};
use hfreduce_transport::message_socket::MessageSocket;
use hfreduce_transport::open::{TransportKind, open};
use hfreduce_transport::transport::Transport;

const HELLO: [u8; 8] = *b"HFHELLO3";
/// Size of a hello message, which is authenticated by the handshake.
const HELLO_BYTES: usize = 24;
/// Time without any answer after which an address counts as unreachable.
const SILENT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pauses between two attempts at a busy port.
const DIAL_PAUSE_MIN: Duration = Duration::from_millis(20);
const DIAL_PAUSE_MAX: Duration = Duration::from_millis(500);
/// Maximum number of queued calls for another epoch.
const CALLS_MAX: usize = 16;
/// Maximum number of connections from one rank to another: the streams of a tree edge, and a
/// point-to-point one.
const CONNECTIONS_MAX: usize = STREAMS_MAX + 1;
/// Maximum number of queued connections while the size of the next epoch is unknown.
const ARRIVED_MIN: usize = 1024;

/// Queue of admitted connections: for `connect` at first, for the driver afterwards.
pub(super) struct Inbox {
    /// Each is charged to its user's descriptors.
    pub(super) arrived: Mutex<Vec<(Hello, TcpStream, Charge)>>,
    pub(super) arrival: Condvar,
    /// The group and its driver, once connected.
    pub(super) group: Mutex<Option<(u64, Arc<Shared>)>>,
    /// The last call of each coordinator of the next epoch.
    pub(super) calls: Mutex<VecDeque<Call>>,
    /// Maximum number of queued connections.
    most: AtomicUsize,
    share: Arc<Share>,
}

impl Inbox {
    pub(super) fn new(share: Arc<Share>) -> Self {
        Self {
            arrived: Mutex::default(),
            arrival: Condvar::new(),
            group: Mutex::default(),
            calls: Mutex::default(),
            most: AtomicUsize::new(0),
            share,
        }
    }

    /// Called between two epochs: faster members may connect for the next one already.
    pub(super) fn between(&self, ranks: usize) {
        *lock(&self.group) = None;
        self.most.store((ranks * CONNECTIONS_MAX).max(ARRIVED_MIN), Ordering::Relaxed);
    }

    /// Starts a group: connections for any other group are closed.
    pub(super) fn start(&self, group: u64, ranks: usize) {
        *lock(&self.group) = None;
        self.most.store(ranks * CONNECTIONS_MAX, Ordering::Relaxed);
        lock(&self.arrived).retain(|(hello, ..)| hello.group == group);
    }

    /// Passes point-to-point connections to the driver from now on.
    pub(super) fn hand_over_to(&self, group: u64, shared: Arc<Shared>) {
        *lock(&self.group) = Some((group, shared));
        self.pass_on();
    }

    /// Passes queued point-to-point connections to the driver, if it exists.
    pub(super) fn pass_on(&self) {
        let Some((group, shared)) = lock(&self.group).clone() else { return };
        let mut arrived = lock(&self.arrived);
        let ranks = shared.identity.placement.world_size() as u32;
        for (hello, stream, charge) in arrived.drain(..) {
            if hello.group == group && hello.purpose == Purpose::Direct && hello.from < ranks {
                lock(&shared.admitted).push((hello.from, stream, charge));
            }
        }
        drop(arrived);
        shared.notify();
    }

    /// Queues a call until an attempt reads it, unless a later one is queued.
    pub(super) fn queue_call(&self, call: Call) {
        let mut calls = lock(&self.calls);
        // Calls overtake each other; a new call of a coordinator replaces its previous one.
        let same = calls.iter().position(|other| other.caller == call.caller);
        match same {
            Some(at) if calls[at].attempt < call.attempt => calls[at] = call,
            Some(_) => {}
            None => calls.push_back(call),
        }
        if calls.len() > CALLS_MAX {
            calls.pop_front();
        }
    }

    fn admit(&self, hello: Hello, stream: TcpStream) -> bool {
        let most = self.most.load(Ordering::Relaxed);
        if hello.purpose == Purpose::Reconfiguration {
            let Ok(line) = MessageSocket::new(stream) else { return false };
            self.queue_call(Call { caller: hello.group, attempt: hello.from, line });
            return true;
        }
        let mut arrived = lock(&self.arrived);
        if arrived.len() >= most {
            return false;
        }
        match self.share.descriptor() {
            Ok(charge) => arrived.push((hello, stream, charge)),
            // Closing it would look like the end of this rank, without a reason.
            Err(error) if self.breaks(hello.group, &error) => {
                arrived.push((hello, stream, Charge::default()));
            }
            Err(error) => {
                tracing::warn!(%error, "closed a connection of another rank");
                return false;
            }
        }
        drop(arrived);
        self.arrival.notify_all();
        self.pass_on();
        true
    }
}

impl Inbox {
    /// Aborts the group that has no room for a connection; false if it is not connected.
    fn breaks(&self, group: u64, error: &OverLimit) -> bool {
        let current = lock(&self.group).clone();
        let Some((_, shared)) = current.filter(|(own, _)| *own == group) else { return false };
        if shared.broken.get().is_some() {
            return false;
        }
        let request = (ErrorKind::Io, error.to_string());
        lock(&shared.abort_request).get_or_insert(request);
        shared.notify();
        true
    }
}

/// A call of a coordinator of the next epoch that is not answered yet.
pub(super) struct Call {
    pub(super) caller: u64,
    pub(super) attempt: u32,
    pub(super) line: MessageSocket,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Id of the group; for [`Purpose::Reconfiguration`] the caller's id.
    pub(super) group: u64,
    /// The dialing rank; for [`Purpose::Reconfiguration`] the number of its attempt.
    pub(super) from: u32,
    pub(super) purpose: Purpose,
    /// Number of the stream of a tree edge.
    pub(super) stream: u8,
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Point-to-point messages.
    Direct = 0,
    /// A tree edge.
    Tree = 1,
    /// Agreement on the next epoch.
    Reconfiguration = 2,
}

impl Endpoint {
    /// Connects this channel's owner with those of the neighbor nodes; the lower node dials.
    pub(super) fn meet_neighbors(
        &self,
        infos: &[Info],
        group: u64,
        channels: usize,
        shm: &ShmSegment,
        deadline: Deadline,
    ) -> Result<Option<TreeLinks>, CollectiveError> {
        let own = self.placement.local_of(self.options.rank);
        if own >= channels {
            return Ok(None);
        }
        let node = self.placement.node_of(self.options.rank);
        let flows = Flows::new(&self.plan, node);
        let ranks: Vec<u32> =
            flows.peers().iter().map(|peer| self.placement.members(*peer)[own]).collect();
        let mut dialed: HashMap<u32, Vec<TcpStream>> = HashMap::new();
        for (peer, rank) in flows.peers().iter().zip(&ranks) {
            if node < *peer {
                let info = &infos[*rank as usize];
                let streams = 0..self.connections(channels);
                let streams = streams.map(|stream| self.dial(info, group, stream, deadline));
                dialed.insert(*rank, streams.collect::<Result<_, _>>()?);
            }
        }
        let io_error = |error: io::Error| self.io_error("connecting", error.to_string());
        let mut peers = Vec::with_capacity(ranks.len());
        for rank in ranks {
            let info = &infos[rank as usize];
            let (streams, dialed) = match dialed.remove(&rank) {
                Some(streams) => (streams, true),
                None => {
                    let streams = 0..self.connections(channels);
                    let streams = streams.map(|stream| self.expect(rank, group, stream, deadline));
                    (streams.collect::<Result<_, _>>()?, false)
                }
            };
            let (kind, slot_bytes) = (self.options.transport, self.options.slot_bytes);
            let transport = open(kind, streams, dialed, slot_bytes, deadline);
            let transport = transport.map_err(|error| {
                self.peer_error(ErrorKind::Io, rank, "connecting", error.to_string())
            })?;
            let peer_memory = self.peer_memory(info, shm, &*transport, deadline);
            peers.push((rank, transport, peer_memory));
        }
        let mapping_listener =
            self.local_sockets.mapping_socket.as_ref().map(UnixListener::try_clone).transpose();
        let mapping_listener = MappingListener::new(mapping_listener.map_err(io_error)?);
        let options = &self.options;
        let (window, slot_bytes) = (options.window, options.slot_bytes);
        Ok(Some(TreeLinks::new(
            flows,
            (own, channels),
            window,
            slot_bytes,
            peers,
            mapping_listener,
        )))
    }

    /// TCP streams from this rank to a neighbor: its part of the streams between the two nodes.
    pub(super) fn streams(&self, channels: usize) -> usize {
        let between = self.options.streams.unwrap_or(STREAMS);
        match self.options.transport {
            TransportKind::Tcp => between.div_ceil(channels.max(1)),
            TransportKind::InProcess => 0,
        }
    }

    /// Number of connections for that: at least one, for authentication.
    fn connections(&self, channels: usize) -> u8 {
        self.streams(channels).clamp(1, STREAMS_MAX) as u8
    }

    /// Offers the segment to a neighbor, if it runs on this machine and results are stored there.
    fn peer_memory(
        &self,
        peer: &Info,
        shm: &ShmSegment,
        transport: &dyn Transport,
        deadline: Deadline,
    ) -> PeerMemory {
        let locals = self.placement.members(self.placement.node_of(peer.rank)).len();
        let peer_segment_bytes = Shape { locals, ..shm.shape() }.bytes();
        let near = peer.host == self.info.host && !peer.mapping_socket.is_empty();
        let peer_memory = self.options.peer_memory
            && near
            && shm.shape().locals > 1
            && transport.supports_peer_memory();
        let within = deadline.within(HANDSHAKE_TIMEOUT);
        let offered =
            peer_memory.then(|| peer_memory::offer(shm, &peer.mapping_socket, within)).transpose();
        if let Err(error) = &offered {
            tracing::info!(%error, rank = peer.rank, "cannot offer the segment to a neighbor");
        }
        PeerMemory::new(peer_segment_bytes, offered.ok().flatten(), shm.shape().slot_bytes)
    }

    fn dial(
        &self,
        peer: &Info,
        group: u64,
        stream: u8,
        deadline: Deadline,
    ) -> Result<TcpStream, CollectiveError> {
        let phase = "dialing a tree neighbor";
        self.record_phase(phase, peer.rank);
        let from = self.options.rank;
        dial(
            &self.identity.key,
            &self.info.host,
            peer,
            Hello { group, from, purpose: Purpose::Tree, stream },
            deadline,
            &|| false,
        )
        .map_err(|(kind, detail)| self.peer_error(kind, peer.rank, phase, detail))
    }

    /// Waits for the connection of a neighbor.
    fn expect(
        &self,
        rank: u32,
        group: u64,
        stream: u8,
        deadline: Deadline,
    ) -> Result<TcpStream, CollectiveError> {
        let phase = "waiting for a tree neighbor";
        let expected = Hello { group, from: rank, purpose: Purpose::Tree, stream };
        self.record_phase(phase, rank);
        let mut arrived = lock(&self.identity.inbox.arrived);
        loop {
            if let Some(at) = arrived.iter().position(|(hello, ..)| *hello == expected) {
                return Ok(arrived.swap_remove(at).1);
            }
            let Some(remaining) = deadline.remaining() else {
                let refused = match self.identity.refused() {
                    0 => "is it running, and can it reach this rank?".to_owned(),
                    n => format!("{n} connections were refused here: does it have another key?"),
                };
                let detail = format!("it did not connect in time; {refused}");
                return Err(self.peer_error(ErrorKind::TimedOut, rank, phase, detail));
            };
            arrived = match self.identity.inbox.arrival.wait_timeout(arrived, remaining) {
                Ok((arrived, _)) => arrived,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

/// Connects to a rank and sends the hello message.
///
/// A busy port is tried again until `deadline`. A refused connection is an error, and so is an
/// address without any answer for [`SILENT_TIMEOUT`]. `given_up` is checked between attempts.
pub(super) fn dial(
    key: &Key,
    own_host: &str,
    peer: &Info,
    hello: Hello,
    deadline: Deadline,
    given_up: &dyn Fn() -> bool,
) -> Result<TcpStream, (ErrorKind, String)> {
    let mut addresses: Vec<SocketAddr> =
        peer.addresses.iter().map(|address| SocketAddr::new(*address, peer.port)).collect();
    if peer.host == own_host {
        addresses.insert(0, SocketAddr::new(Ipv4Addr::LOCALHOST.into(), peer.port));
    }
    let silent = deadline.within(SILENT_TIMEOUT);
    let (context, greeting) = (context(peer.id), hello.encode());
    let mut pause = DIAL_PAUSE_MIN;
    loop {
        let class = TrafficClass::Hfreduce;
        let error = match tcp::dial(&addresses, key, &context, class, &greeting, deadline) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        if let Some(limit) = out_of_descriptors(&error) {
            return Err((ErrorKind::Io, limit));
        }
        // A connection that is closed during the handshake was dropped in favor of newer ones: all
        // ranks may connect to one at the same time. A wrong key is an error.
        let busy = error.interrupted().is_some();
        if !busy && (!error.timed_out() || silent.passed()) {
            return Err((ErrorKind::PeerDied, error.to_string()));
        }
        if given_up() || deadline.remaining().is_none_or(|remaining| remaining < pause) {
            let kind = if busy { ErrorKind::TimedOut } else { ErrorKind::PeerDied };
            return Err((kind, error.to_string()));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(DIAL_PAUSE_MAX);
    }
}

/// The limit of descriptors and the remedy, if no socket can be created.
fn out_of_descriptors(error: &tcp::DialError) -> Option<String> {
    error.attempts.iter().find_map(|attempt| match &attempt.why {
        tcp::AttemptError::Unreachable(why)
            if matches!(why.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) =>
        {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
            let limit = limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
            Some(format!(
                "{why}: the limit of this process is {limit} descriptors, and it needs two for each rank that \
                 it exchanges messages with; raise the limit (ulimit -n, LimitNOFILE)"
            ))
        }
        _ => None,
    })
}

pub(super) fn open_port(
    options: &Options,
    reached_at: &[Interface],
    key: &Key,
    id: u64,
    inbox: Arc<Inbox>,
) -> io::Result<Port> {
    let address: IpAddr = match reached_at {
        [only] if !options.address.is_default() => only.address,
        all if all.iter().any(|interface| interface.address.is_ipv6()) => {
            Ipv6Addr::UNSPECIFIED.into()
        }
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    inbox.most.store(options.placement.len() * CONNECTIONS_MAX, Ordering::Relaxed);
    Port::open(
        SocketAddr::new(address, 0),
        key.clone(),
        context(id),
        TrafficClass::Hfreduce,
        HELLO_BYTES,
        move |stream, from, greeting| match Hello::decode(greeting) {
            Some(hello) if inbox.admit(hello, stream) => {}
            Some(_) => tracing::warn!(%from, "more connections than ranks"),
            None => tracing::warn!(%from, "hello message of another release"),
        },
    )
}

impl Hello {
    pub(super) fn encode(self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&HELLO);
        bytes[8..16].copy_from_slice(&self.group.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.from.to_le_bytes());
        bytes[20] = self.purpose as u8;
        bytes[21] = self.stream;
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HELLO_BYTES] = bytes.try_into().ok()?;
        if bytes[..8] != HELLO {
            return None;
        }
        let mut from = [0; 4];
        from.copy_from_slice(&bytes[16..20]);
        Some(Self {
            group: u64::from_le_bytes(first_eight(&bytes[8..])),
            from: u32::from_le_bytes(from),
            purpose: match bytes[20] {
                0 => Purpose::Direct,
                1 => Purpose::Tree,
                2 => Purpose::Reconfiguration,
                _ => return None,
            },
            stream: bytes[21],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_exhausted_descriptors_has_the_limit_and_the_remedy() {
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 1);
        let dial_error = |number| {
            let why = tcp::AttemptError::Unreachable(io::Error::from_raw_os_error(number));
            tcp::DialError { attempts: vec![tcp::Attempt { address, why }] }
        };
        for number in [libc::EMFILE, libc::ENFILE] {
            let text = out_of_descriptors(&dial_error(number)).unwrap();
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
            let limit = limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
            assert!(text.contains(&limit) && text.contains("ulimit -n"), "{text}");
        }
        assert_eq!(out_of_descriptors(&dial_error(libc::ECONNREFUSED)), None);
    }
}
