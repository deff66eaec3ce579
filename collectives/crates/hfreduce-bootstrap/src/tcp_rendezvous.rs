//! TCP rendezvous: in each phase every rank contributes a value and receives all in rank order.
//!
//! Rank 0 is the server: it listens, and the other ranks connect to it as clients, once for each
//! phase, and wait. All ranks run the phases in the same order. The server answers from the calling
//! thread, so it may close as soon as its call has returned.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use fabric::auth::Key;
use fabric::class::TrafficClass;
use fabric::deadline::{Deadline, Timed};
use fabric::descriptors::{Reservation, TooFewDescriptors, reserve};
use fabric::tcp::{self, Port};

use hfreduce_engine::descriptors_needed;

use crate::bundle::unpack;
use crate::rendezvous::{Exchanged, Rendezvous};
use crate::wire::{Answer, PHASE_BYTES_MAX, Request, VALUE_BYTES_MAX, WORLD_MAX};

mod clients;

use clients::Clients;

/// Time after the deadline of the ranks in which the server reports a failure to them.
const GRACE: Duration = Duration::from_secs(2);
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// The remedy if another program has the port of rank 0.
const ANOTHER_PORT: &str = "give a free port of rank 0's machine (MASTER_PORT, or \
    HFREDUCE_RENDEZVOUS=HOST:PORT if another program uses that port)";

/// Identity of a rank in a rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankIdentity {
    /// The job's name: an authentication is valid for one job only.
    pub job: String,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
}

/// Why a rendezvous failed.
#[derive(Debug, thiserror::Error)]
pub enum TcpRendezvousError {
    /// Invalid arguments.
    #[error("{0}")]
    Invalid(String),
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen at {address}: {source}; {ANOTHER_PORT}")]
    Listen {
        /// The requested address.
        address: String,
        /// The error of the system call.
        source: io::Error,
    },
    /// The descriptor limit of this process is too low for the connections of the group.
    #[error(transparent)]
    Descriptors(#[from] TooFewDescriptors),
    /// Ranks did not arrive in time.
    #[error("{detail}")]
    Absent {
        /// The absent ranks, where they are known.
        ranks: Vec<u32>,
        /// The message.
        detail: String,
    },
    /// Rank 0 violated the protocol, or an exchange failed for a reason other than absent ranks.
    #[error("{0}")]
    Broken(String),
}

/// One rank's part in the rendezvous of its group.
pub struct TcpRendezvous {
    identity: RankIdentity,
    host: String,
    port: u16,
    key: Key,
    key_bytes: Vec<u8>,
    clients: Arc<Clients>,
    /// Only in rank 0.
    listener: Option<Port>,
    /// Includes the connections of the group: a rank that cannot open them fails before others wait.
    _descriptors: Reservation,
}

impl TcpRendezvous {
    /// Starts to listen if the rank is 0; the other ranks connect in each exchange.
    ///
    /// # Errors
    /// [`TcpRendezvousError::Invalid`], [`TcpRendezvousError::Descriptors`] and [`TcpRendezvousError::Listen`].
    pub fn new(
        identity: RankIdentity,
        host: &str,
        port: u16,
        key: &[u8],
    ) -> Result<Self, TcpRendezvousError> {
        let RankIdentity { rank, world_size, .. } = identity;
        if world_size == 0 || world_size > WORLD_MAX || rank >= world_size {
            return Err(TcpRendezvousError::Invalid(format!(
                "invalid rank {rank} of {world_size}: expected 1 to {WORLD_MAX} ranks, numbered from 0"
            )));
        }
        let key_bytes = key.to_vec();
        let key =
            Key::from_bytes(key).map_err(|error| TcpRendezvousError::Invalid(error.to_string()))?;
        let ranks = world_size as usize;
        let descriptors =
            reserve(descriptors_needed(ranks, 1, None), &format!("a group of {ranks} ranks"))?;
        let clients = Arc::new(Clients::default());
        let listener = if rank == 0 && world_size > 1 {
            let address = listening_address(host, port);
            let arrivals = clients.clone();
            let port_result = Port::open(
                address,
                key.clone(),
                context(&identity.job),
                TrafficClass::Hfreduce,
                0,
                move |stream, from, _| arrivals.admit(stream, from, world_size),
            );
            Some(port_result.map_err(|source| TcpRendezvousError::Listen {
                address: format!("{host}:{port}"),
                source,
            })?)
        } else {
            None
        };
        Ok(Self {
            identity,
            host: host.to_owned(),
            port,
            key,
            key_bytes,
            clients,
            listener,
            _descriptors: descriptors,
        })
    }

    /// Port at which rank 0 listens; in rank 0, a requested port 0 becomes the assigned port.
    pub fn port(&self) -> u16 {
        self.listener.as_ref().map_or(self.port, |listener| listener.address().port())
    }

