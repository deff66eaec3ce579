//! Rendezvous: in each phase every rank contributes a value and receives all values in rank order.
//!
//! Rank 0 is the host: it listens, and the guests connect once a phase and wait. All ranks run the
//! phases in the same order. The host answers from the calling thread, so it may close as soon as
//! its own call has returned.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fabric::auth::Key;
use fabric::class::TrafficClass;
use fabric::deadline::{Deadline, Timed};
use fabric::descriptors::{Reservation, TooFewDescriptors, reserve};
use fabric::tcp::{self, Port};

use hfreduce_engine::descriptors_needed;

use crate::bundle::{self, pack, unpack};
use crate::wire::{Answer, PHASE_BYTES_MAX, Request, VALUE_BYTES_MAX, WORLD_MAX};

/// Time in which an authenticated guest has to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which the host waits for a guest that does not read its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
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
    table: Arc<Table>,
    /// Rank 0's listening port.
    door: Option<Port>,
    /// For the group that follows, too: a rank that cannot be in it fails before others wait for it.
    _descriptors: Reservation,
}

#[derive(Default)]
struct Table {
    seats: Mutex<Seats>,
    bell: Condvar,
}

#[derive(Default)]
struct Seats {
    /// By phase and rank: the value, and the connection of the guest that waits for the answer.
    guests: HashMap<String, BTreeMap<u32, (Vec<u8>, TcpStream)>>,
    /// Bytes of these values.
    held_bytes: usize,
    /// The failure that ended the meetings of this group; later guests receive it, too.
    failed: Option<Answer>,
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
        let key = Key::from_bytes(key).map_err(|error| MeetingError::Invalid(error.to_string()))?;
        let ranks = who.world_size as usize;
        let descriptors =
            reserve(descriptors_needed(ranks, 1, None), &format!("a group of {ranks} ranks"))?;
        let table = Arc::new(Table::default());
        let door = if who.rank == 0 && who.world_size > 1 {
            let address = listening_address(host, port);
            let seats = table.clone();
            let world = who.world_size;
            let opened = Port::open(
                address,
                key.clone(),
                context(&who.job),
                TrafficClass::Hfreduce,
                0,
                move |stream, from, _| seats.admit(stream, from, world),
            );
            Some(opened.map_err(|source| MeetingError::Listen {
                address: format!("{host}:{port}"),
                source,
            })?)
        } else {
            None
        };
        Ok(Self { who, host: host.to_owned(), port, key, table, door, _descriptors: descriptors })
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
            Who { rank: 0, .. } => self.preside(phase, value, deadline),
            _ => self.attend(phase, value, deadline),
        }
    }

    /// The host's part: waits for all ranks, then answers them.
    fn preside(
        &self,
        phase: &str,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>, MeetingError> {
        let expected = 1..self.who.world_size;
        let mut seats = self.table.lock();
        // Guests are ranks of this group other than 0, so all are there when their number is right.
        let came = |seats: &Seats| seats.guests.get(phase).map_or(0, BTreeMap::len);
        while seats.failed.is_none() && came(&seats) < expected.len() {
            let Some(left) = deadline.remaining() else { break };
            seats = match self.table.bell.wait_timeout(seats, left) {
                Ok((seats, _)) => seats,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        let here = seats.guests.get(phase);
        let is_here = |rank: &u32| here.is_some_and(|guests| guests.contains_key(rank));
        let absent: Vec<u32> = expected.filter(|rank| !is_here(rank)).collect();
        let answer = match seats.failed.clone() {
            Some(failure) => failure,
            None if absent.is_empty() => {
                let others = here.into_iter().flat_map(BTreeMap::values);
                let others = others.map(|(value, _)| value.as_slice());
                match pack(&std::iter::once(value).chain(others).collect::<Vec<_>>()) {
                    Ok(blob) => Answer::Values(blob),
                    Err(error) => Answer::failed(error.to_string()),
                }
            }
            None => {
                let detail = absence(&absent, self.who.world_size);
                Answer::Failed { absent, detail }
            }
        };
        // A failure ends the meetings that follow, too.
        if matches!(answer, Answer::Failed { .. }) {
            seats.failed = Some(answer.clone());
        }
        let failed = seats.failed.is_some();
        let leaving = seats.take(|of| failed || of == phase);
        drop(seats);
        let bytes = answer.encode();
        for (rank, (_, stream)) in leaving {
            tell(Some(rank), &stream, &bytes);
        }
        self.conclude(answer)
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

impl Table {
    /// Admits a guest that has proved that it holds the key. Runs on a separate thread.
    fn admit(&self, stream: TcpStream, from: SocketAddr, world: u32) {
        let soon = Deadline::after(REQUEST_TIMEOUT);
        let request = match Request::read(&mut io::BufReader::new(Timed::new(&stream, soon))) {
            Ok(request) => request,
            Err(error) => {
                tracing::warn!(%from, %error, "a guest that cannot be understood");
                if error.kind() == io::ErrorKind::InvalidData {
                    let detail = format!("rank 0 cannot read what this rank brought: {error}");
                    tell(None, &stream, &Answer::failed(detail).encode());
                }
                return;
            }
        };
        let mut seats = self.lock();
        let Request { rank, phase, value, .. } = request;
        let came = |guests: &BTreeMap<u32, _>| guests.contains_key(&rank);
        let twin = rank == 0 || seats.guests.get(&phase).is_some_and(came);
        let trouble = if request.world != world {
            Some(format!(
                "rank {rank} was started with {} ranks and rank 0 with {world}: give all the same \
                 WORLD_SIZE",
                request.world
            ))
        } else if twin {
            Some(format!(
                "two processes say that they are rank {rank}: give each rank its own RANK"
            ))
        } else {
            // Together with the host's value; the exact limit is checked when all are there.
            let (held, most) = (seats.held_bytes, bundle::values_bytes_max(world as usize));
            (held + value.len() > most).then(|| {
                format!(
                    "rank {rank} brings {} bytes to the {held} of other ranks, and at most \
                    {most} are possible in phase `{phase}`",
                    value.len()
                )
            })
        };
        if let Some(detail) = trouble {
            seats.failed.get_or_insert(Answer::failed(detail));
        }
        if let Some(failure) = &seats.failed {
            let answer = failure.encode();
            drop(seats);
            tell(Some(rank), &stream, &answer);
        } else {
            seats.held_bytes += value.len();
            seats.guests.entry(phase).or_default().insert(rank, (value, stream));
        }
        self.bell.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seats {
    /// Removes the guests of these phases, to be answered.
    fn take(&mut self, phases: impl Fn(&str) -> bool) -> Vec<(u32, (Vec<u8>, TcpStream))> {
        let taken = self.guests.extract_if(|phase, _| phases(phase));
        let taken: Vec<_> = taken.flat_map(|(_, guests)| guests).collect();
        self.held_bytes -= taken.iter().map(|(_, (value, _))| value.len()).sum::<usize>();
        taken
    }
}

/// Sends a guest its answer; a guest that has disconnected does not need it.
fn tell(rank: Option<u32>, stream: &TcpStream, answer: &[u8]) {
    let soon = Deadline::after(ANSWER_TIMEOUT);
    let sent = io::Write::write_all(&mut Timed::new(stream, soon), answer);
    if let Err(error) = sent {
        tracing::warn!(rank, %error, "a rank left the meeting before its end");
    }
}

/// Whether a socket's deadline passed: the kernel has two names for it.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn absence(absent: &[u32], world: u32) -> String {
    const NAMED_MAX: usize = 16;
    let named: Vec<String> = absent.iter().take(NAMED_MAX).map(u32::to_string).collect();
    let more = if absent.len() > NAMED_MAX { ", …" } else { "" };
    let come = world as usize - absent.len();
    format!("rank {}{more} did not come in time ({come} of {world} did)", named.join(", "))
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
