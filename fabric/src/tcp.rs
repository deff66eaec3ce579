//! TCP between our processes: dialled and accepted with authentication and a traffic class.
//!
//! A listener has one accepting thread and a bounded number of short-lived ones for handshakes, so
//! that a stranger who connects and says nothing delays nobody. What fails the handshake is closed
//! and counted; the service never sees it.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::auth::{self, AuthError, Key};
use crate::class::TrafficClass;
use crate::deadline::Deadline;

/// Handshakes under way at once; more connections are closed at the door.
const HANDSHAKES_MAX: usize = 64;
/// How long a stranger may take to prove who it is.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one address is tried before the next one.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// No address of the peer answered.
    #[error(
        "no connection to {addresses:?}: {last}; check that this address is routed and the process lives"
    )]
    Unreachable {
        /// What was tried.
        addresses: Vec<SocketAddr>,
        /// What the last attempt said.
        last: io::Error,
    },
    /// The peer answered and one of us refused the other.
    #[error(transparent)]
    Refused(#[from] AuthError),
}

/// What happened at a port.
#[derive(Debug, Default)]
pub struct PortCounters {
    /// Connections that proved who they are.
    pub admitted: AtomicU64,
    /// Connections that did not, or came while too many were at it.
    pub refused: AtomicU64,
}

