//! Session of a rank: a thread that takes its calls, moves its data while any is in progress, and
//! reports completed calls.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::arena::Arena;

use super::calls::Calls;
use super::connection::{ClientConnection, ENDED, STOPPED};
use super::pipelined::{Pipelined, Served};
use super::validate;
use crate::protocol::{ANSWER, BEAT, CALLS_MAX, CallRequest, Region, Request, Response};
use hfreduce_core::error::ErrorKind;
use hfreduce_engine::communicator::Communicator;
use hfreduce_engine::driver::TICK;
use hfreduce_shm::quota::Charge;
use hfreduce_shm::watermarks::Watermarks;

/// Maximum number of unread bytes: a rank that does not read gets no more calls in.
const UNREAD_MAX: usize = 256 << 10;

/// Maximum length of an abort reason, in characters.
const REASON_MAX: usize = 1024;
/// Memory charged for a call in progress, and for each of its transfers.
const CALL_BYTES: usize = 1 << 10;
const TRANSFER_BYTES: usize = 128;

/// The session of one rank.
pub struct Session<'a> {
    pub(crate) client: ClientConnection<'a>,
    pub(crate) communicator: Communicator,
    pub(crate) arena: Arc<Arena>,
    liveness: Duration,
    pub(crate) calls: Calls,
    /// Memory of calls, and of the arena up to the end of the used part.
    memory: Charge,
    pub(crate) arena_used: usize,
    /// The rank was notified of the end of this epoch; it may leave or reconfigure.
    pub(crate) end_reported: bool,
    pub(crate) last_message_at: Instant,
    beat: Instant,
}

/// How a session continues.
pub enum Next {
    Wait,
    End,
}

impl<'a> Session<'a> {
    /// Session of a connected rank.
    pub(crate) fn new(
        client: ClientConnection<'a>,
        communicator: Communicator,
        arena: Arc<Arena>,
        liveness: Duration,
        memory: Charge,
    ) -> Self {
        let (calls, end_reported, now) = (Calls::default(), false, Instant::now());
        let (last_message_at, beat) = (now, now);
        let arena_used = 0;
        Self {
            client,
            communicator,
            arena,
            liveness,
            calls,
            memory,
            arena_used,
            end_reported,
            last_message_at,
            beat,
        }
    }

    /// Serves the rank until it leaves or disconnects.
    pub(crate) fn run(&mut self) {
        while let Next::Wait = self.step() {
            self.wait();
        }
    }

    /// Handles messages of the rank and reports completed calls.
    fn step(&mut self) -> Next {
        let is_gone = self.client.is_gone(); // Messages sent before are still read.
        while self.calls.len() < CALLS_MAX
            && self.client.line.unsent() < UNREAD_MAX
            && let Some(message) = self.client.line.next_message()
        {
            self.last_message_at = Instant::now();
            match message {
                Request::Call(call) => self.call(&call),
                Request::Arrived { ticket, end } => {
                    self.calls.get(ticket).into_iter().for_each(|call| call.arrived(end));
                }
                Request::Beat => {}
                Request::Abort { kind, reason } => {
                    self.fail(kind, reason.chars().take(REASON_MAX).collect());
                }
                Request::Reconfigure(request) => {
                    if let Next::End = self.reconfigure(&request) {
                        return Next::End;
                    }
                }
                Request::Leave { timeout_ms } => {
                    self.communicator.close(Duration::from_millis(timeout_ms).min(ANSWER));
                    self.client.line.send(&Response::Left);
                    return Next::End;
                }
                Request::Open(_)
                | Request::Connect { .. }
                | Request::Join { .. }
                | Request::Memory => {
                    let detail = "unexpected message on a connected session";
                    self.fail(ErrorKind::Protocol, detail.to_owned());
                }
            }
        }
        if is_gone {
            self.fail(ErrorKind::PeerDied, ENDED.to_owned());
            return Next::End;
        }
        let silent = self.last_message_at.elapsed();
        if silent > self.liveness.max(3 * BEAT) && self.calls.len() < CALLS_MAX {
            let seconds = silent.as_secs_f64();
            let detail = format!("no heartbeat for {seconds:.1} s; the process is stopped");
            self.fail(ErrorKind::PeerStalled, detail);
        }
        if self.client.is_stopped() {
            self.fail(ErrorKind::Aborted, STOPPED.to_owned());
        }
        self.report()
    }

    fn call(&mut self, call: &CallRequest) {
        let (rank, world) = (self.communicator.rank(), self.communicator.world_size());
        let mut operation = match validate::operation(call, self.arena.segment(), rank, world) {
            Ok(operation) => operation,
            Err(why) => {
                let detail = format!("invalid call: {why}");
                return self.fail(ErrorKind::Protocol, detail);
            }
        };
        if self.calls.contains(call.ticket) {
            let detail = format!("invalid call: ticket {} is in use", call.ticket);
            return self.fail(ErrorKind::Protocol, detail);
        }
        let charged_bytes = CALL_BYTES + call.transfers.len() * TRANSFER_BYTES;
        let end = |region: Region| usize::try_from(region.offset).unwrap_or(0) + region.bytes;
        let arena_used = self.arena_used.max(end(call.input)).max(end(call.output));
        if let Err(error) =
            self.memory.set_to(arena_used + self.calls.charged_bytes() + charged_bytes)
        {
            return self.fail(ErrorKind::Io, error.to_string());
        }
        self.arena_used = arena_used;
        let pipelined = call
            .pipelined
            .then(|| Pipelined { watermarks: Arc::new(Watermarks::default()), reported: 0 });
        if let Some(Pipelined { watermarks, .. }) = &pipelined {
            operation.input = operation.input.pipelined(watermarks.clone());
            operation.output = operation.output.pipelined(watermarks.clone());
        }
        let timeout = Duration::from_millis(call.timeout_ms);
        // An error has broken the group, which is reported below.
        if let Ok(work) = self.communicator.submit(operation, timeout, true) {
            self.calls.insert(Served { ticket: call.ticket, work, pipelined, charged_bytes });
        }
    }

    /// Reports completed calls, and the end of the epoch.
    fn report(&mut self) -> Next {
        self.calls.send_delivered(&mut self.client.line);
        let done = self.calls.take_done();
        if !done.is_empty() {
            // A reduction is never refused.
            let _ = self.memory.set_to(self.arena_used + self.calls.charged_bytes());
            self.client.line.send(&Response::Done(done));
        }
        // All operations of a broken group end; then no operation accesses their memory.
        if !self.end_reported
            && let Some(error) = self.communicator.error()
            && self.calls.have_all_ended()
        {
            let record = error.flight_record.map(String::from);
            let retired = self.arena.is_retired();
            self.client.line.send(&Response::Broken { cause: *error.cause, record, retired });
            self.calls.clear();
            self.end_reported = true;
        }
        if self.end_reported && self.client.is_stopped() {
            return Next::End;
        }
        if !self.end_reported && self.beat.elapsed() >= BEAT {
            self.beat = Instant::now();
            self.client.line.send(&Response::Beat);
        }
        self.client.line.flush();
        Next::Wait
    }

    pub(crate) fn fail(&self, kind: ErrorKind, detail: String) {
        if self.communicator.error().is_none() {
            self.communicator.fail(kind, "serve", detail);
        }
    }

    fn wait(&mut self) {
        if self.calls.is_empty() {
            return self.client.wait(TICK);
        }
        let Self { client, calls, communicator, .. } = self;
        let done = || calls.has_updates();
        communicator.wait_for_client(Instant::now() + TICK, done, || client.line.has_more());
    }
}
