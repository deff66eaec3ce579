//! Guests of a meeting: the ranks that have arrived at the host and wait for its answer.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fabric::deadline::{Deadline, Timed};

use crate::bundle::{self, pack};
use crate::wire::{Answer, Request};

/// Time in which an authenticated guest has to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which the host waits for a guest that does not read its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The guests of all phases.
#[derive(Default)]
pub(super) struct Guests {
    arrivals: Mutex<Arrivals>,
    changed: Condvar,
}

#[derive(Default)]
struct Arrivals {
    /// By phase and rank: the value, and the connection of the guest that waits for the answer.
    guests: HashMap<String, BTreeMap<u32, (Vec<u8>, TcpStream)>>,
    /// Bytes of these values.
    held_bytes: usize,
    /// The failure that ended the meetings of this group; later guests receive it, too.
    failed: Option<Answer>,
}

impl Guests {
    /// Admits a guest that has proved that it holds the key. Runs on a separate thread.
    pub(super) fn admit(&self, stream: TcpStream, from: SocketAddr, world: u32) {
        let soon = Deadline::after(REQUEST_TIMEOUT);
        let request = match Request::read(&mut io::BufReader::new(Timed::new(&stream, soon))) {
            Ok(request) => request,
            Err(error) => {
                tracing::warn!(%from, %error, "a guest that cannot be understood");
                if error.kind() == io::ErrorKind::InvalidData {
                    let detail = format!("rank 0 cannot read what this rank brought: {error}");
                    answer_guest(None, &stream, &Answer::failed(detail).encode());
                }
                return;
            }
        };
        let mut arrivals = self.lock();
        let Request { rank, phase, value, .. } = request;
        let came = |guests: &BTreeMap<u32, _>| guests.contains_key(&rank);
        let twin = rank == 0 || arrivals.guests.get(&phase).is_some_and(came);
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
            let (held, most) = (arrivals.held_bytes, bundle::values_bytes_max(world as usize));
            (held + value.len() > most).then(|| {
                format!(
                    "rank {rank} brings {} bytes to the {held} of other ranks, and at most \
                    {most} are possible in phase `{phase}`",
                    value.len()
                )
            })
        };
        if let Some(detail) = trouble {
            arrivals.failed.get_or_insert(Answer::failed(detail));
        }
        if let Some(failure) = &arrivals.failed {
            let answer = failure.encode();
            drop(arrivals);
            answer_guest(Some(rank), &stream, &answer);
        } else {
            arrivals.held_bytes += value.len();
            arrivals.guests.entry(phase).or_default().insert(rank, (value, stream));
        }
        self.changed.notify_all();
    }

    /// The host's part of a phase: waits for all ranks, then answers them. Returns the answer.
    pub(super) fn gather(
        &self,
        world: u32,
        phase: &str,
        value: &[u8],
        deadline: Deadline,
    ) -> Answer {
        let expected = 1..world;
        let mut arrivals = self.lock();
        // Guests are ranks of this group other than 0, so all are there when their number is right.
        let came = |arrivals: &Arrivals| arrivals.guests.get(phase).map_or(0, BTreeMap::len);
        while arrivals.failed.is_none() && came(&arrivals) < expected.len() {
            let Some(left) = deadline.remaining() else { break };
            arrivals = match self.changed.wait_timeout(arrivals, left) {
                Ok((arrivals, _)) => arrivals,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        let here = arrivals.guests.get(phase);
        let is_here = |rank: &u32| here.is_some_and(|guests| guests.contains_key(rank));
        let absent: Vec<u32> = expected.filter(|rank| !is_here(rank)).collect();
        let answer = match arrivals.failed.clone() {
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
                let detail = absence(&absent, world);
                Answer::Failed { absent, detail }
            }
        };
        // A failure ends the meetings that follow, too.
        if matches!(answer, Answer::Failed { .. }) {
            arrivals.failed = Some(answer.clone());
        }
        let failed = arrivals.failed.is_some();
        let leaving = arrivals.take(|of| failed || of == phase);
        drop(arrivals);
        let bytes = answer.encode();
        for (rank, (_, stream)) in leaving {
            answer_guest(Some(rank), &stream, &bytes);
        }
        answer
    }

    fn lock(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arrivals {
    /// Removes the guests of these phases, to be answered.
    fn take(&mut self, phases: impl Fn(&str) -> bool) -> Vec<(u32, (Vec<u8>, TcpStream))> {
        let taken = self.guests.extract_if(|phase, _| phases(phase));
        let taken: Vec<_> = taken.flat_map(|(_, guests)| guests).collect();
        self.held_bytes -= taken.iter().map(|(_, (value, _))| value.len()).sum::<usize>();
        taken
    }
}

/// Sends a guest its answer; a guest that has disconnected does not need it.
fn answer_guest(rank: Option<u32>, stream: &TcpStream, answer: &[u8]) {
    let soon = Deadline::after(ANSWER_TIMEOUT);
    let sent = Timed::new(stream, soon).write_all(answer);
    if let Err(error) = sent {
        tracing::warn!(rank, %error, "a rank left the meeting before its end");
    }
}

fn absence(absent: &[u32], world: u32) -> String {
    const NAMED_MAX: usize = 16;
    let named: Vec<String> = absent.iter().take(NAMED_MAX).map(u32::to_string).collect();
    let more = if absent.len() > NAMED_MAX { ", …" } else { "" };
    let come = world as usize - absent.len();
    format!("rank {}{more} did not come in time ({come} of {world} did)", named.join(", "))
}