/// A port that admits only those who hold the key.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    counters: Arc<PortCounters>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Port {
    /// Listens on `address` (port 0: a free one) and hands every admitted connection to `admit`,
    /// on a thread of its own; `admit` must end soon.
    ///
    /// # Errors
    /// `AddrInUse` and its like, or no thread.
    pub fn open(
        address: SocketAddr,
        key: Key,
        context: String,
        class: TrafficClass,
        admit: impl Fn(TcpStream, SocketAddr) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let counters = Arc::new(PortCounters::default());
        let stop = Arc::new(AtomicBool::new(false));
        let door = Arc::new(Door {
            key,
            context,
            class,
            counters: counters.clone(),
            busy: AtomicUsize::new(0),
            admit: Box::new(admit),
        });
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("fabric-port".into())
            .spawn(move || door.keep(&listener, &stopped))?;
        Ok(Self { address, counters, stop, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What happened so far.
    pub fn counters(&self) -> &PortCounters {
        &self.counters
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // The thread sits in accept: a connection of our own wakes it.
        let mut own = self.address;
        if own.ip().is_unspecified() {
            own.set_ip(match own.ip() {
                IpAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
                IpAddr::V6(_) => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]),
            });
        }
        let woken = TcpStream::connect_timeout(&own, Duration::from_secs(1)).is_ok();
        if let (true, Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

struct Door {
    key: Key,
    context: String,
    class: TrafficClass,
    counters: Arc<PortCounters>,
    busy: AtomicUsize,
    admit: Box<dyn Fn(TcpStream, SocketAddr) + Send + Sync>,
}

impl Door {
    fn keep(self: Arc<Self>, listener: &TcpListener, stop: &AtomicBool) {
        loop {
            let accepted = listener.accept();
            if stop.load(Ordering::Acquire) {
                return;
            }
            match accepted {
                Ok((stream, from)) => self.clone().knock(stream, from),
                // Out of descriptors, or a connection that was gone at once: not a reason to end.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn knock(self: Arc<Self>, stream: TcpStream, from: SocketAddr) {
        if self.busy.fetch_add(1, Ordering::AcqRel) >= HANDSHAKES_MAX {
            self.refuse(from, "too many handshakes at once");
            self.busy.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let door = self.clone();
        let spawned =
            std::thread::Builder::new().name("fabric-handshake".into()).spawn(move || {
                door.check(stream, from);
                door.busy.fetch_sub(1, Ordering::AcqRel);
            });
        if spawned.is_err() {
            self.refuse(from, "no thread for the handshake");
            self.busy.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn check(&self, stream: TcpStream, from: SocketAddr) {
        let deadline = Deadline::after(HANDSHAKE_TIMEOUT);
        let checked =
            prepare(&stream, self.class).map_err(|error| error.to_string()).and_then(|()| {
                auth::accept(&stream, &self.key, &self.context, deadline)
                    .map_err(|error| error.to_string())
            });
        match checked {
            Ok(()) => {
                self.counters.admitted.fetch_add(1, Ordering::Relaxed);
                (self.admit)(stream, from);
            }
            Err(why) => self.refuse(from, &why),
        }
    }

    fn refuse(&self, from: SocketAddr, why: &str) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(%from, context = %self.context, why, "connection refused");
    }
}

/// Connects to the first of `addresses` that answers, and authenticates.
///
/// # Errors
/// [`DialError`].
pub fn dial(
    addresses: &[SocketAddr],
    key: &Key,
    context: &str,
    class: TrafficClass,
    deadline: Deadline,
) -> Result<TcpStream, DialError> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        let Some(left) = deadline.remaining() else {
            last = io::ErrorKind::TimedOut.into();
            break;
        };
        match TcpStream::connect_timeout(address, left.min(ATTEMPT_TIMEOUT)) {
            Ok(stream) => {
                if let Err(error) = prepare(&stream, class) {
                    last = error;
                    continue;
                }
                auth::dial(&stream, key, context, deadline)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(DialError::Unreachable { addresses: addresses.to_vec(), last })
}

fn prepare(stream: &TcpStream, class: TrafficClass) -> io::Result<()> {
    stream.set_nodelay(true)?;
    class.apply(stream)?;
    Ok(())
}

/// The addresses at which other machines may reach this one: every IPv4 and global IPv6 address
/// of an interface that is up, loopback excluded.
pub fn own_addresses() -> Vec<IpAddr> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: getifaddrs fills `list` or fails; it is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }
    let mut addresses = Vec::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: the list is ours until freeifaddrs, and `at` is one of its entries.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        let up = entry.ifa_flags & libc::IFF_UP as u32 != 0;
        let loopback = entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0;
        if entry.ifa_addr.is_null() || !up || loopback {
            continue;
        }
        // SAFETY: a non-null address begins with its family, which says what it is.
        match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: the family says so; read unaligned, since nothing promises alignment.
                let address =
                    unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                addresses.push(IpAddr::from(address.sin_addr.s_addr.to_ne_bytes()));
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let address =
                    unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                let address = std::net::Ipv6Addr::from(address.sin6_addr.s6_addr);
                if !address.is_unicast_link_local() {
                    addresses.push(IpAddr::from(address));
                }
            }
            _ => {}
        }
    }
    // SAFETY: `list` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::sync::mpsc;

    fn key(byte: u8) -> Key {
        Key::from_bytes(&[byte; 32]).unwrap()
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    fn echo_port() -> (Port, mpsc::Receiver<()>) {
        let (told, heard) = mpsc::channel();
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        let told = std::sync::Mutex::new(told);
        let port =
            Port::open(here, key(1), "test".into(), TrafficClass::Hfreduce, move |mut s, _| {
                let mut byte = [0];
                s.read_exact(&mut byte).unwrap();
                s.write_all(&byte).unwrap();
                told.lock().unwrap().send(()).unwrap();
            })
            .unwrap();
        (port, heard)
    }

    #[test]
    fn who_holds_the_key_is_admitted_with_the_class() {
        let (port, heard) = echo_port();
        let mut stream =
            dial(&[port.address()], &key(1), "test", TrafficClass::Hfreduce, soon()).unwrap();
        assert_eq!(rustix::net::sockopt::ip_tos(&stream).unwrap(), 34 << 2);
        stream.write_all(b"x").unwrap();
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        heard.recv().unwrap();
        assert_eq!(port.counters().admitted.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn strangers_are_closed_and_counted_and_disturb_nobody() {
        let (port, heard) = echo_port();
        let mut silent = TcpStream::connect(port.address()).unwrap();
        let mut garbage = TcpStream::connect(port.address()).unwrap();
        garbage.write_all(&[0xff; 4096]).unwrap();
        let wrong = dial(&[port.address()], &key(2), "test", TrafficClass::Other, soon());
        assert!(matches!(wrong, Err(DialError::Refused(AuthError::WrongKey { .. }))));
        let mut stream =
            dial(&[port.address()], &key(1), "test", TrafficClass::Other, soon()).unwrap();
        stream.write_all(b"x").unwrap();
        heard.recv().unwrap();
        let mut rest = Vec::new();
        let _ = garbage.read_to_end(&mut rest);
        assert!(rest.is_empty());
        // The silent one is still in its handshake: it cost nobody anything.
        silent.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        assert!(silent.read(&mut [0]).is_err());
        assert!(port.counters().refused.load(Ordering::Relaxed) >= 1);
    }

    #[test]
    fn a_closed_port_says_what_was_tried() {
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let deadline = Deadline::after(Duration::from_millis(100));
        let error = dial(&[nobody], &key(1), "test", TrafficClass::Other, deadline).unwrap_err();
        assert!(error.to_string().contains(&nobody.to_string()), "{error}");
    }
    #[test]
    fn own_addresses_are_this_machines_and_not_the_loopback() {
        let own = own_addresses();
        assert!(own.iter().all(|address| !address.is_loopback()), "{own:?}");
        assert!(own.is_sorted_by_key(IpAddr::is_ipv6), "{own:?}");
        // Nobody can listen at an address that is another machine's, or was read wrongly; one that went
        // meanwhile is not found again.
        for address in own.into_iter().filter(IpAddr::is_ipv4) {
            let listens = TcpListener::bind((address, 0)).is_ok();
            assert!(listens || !own_addresses().contains(&address), "{address}");
        }
    }
}
