//! Connections between processes of one machine, through shared memory instead of TCP.
//!
//! A server that accepts connections without TLS also listens on an abstract UNIX socket, whose name
//! is derived from its TCP address. Abstract names belong to the network namespace, as addresses do:
//! a name reaches the process that its address reaches. A client whose TCP connection would not leave the machine
//! tries the name first. If anything fails, it uses TCP.
//!
//! Both sides authenticate over the UNIX socket, as over TCP. The proofs also cover the name
//! ([`binding`]), so that no process can forward them between two listeners, or between a listener and a
//! port. Then the server creates the memory, within its limits ([`memory`]), and passes it to the
//! client: two rings ([`ring`]), one for each direction. Frames use them as they use TCP ([`link`]).
//! The socket carries the bytes that wake the other side, and is closed by the kernel when a process
//! ends.

mod link;
mod memory;
mod ring;

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::{IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use self::link::{Side, link_bytes};
use self::memory::{Memory, Share};
use super::handshake::{self, PeerAuth, broken, within};
use crate::auth::AuthError;
use crate::auth::credentials::Credential;
use crate::auth::keys::KeyRing;
use crate::deadline::Deadline;
use crate::interfaces;
use crate::shm::Segment;

pub(super) use self::link::{Link, LinkReader, LinkWriter};

/// Bytes of each of the two rings of a connection. Measured: smaller ones need more wake-ups, larger
/// ones more time with many replies in flight.
const RING_BYTES: usize = 512 << 10;
/// Rings that a client accepts.
const RING_BYTES_MAX: usize = 16 << 20;
/// Bytes of shared memory of a connection.
pub(super) const CONNECTION_BYTES: usize = link_bytes(RING_BYTES);
/// Length of the message that offers the memory: the bytes of a ring, or zero without memory.
const OFFER_BYTES: usize = 4;

/// The listening socket of a server. Closed when dropped.
pub(super) struct LocalListener {
    listener: UnixListener,
    pub(super) opened: Arc<Opened>,
}

/// The state that the connections of a listener share.
pub(super) struct Opened {
    name: String,
    memory: Arc<Memory>,
}

impl LocalListener {
    /// Listens for the server of a TCP address, which shares at most this much memory.
    ///
    /// # Errors
    /// Returns the kernel's error; `AddrInUse` if another process has the name.
    pub(super) fn open(address: SocketAddr, bytes_max: usize) -> io::Result<Self> {
        let name = name_of(address);
        let listener = UnixListener::from_std(crate::shm::listen(&name)?)?;
        let memory = Memory::new(bytes_max);
        Ok(Self { listener, opened: Arc::new(Opened { name, memory }) })
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.listener.accept().await?.0)
    }
}

/// The name of the socket for the server of an address.
fn name_of(address: SocketAddr) -> String {
    let (ip, port) = (address.ip().to_canonical(), address.port());
    format!("fabric-rpc {}", SocketAddr::new(ip, port))
}

/// Addresses of listening sockets that a connection to an address can reach, the exact one first.
fn listening_for(address: SocketAddr) -> Vec<SocketAddr> {
    let (ip, port) = (address.ip().to_canonical(), address.port());
    let mut addresses = vec![SocketAddr::new(ip, port)];
    if ip.is_ipv4() {
        addresses.push((Ipv4Addr::UNSPECIFIED, port).into());
    }
    addresses.push((Ipv6Addr::UNSPECIFIED, port).into());
    addresses
}

/// Both sides prove this in addition to their credentials: they mean the same listener.
fn binding(name: &str) -> Vec<u8> {
    format!("shared memory {name}").into_bytes()
}

/// True if a connection to the address does not leave this machine.
fn is_here(address: IpAddr) -> bool {
    address.is_loopback() || interfaces::source(address) == Some(address)
}

