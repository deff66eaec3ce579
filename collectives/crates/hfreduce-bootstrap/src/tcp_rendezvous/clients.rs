//! Clients of a TCP rendezvous: the ranks that have connected to rank 0 and wait for its answer.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fabric::deadline::{Deadline, Timed};

use crate::bundle::{self, pack};
use crate::wire::{Answer, Request};

/// Time in which an authenticated client has to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which the server waits for a client that does not read its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The clients of all phases.
#[derive(Default)]
pub(super) struct Clients {
    arrivals: Mutex<Arrivals>,
    changed: Condvar,
}

#[derive(Default)]
struct Arrivals {
    /// By phase and rank: the value, and the connection of the client that waits for the answer.
    clients: HashMap<String, BTreeMap<u32, (Vec<u8>, TcpStream)>>,
    /// Bytes of these values.
    value_bytes: usize,
    /// The failure that ended the rendezvous of this group; later clients receive it, too.
    failure: Option<Answer>,
}

impl Clients {
    /// Admits a client that has proved that it holds the key. Runs on a separate thread.
    pub(super) fn admit(&self, stream: TcpStream, from: SocketAddr, world: u32) {
        let soon = Deadline::after(REQUEST_TIMEOUT);
        let request = match Request::read(&mut io::BufReader::new(Timed::new(&stream, soon))) {
            Ok(request) => request,
            Err(error) => {
                tracing::warn!(%from, %error, "invalid rendezvous request");
                if error.kind() == io::ErrorKind::InvalidData {
                    let detail = format!("rank 0 cannot read the request of this rank: {error}");
                    answer_client(None, &stream, &Answer::failed(detail).encode());
                }
                return;
            }
        };
        let mut arrivals = self.lock();
        let Request { rank, phase, value, .. } = request;
        let in_phase = arrivals.clients.get(&phase);
        let duplicate = rank == 0 || in_phase.is_some_and(|clients| clients.contains_key(&rank));
        let problem = if request.world != world {
            Some(format!(
                "rank {rank} was started with {} ranks and rank 0 with {world}: set the same \
                 WORLD_SIZE on all ranks",
                request.world
            ))
        } else if duplicate {
            Some(format!("two processes have rank {rank}: set a different RANK for each process"))
        } else {
            // Without the server's value; the exact limit is checked when all have arrived.
            let (bytes, max) = (arrivals.value_bytes, bundle::values_bytes_max(world as usize));
            (bytes + value.len() > max).then(|| {
                format!(
                    "rank {rank} adds {} bytes to the {bytes} of other ranks, and at most {max} \
                     are possible in phase `{phase}`",
                    value.len()
                )
            })
        };
        if let Some(detail) = problem {
            arrivals.failure.get_or_insert(Answer::failed(detail));
        }
        if let Some(failure) = &arrivals.failure {
            let answer = failure.encode();
            drop(arrivals);
            answer_client(Some(rank), &stream, &answer);
        } else {
            arrivals.value_bytes += value.len();
            arrivals.clients.entry(phase).or_default().insert(rank, (value, stream));
        }
        self.changed.notify_all();
    }

    /// The server's part of a phase: waits for all ranks, then answers them. Returns the answer.
    pub(super) fn gather(
        &self,
        world: u32,
        phase: &str,
        value: &[u8],
        deadline: Deadline,
    ) -> Answer {
        let expected = 1..world;
        let mut arrivals = self.lock();
        // Clients are ranks of this group other than 0, so their number shows whether all arrived.
        let count = |arrivals: &Arrivals| arrivals.clients.get(phase).map_or(0, BTreeMap::len);
        while arrivals.failure.is_none() && count(&arrivals) < expected.len() {
            let Some(remaining) = deadline.remaining() else { break };
            arrivals = match self.changed.wait_timeout(arrivals, remaining) {
                Ok((arrivals, _)) => arrivals,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        let clients = arrivals.clients.get(phase);
        let is_present = |rank: &u32| clients.is_some_and(|clients| clients.contains_key(rank));
        let absent: Vec<u32> = expected.filter(|rank| !is_present(rank)).collect();
        let answer = match arrivals.failure.clone() {
            Some(failure) => failure,
            None if absent.is_empty() => {
                let clients = clients.into_iter().flat_map(BTreeMap::values);
                let values = clients.map(|(value, _)| value.as_slice());
                match pack(&std::iter::once(value).chain(values).collect::<Vec<_>>()) {
                    Ok(blob) => Answer::Values(blob),
                    Err(error) => Answer::failed(error.to_string()),
                }
            }
            None => {
                let detail = absence(&absent, world);
                Answer::Failed { absent, detail }
            }
        };
        // A failure ends all later phases, too.
        if matches!(answer, Answer::Failed { .. }) {
            arrivals.failure = Some(answer.clone());
        }
        let failed = arrivals.failure.is_some();
        let answered = arrivals.remove(|other| failed || other == phase);
        drop(arrivals);
        let bytes = answer.encode();
        for (rank, (_, stream)) in answered {
            answer_client(Some(rank), &stream, &bytes);
        }
        answer
    }

    fn lock(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arrivals {
    /// Removes the clients of these phases, to be answered.
    fn remove(&mut self, phases: impl Fn(&str) -> bool) -> Vec<(u32, (Vec<u8>, TcpStream))> {
        let removed = self.clients.extract_if(|phase, _| phases(phase));
        let clients: Vec<_> = removed.flat_map(|(_, clients)| clients).collect();
        self.value_bytes -= clients.iter().map(|(_, (value, _))| value.len()).sum::<usize>();
        clients
    }
}

/// Sends a client its answer; a client that has disconnected does not need it.
fn answer_client(rank: Option<u32>, stream: &TcpStream, answer: &[u8]) {
    let soon = Deadline::after(ANSWER_TIMEOUT);
    if let Err(error) = Timed::new(stream, soon).write_all(answer) {
        tracing::warn!(rank, %error, "a rank disconnected before the rendezvous ended");
    }
}

fn absence(absent: &[u32], world: u32) -> String {
    const NAMED_MAX: usize = 16;
    let names: Vec<String> = absent.iter().take(NAMED_MAX).map(u32::to_string).collect();
    let more = if absent.len() > NAMED_MAX { ", …" } else { "" };
    let arrived = world as usize - absent.len();
    format!("rank {}{more} did not come in time ({arrived} of {world} did)", names.join(", "))
}
