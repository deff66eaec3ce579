//! Rendezvous: in each phase every rank contributes a value and receives all values in rank order.
//!
//! Rank 0 is the host: it listens, and the guests connect once a phase and wait. All ranks run the
//! phases in the same order. The host answers from the calling thread, so it may close as soon as
//! its own call has returned.

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

mod guests;

use guests::Guests;

/// Time that the host has for its answer to a failure after the deadline of the ranks.
const GRACE: Duration = Duration::from_secs(2);
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// The remedy where the port is not rank 0's.
const ANOTHER_PORT: &str = "give a free port of rank 0's machine (MASTER_PORT, or \
    HFREDUCE_RENDEZVOUS=HOST:PORT where another program has that one)";

/// Identity of a rank in a meeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    /// The job's name: a proof for one job is worth nothing in another.
    pub job: String,
    /// This rank.
    pub rank: u32,
    /// How many ranks there are.
    pub world_size: u32,
}

/// Why a meeting failed.
#[derive(Debug, thiserror::Error)]
pub enum MeetingError {
    /// Arguments that make no sense.
    #[error("{0}")]
    Invalid(String),
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen at {address}: {source}; {ANOTHER_PORT}")]
    Listen {
        /// The address asked for.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// This process may not open the connections of the group.
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
    /// The host could not be reached or broke the protocol.
    #[error("{0}")]
    Broken(String),
}

/// One rank's part in the meetings of its group.
pub struct Meeting {
    who: Who,
    host: String,
    port: u16,
    key: Key,
    key_bytes: Vec<u8>,
    guests: Arc<Guests>,
    /// Rank 0's listening port.
    door: Option<Port>,
    /// For the group that follows, too: a rank that cannot be in it fails before others wait for it.
    _descriptors: Reservation,
}

impl Meeting {
    /// Rank 0 listens from here on; the other ranks connect in each exchange.
    ///
    /// # Errors
    /// [`MeetingError::Invalid`], [`MeetingError::Descriptors`] and [`MeetingError::Listen`].
    pub fn new(who: Who, host: &str, port: u16, key: &[u8]) -> Result<Self, MeetingError> {
        if who.world_size == 0 || who.world_size > WORLD_MAX || who.rank >= who.world_size {
            return Err(MeetingError::Invalid(format!(
                "rank {} of {} cannot be: give 1 to {WORLD_MAX} ranks, numbered from 0",
                who.rank, who.world_size
            )));
        }
        let key_bytes = key.to_vec();
        let key = Key::from_bytes(key).map_err(|error| MeetingError::Invalid(error.to_string()))?;
        let ranks = who.world_size as usize;
        let descriptors =
            reserve(descriptors_needed(ranks, 1, None), &format!("a group of {ranks} ranks"))?;
        let guests = Arc::new(Guests::default());
        let door = if who.rank == 0 && who.world_size > 1 {
            let address = listening_address(host, port);
            let admitting = guests.clone();
            let world = who.world_size;
            let opened = Port::open(
                address,
                key.clone(),
                context(&who.job),
                TrafficClass::Hfreduce,
                0,
                move |stream, from, _| admitting.admit(stream, from, world),
            );
            Some(opened.map_err(|source| MeetingError::Listen {
                address: format!("{host}:{port}"),
                source,
            })?)
        } else {
            None
        };
        Ok(Self {
            who,
            host: host.to_owned(),
            port,
            key,
            key_bytes,
            guests,
            door,
            _descriptors: descriptors,
        })
    }

    /// Where rank 0 listens: the port that was asked for, or the free one that was found for port 0.
    pub fn port(&self) -> u16 {
        self.door.as_ref().map_or(self.port, |door| door.address().port())
    }