/// Connects to the server of the first of these addresses, and authenticates. `None` if it is on
/// another machine, or does not offer shared memory: then TCP leads to it.
pub(super) async fn dial(
    addresses: &[SocketAddr],
    credential: &Credential,
    context: &str,
    deadline: Deadline,
) -> Option<Link> {
    for &address in addresses {
        // TCP would try the addresses in this order, too.
        if !is_here(address.ip().to_canonical()) {
            return None;
        }
        for listening in listening_for(address) {
            let name = name_of(listening);
            match dial_one(&name, credential, context, deadline).await {
                Ok(link) => return link,
                // No server has this name.
                Err(AuthError::Broken { source, .. })
                    if source.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => {
                    tracing::debug!(name, %error, "shared memory is not available, using TCP");
                    return None;
                }
            }
        }
    }
    None
}

async fn dial_one(
    name: &str,
    credential: &Credential,
    context: &str,
    deadline: Deadline,
) -> Result<Option<Link>, AuthError> {
    let mut socket = connect(name).map_err(broken(context))?;
    handshake::dial(&mut socket, credential, context, &binding(name), deadline).await?;
    let receive = async { receive_offer(socket).await.map_err(broken(context)) };
    within(context, deadline, receive).await
}

fn connect(name: &str) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Does not wait: that the listener's queue is full is an error.
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    UnixStream::from_std(socket.into())
}

/// Result of accepting a connection.
pub(super) enum Accepted {
    Connected(Link, PeerAuth),
    /// The peer disconnected before its first byte.
    Silent,
    /// The peer has authenticated, and no memory is left for it: it will use TCP.
    NoMemory,
}

/// Authenticates an incoming connection, then gives it memory.
pub(super) async fn accept(
    mut socket: UnixStream,
    listener: &Opened,
    ring: &KeyRing,
    cluster: &str,
    context: &str,
    deadline: Deadline,
) -> Result<Accepted, AuthError> {
    let binding = binding(&listener.name);
    let handshake =
        handshake::accept(&mut socket, ring, cluster, context, &binding, deadline).await?;
    let Some(peer_auth) = handshake else { return Ok(Accepted::Silent) };
    let user = socket.peer_cred().map_err(broken(context))?.uid();
    let Some(share) = listener.memory.take(user) else { return Ok(Accepted::NoMemory) };
    Ok(Accepted::Connected(offer(socket, share).map_err(broken(context))?, peer_auth))
}

/// Creates the memory of an authenticated connection and sends it to the client.
fn offer(socket: UnixStream, share: Share) -> io::Result<Link> {
    let segment = Segment::create("fabric-rpc", CONNECTION_BYTES)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [segment.fd()];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let message = (RING_BYTES as u32).to_le_bytes();
    let parts = [IoSlice::new(&message)];
    // A peer that has not read the few bytes of the handshake is none to wait for.
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    if rustix::net::sendmsg(&socket, &parts, &mut control, flags)? < OFFER_BYTES {
        return Err(io::ErrorKind::WriteZero.into());
    }
    let memory = segment.into_mapped();
    Link::new(socket, memory, RING_BYTES, Side::Server, Some(share))
}

/// Receives the memory of an authenticated connection. `None` if the server has none for it and
/// has closed the socket.
async fn receive_offer(socket: UnixStream) -> io::Result<Option<Link>> {
    let (capacity, descriptor) = loop {
        socket.readable().await?;
        match socket.try_io(Interest::READABLE, || receive_message(&socket)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
            Ok(None) => return Ok(None),
            Ok(Some(message)) => break message,
        }
    };
    if !capacity.is_power_of_two() || capacity > RING_BYTES_MAX {
        return Err(invalid());
    }
    let segment = Segment::open(descriptor, link_bytes(capacity))?;
    let memory = segment.into_mapped();
    Link::new(socket, memory, capacity, Side::Client, None).map(Some)
}

fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "an invalid offer of shared memory")
}

fn receive_message(socket: &UnixStream) -> io::Result<Option<(usize, OwnedFd)>> {
    let mut message = [0; OFFER_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let mut parts = [IoSliceMut::new(&mut message)];
    let received = rustix::net::recvmsg(socket, &mut parts, &mut control, flags)?;
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    match (received.bytes, descriptors.pop()) {
        (0, None) => Ok(None),
        (OFFER_BYTES, Some(descriptor)) if descriptors.is_empty() => {
            Ok(Some((u32::from_le_bytes(message) as usize, descriptor)))
        }
        _ => Err(invalid()),
    }
}

#[cfg(test)]
#[path = "offer_test.rs"]
mod tests;