    /// Contributes `value` to `phase` and waits for the values of all ranks.
    ///
    /// # Errors
    /// Ranks are absent, or the rendezvous failed.
    pub fn exchange(
        &self,
        phase: &str,
        value: &[u8],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, TcpRendezvousError> {
        if value.len() > VALUE_BYTES_MAX || phase.len() > PHASE_BYTES_MAX {
            return Err(TcpRendezvousError::Invalid(format!(
                "{} bytes for phase `{phase}`: at most {VALUE_BYTES_MAX} are possible",
                value.len()
            )));
        }
        let deadline = Deadline::after(timeout);
        match self.identity {
            RankIdentity { world_size: 1, .. } => Ok(vec![value.to_vec()]),
            RankIdentity { rank: 0, world_size, .. } => {
                self.conclude(self.clients.gather(world_size, phase, value, deadline))
            }
            _ => self.request(phase, value, deadline),
        }
    }

    fn conclude(&self, answer: Answer) -> Result<Vec<Vec<u8>>, TcpRendezvousError> {
        match answer {
            Answer::Values(blob) => {
                unpack(&blob, self.identity.world_size as usize).map_err(|error| {
                    let at = format!("{}:{}", self.host, self.port());
                    TcpRendezvousError::Broken(format!("rank 0 at {at}: {error}"))
                })
            }
            Answer::Failed { absent, detail } if absent.is_empty() => {
                Err(TcpRendezvousError::Broken(detail))
            }
            Answer::Failed { absent, detail } => {
                Err(TcpRendezvousError::Absent { ranks: absent, detail })
            }
        }
    }

    /// The part of a client: connects to the server, sends its value, waits for the answer.
    fn request(
        &self,
        phase: &str,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>, TcpRendezvousError> {
        let stream = self.connect(deadline)?;
        let request = Request {
            world: self.identity.world_size,
            rank: self.identity.rank,
            phase: phase.to_owned(),
            value: value.to_vec(),
        };
        let at = format!("{}:{}", self.host, self.port);
        let world = self.identity.world_size;
        let round_trip = || {
            // The server answers at its deadline, which may be a little later.
            let later = Deadline::after(deadline.remaining().unwrap_or_default() + GRACE);
            request.write(&mut Timed::new(&stream, later))?;
            Answer::read(&mut io::BufReader::new(Timed::new(&stream, later)), world)
        };
        let answer = round_trip().map_err(|error| match error.kind() {
            _ if is_late(&error) => TcpRendezvousError::Absent {
                ranks: vec![],
                detail: format!("rank 0 at {at} did not answer in time; it still waits for others"),
            },
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => TcpRendezvousError::Absent {
                ranks: vec![0],
                detail: format!("rank 0 at {at} ended before all ranks had arrived"),
            },
            _ => TcpRendezvousError::Broken(format!("rank 0 at {at}: {error}")),
        })?;
        self.conclude(answer)
    }

    /// Connects to the server, which may start later than this rank.
    fn connect(&self, deadline: Deadline) -> Result<TcpStream, TcpRendezvousError> {
        let at = format!("{}:{}", self.host, self.port);
        let mut pause = PAUSE_MIN;
        loop {
            let refused = match (self.host.as_str(), self.port).to_socket_addrs() {
                Err(error) => format!("`{}` has no address: {error}", self.host),
                Ok(addresses) => {
                    let addresses: Vec<SocketAddr> = addresses.collect();
                    let class = TrafficClass::Hfreduce;
                    match tcp::dial(
                        &addresses,
                        &self.key,
                        &context(&self.identity.job),
                        class,
                        &[],
                        deadline,
                    ) {
                        Ok(stream) => return Ok(stream),
                        // A busy server, or one of an earlier start, closes the connection too: retry.
                        Err(error) => match (error.interrupted(), error.rejection()) {
                            (Some(source), _) => {
                                let symptom = if is_late(source) {
                                    "the program that listens there sends nothing".to_owned()
                                } else {
                                    format!(
                                        "the program that listens there closes the connection ({source})"
                                    )
                                };
                                format!("{symptom}; if it is not rank 0, {ANOTHER_PORT}")
                            }
                            (None, Some(rejection)) => {
                                return Err(TcpRendezvousError::Broken(format!(
                                    "rank 0 at {at}: {rejection}; if another program listens there, \
                                     {ANOTHER_PORT}"
                                )));
                            }
                            (None, None) => error.to_string(),
                        },
                    }
                }
            };
            if deadline.remaining().is_none_or(|remaining| remaining <= pause) {
                return Err(TcpRendezvousError::Absent {
                    ranks: vec![0],
                    detail: format!("cannot connect to rank 0 at {at} in time: {refused}"),
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

impl Rendezvous for TcpRendezvous {
    type Error = TcpRendezvousError;

    fn host(&self) -> Option<String> {
        Some(self.host.clone())
    }

    fn exchange(
        &self,
        phase: &str,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Exchanged, TcpRendezvousError> {
        let timeout = deadline.remaining().unwrap_or_default();
        let values = Self::exchange(self, phase, value, timeout)?;
        Ok(Exchanged { name: String::new(), values })
    }

    fn key(&self, _: Deadline) -> Result<Vec<u8>, TcpRendezvousError> {
        Ok(self.key_bytes.clone())
    }
}

/// Whether a socket's deadline passed: the kernel has two error codes for it.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// An explicit loopback address stays on loopback. Any other name listens on all addresses: it may
/// be a service's name, or this machine's, which Debian's /etc/hosts maps to a loopback address that
/// other machines cannot reach.
fn listening_address(host: &str, port: u16) -> SocketAddr {
    let resolved = (host, port).to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
    let address = match resolved.map(|address| address.ip()) {
        Some(ip) if ip.is_loopback() && (host == "localhost" || host.parse::<IpAddr>().is_ok()) => {
            ip
        }
        Some(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    SocketAddr::new(address, port)
}

fn context(job: &str) -> String {
    format!("hfreduce-meeting/{job}")
}