    /// Contributes `value` to `phase` and waits for the values of all ranks.
    ///
    /// # Errors
    /// Ranks are absent, or the meeting failed.
    pub fn exchange(
        &self,
        phase: &str,
        value: &[u8],
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, MeetingError> {
        if value.len() > VALUE_BYTES_MAX || phase.len() > PHASE_BYTES_MAX {
            return Err(MeetingError::Invalid(format!(
                "{} bytes for phase `{phase}`: at most {VALUE_BYTES_MAX} are possible",
                value.len()
            )));
        }
        let deadline = Deadline::after(timeout);
        match self.who {
            Who { world_size: 1, .. } => Ok(vec![value.to_vec()]),
            Who { rank: 0, world_size, .. } => {
                self.conclude(self.guests.gather(world_size, phase, value, deadline))
            }
            _ => self.attend(phase, value, deadline),
        }
    }

    fn conclude(&self, answer: Answer) -> Result<Vec<Vec<u8>>, MeetingError> {
        match answer {
            Answer::Values(blob) => unpack(&blob, self.who.world_size as usize).map_err(|error| {
                let at = format!("{}:{}", self.host, self.port());
                MeetingError::Broken(format!("rank 0 at {at}: {error}"))
            }),
            Answer::Failed { absent, detail } if absent.is_empty() => {
                Err(MeetingError::Broken(detail))
            }
            Answer::Failed { absent, detail } => {
                Err(MeetingError::Absent { ranks: absent, detail })
            }
        }
    }

    /// A guest's part: connects to the host, sends its value, waits for the answer.
    fn attend(
        &self,
        phase: &str,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>, MeetingError> {
        let stream = self.reach(deadline)?;
        let request = Request {
            world: self.who.world_size,
            rank: self.who.rank,
            phase: phase.to_owned(),
            value: value.to_vec(),
        };
        let at = format!("{}:{}", self.host, self.port);
        let world = self.who.world_size;
        let talk = || {
            // The host answers at its own deadline, which may be a little later than ours.
            let later = Deadline::after(deadline.remaining().unwrap_or_default() + GRACE);
            request.write(&mut Timed::new(&stream, later))?;
            Answer::read(&mut io::BufReader::new(Timed::new(&stream, later)), world)
        };
        let answer = talk().map_err(|error| match error.kind() {
            _ if is_late(&error) => MeetingError::Absent {
                ranks: vec![],
                detail: format!("rank 0 at {at} did not answer in time; it still waits for others"),
            },
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => MeetingError::Absent {
                ranks: vec![0],
                detail: format!("rank 0 at {at} ended before all ranks had arrived"),
            },
            _ => MeetingError::Broken(format!("rank 0 at {at}: {error}")),
        })?;
        self.conclude(answer)
    }

    /// A connection to the host, which may start later than we do.
    fn reach(&self, deadline: Deadline) -> Result<TcpStream, MeetingError> {
        let at = format!("{}:{}", self.host, self.port);
        let mut pause = PAUSE_MIN;
        loop {
            let refused = match (self.host.as_str(), self.port).to_socket_addrs() {
                Err(error) => format!("`{}` has no address: {error}", self.host),
                Ok(found) => {
                    let found: Vec<SocketAddr> = found.collect();
                    let class = TrafficClass::Hfreduce;
                    match tcp::dial(
                        &found,
                        &self.key,
                        &context(&self.who.job),
                        class,
                        &[],
                        deadline,
                    ) {
                        Ok(stream) => return Ok(stream),
                        // A door that closes may only be busy, or belong to the one before.
                        Err(error) => match (error.interrupted(), error.rejection()) {
                            (Some(source), _) => {
                                let what = if is_late(source) {
                                    "who listens there says nothing".to_owned()
                                } else {
                                    format!("who listens there closes the connection ({source})")
                                };
                                format!("{what}; if it is another program, {ANOTHER_PORT}")
                            }
                            (None, Some(stranger)) => {
                                return Err(MeetingError::Broken(format!(
                                    "rank 0 at {at}: {stranger}; if another program listens there, \
                                     {ANOTHER_PORT}"
                                )));
                            }
                            (None, None) => error.to_string(),
                        },
                    }
                }
            };
            if deadline.remaining().is_none_or(|left| left <= pause) {
                return Err(MeetingError::Absent {
                    ranks: vec![0],
                    detail: format!("rank 0 was not found at {at} in time: {refused}"),
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

impl Rendezvous for Meeting {
    type Error = MeetingError;

    fn host(&self) -> Option<String> {
        Some(self.host.clone())
    }

    fn exchange(
        &self,
        phase: &str,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Exchanged, MeetingError> {
        let timeout = deadline.remaining().unwrap_or_default();
        let values = Self::exchange(self, phase, value, timeout)?;
        Ok(Exchanged { name: String::new(), values })
    }

    fn key(&self, _: Deadline) -> Result<Vec<u8>, MeetingError> {
        Ok(self.key_bytes.clone())
    }
}

/// Whether a socket's deadline passed: the kernel has two names for it.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// A loopback address stays on loopback; otherwise all addresses: the name may be a service's, or
/// this machine's own, which Debian's /etc/hosts gives a loopback address that no other machine has.
fn listening_address(host: &str, port: u16) -> SocketAddr {
    let found = (host, port).to_socket_addrs().ok().and_then(|mut found| found.next());
    let address = match found.map(|found| found.ip()) {
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
