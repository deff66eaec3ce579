//! One operation on a GPU's memory: its copies, their completion, and the result for its caller.
//!
//! Order for each byte: copied down → `arrived` → reduced → `delivered` → copied up → ended. After a failure no
//! further copy is queued; queued copies must complete (*drained*) before the block is reused. The block of a
//! job that is dropped earlier is leaked.

mod small;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hfreduce_engine::{ErrorKind, Watermarks, Work};

use crate::arena::{self, Block};
use crate::context::{Context, Event, Stream};
use crate::counters::Counters;
use crate::cursor::Cursor;
use crate::error::DeviceError;
use crate::memory::Memory;
use crate::settled::{Failure, Settled};
use crate::windows::Windows;

/// Maximum number of queued copies of one operation in each direction: enough to keep a copy engine busy while
/// the worker serves other jobs.
const QUEUED_MAX: usize = 8;
/// Number of queries of a copy's state after the driver returned errors.
const DRAIN_TRIES: u32 = 3;

/// State shared by all jobs of a device.
pub struct Lane {
    pub context: Arc<Context>,
    pub down: Stream,
    pub up: Stream,
    pub windows: Windows,
    pub counters: Arc<Counters>,
}

struct Flight {
    event: Event,
    /// The event has been recorded after the copy.
    marked: bool,
    end: usize,
}

/// See the module's documentation.
pub struct Job {
    ready: Event,
    memory: Memory,
    block: Option<Block>,
    output_at: usize,
    down: Cursor,
    up: Cursor,
    flights_down: VecDeque<Flight>,
    flights_up: VecDeque<Flight>,
    follows: [bool; 2],
    /// By direction: the copy engine copies, because the processor did not.
    engine_copies: [bool; 2],
    /// The caller's stream must be queried before the processor copies.
    asks_stream: bool,
    pace: Option<Arc<Watermarks>>,
    settled: Arc<Settled>,
    work: Arc<OnceLock<Work>>,
    deadline: Instant,
    drain_errors: u32,
}

/// Parts of a job.
pub struct Parts {
    /// Recorded in the caller's stream: the memory is ready after it.
    pub ready: Event,
    pub memory: Memory,
    pub block: Option<Block>,
    /// Offset of the output in the block.
    pub output_at: usize,
    pub chunk_bytes: usize,
    /// Progress, if copies and reduction overlap.
    pub pace: Option<Arc<Watermarks>>,
    pub settled: Arc<Settled>,
    /// The engine's operation, once submitted.
    pub work: Arc<OnceLock<Work>>,
    pub deadline: Instant,
}

impl Job {
    pub fn new(parts: Parts) -> Self {
        let Parts { ready, memory, block, output_at, chunk_bytes, pace, settled, work, deadline } =
            parts;
        Self {
            down: Cursor::new(memory.input.bytes, chunk_bytes),
            up: Cursor::new(memory.output.bytes, chunk_bytes),
            ready,
            memory,
            block,
            output_at,
            flights_down: VecDeque::new(),
            flights_up: VecDeque::new(),
            follows: [false; 2],
            engine_copies: [false; 2],
            asks_stream: false,
            pace,
            settled,
            work,
            deadline,
            drain_errors: 0,
        }
    }

    /// True while copies down remain to be queued: those of the next job wait for their turn.
    pub fn holds_the_way_down(&self) -> bool {
        !self.down.is_issued() && !self.settled.is_ended()
    }

    /// True while copies of it are queued on the GPU.
    pub fn is_flying(&self) -> bool {
        !self.flights_down.is_empty() || !self.flights_up.is_empty()
    }

    /// True while the GPU must be queried for the completion of copies.
    pub fn is_asking(&self) -> bool {
        self.is_flying() || self.asks_stream
    }

    /// True once all work is done, or none can be done.
    pub fn is_over(&self) -> bool {
        self.settled.is_ended()
            && !self.is_engines()
            && (!self.is_flying() || self.drain_errors > DRAIN_TRIES)
    }

    /// True while the engine may access the block.
    fn is_engines(&self) -> bool {
        self.work.get().map_or_else(|| self.settled.state().claimed, |work| !work.is_done())
    }

    /// Does what is possible now; true if there was progress. The context is current.
    pub fn advance(&mut self, lane: &mut Lane, may_begin: bool) -> bool {
        if self.settled.is_ended() {
            return self.drain(lane);
        }
        match self.step(lane, may_begin) {
            Ok(moved) => moved,
            Err(error) => {
                self.fail(&error);
                true
            }
        }
    }

    fn step(&mut self, lane: &mut Lane, may_begin: bool) -> Result<bool, DeviceError> {
        let work = self.work.clone();
        let engine = work.get();
        if let Some(error) = engine.and_then(Work::error) {
            self.settled.end(Err(Failure::Collective(error)));
            return Ok(true);
        }
        let summed = engine.is_some_and(Work::is_done);
        let mut moved = may_begin && self.queue_down(lane)?;
        moved |= self.land_down()?;
        let available = match &self.pace {
            _ if summed => usize::MAX,
            Some(pace) => pace.delivered(),
            None => 0,
        };
        moved |= self.queue_up(lane, available)?;
        moved |= self.land_up()?;
        if summed && self.down.is_landed() && self.up.is_landed() {
            self.settled.end(Ok(()));
            return Ok(true);
        }
        if Instant::now() >= self.deadline && (summed || engine.is_none()) {
            // While the engine runs the operation, the engine reports the timeout, because it has
            // the cause.
            return Err(self.late(lane));
        }
        Ok(moved)
    }

    fn late(&self, lane: &Lane) -> DeviceError {
        let down = !self.down.is_landed();
        let what = if down { "a copy from the GPU" } else { "a copy to the GPU" };
        DeviceError::Late { what, device: lane.context.ordinal }
    }

    fn queue_down(&mut self, lane: &mut Lane) -> Result<bool, DeviceError> {
        let mut moved = self.copy_at_once(lane, true, usize::MAX)?;
        while self.flights_down.len() < QUEUED_MAX
            && !self.is_processors(lane, true)
            && !self.settled.is_ended()
            && let Some(range) = self.down.next(usize::MAX)
        {
            if !std::mem::replace(&mut self.follows[0], true) {
                self.ready.before(&lane.down)?;
            }
            self.copy(lane, true, range)?;
            moved = true;
        }
        Ok(moved)
    }

    fn queue_up(&mut self, lane: &mut Lane, available: usize) -> Result<bool, DeviceError> {
        let mut moved = self.copy_at_once(lane, false, available)?;
        while self.flights_up.len() < QUEUED_MAX
            && !self.is_processors(lane, false)
            && !self.settled.is_ended()
            && let Some(range) = self.up.next(available)
        {
            if !std::mem::replace(&mut self.follows[1], true) {
                self.ready.before(&lane.up)?;
            }
            self.copy(lane, false, range)?;
            moved = true;
        }
        Ok(moved)
    }

    fn copy(&mut self, lane: &Lane, down: bool, range: Range<usize>) -> Result<(), DeviceError> {
        let Some(block) = &self.block else { return Ok(()) };
        let (cuda, ordinal) = (&lane.context.cuda, lane.context.ordinal);
        let (stream, flights) = match down {
            true => (&lane.down, &mut self.flights_down),
            false => (&lane.up, &mut self.flights_up),
        };
        // Counts as queued before the call: a call that fails may have queued the copy.
        let event = Event::new(&lane.context)?;
        flights.push_back(Flight { event, marked: false, end: range.end });
        let bytes = range.len();
        if down {
            self.down.issued(&range);
            let from = self.memory.input.pointer + range.start as u64;
            // SAFETY: block and input stay until this job is drained: the job owns the block, and the caller
            // guarantees the input.
            unsafe { cuda.copy_down(ordinal, block.at(range.start), from, bytes, stream.handle)? };
        } else {
            self.up.issued(&range);
            let to = self.memory.output.pointer + range.start as u64;
            let from = block.at(self.output_at + range.start);
            // SAFETY: as above; the engine has delivered these bytes and writes them no more.
            unsafe { cuda.copy_up(ordinal, to, from, bytes, stream.handle)? };
        }
        let counter = if down { &lane.counters.down_bytes } else { &lane.counters.up_bytes };
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
        if let Some(flight) = flights.back_mut() {
            flight.event.record(stream)?;
            flight.marked = true;
        }
        Ok(())
    }

    fn land_down(&mut self) -> Result<bool, DeviceError> {
        let mut moved = false;
        while let Some(flight) = self.flights_down.front()
            && flight.event.has_passed()?
        {
            self.down.landed(flight.end);
            if let (Some(pace), Some(work)) = (&self.pace, self.work.get()) {
                work.arrived(pace, flight.end);
            }
            self.flights_down.pop_front();
            moved = true;
        }
        if self.down.is_landed() && !self.settled.state().arrived {
            self.settled.change(|state| state.arrived = true);
        }
        Ok(moved)
    }

    fn land_up(&mut self) -> Result<bool, DeviceError> {
        let mut moved = false;
        while let Some(flight) = self.flights_up.front()
            && flight.event.has_passed()?
        {
            self.up.landed(flight.end);
            self.flights_up.pop_front();
            moved = true;
        }
        Ok(moved)
    }

    /// Records that the driver could not be queried.
    pub fn record_query_failure(&mut self) {
        self.drain_errors += 1;
    }

    /// Fails the operation here and, through the engine, on every rank.
    pub fn fail(&mut self, error: &DeviceError) {
        let Some(work) = self.work.get() else {
            self.settled.end(Err(Failure::Device(error.clone())));
            return;
        };
        let kind = error.kind();
        let detail = error.to_string();
        let phase = if self.down.is_landed() {
            "copying its result to the GPU"
        } else {
            "copying its input from the GPU"
        };
        work.abort(kind, &detail);
        self.settled.end(Err(Failure::Collective(work.failure(kind, phase, &detail))));
    }

    /// Polls queued copies of an operation that has ended, without blocking.
    fn drain(&mut self, lane: &Lane) -> bool {
        let mut moved = false;
        let both = [(&mut self.flights_down, &lane.down), (&mut self.flights_up, &lane.up)];
        for (flights, stream) in both {
            while let Some(flight) = flights.front_mut() {
                let completed = match flight.marked {
                    true => flight.event.has_passed(),
                    // Queued or not: all work in the stream now completes before this event.
                    false => flight.event.record(stream).map(|()| false),
                };
                match completed {
                    Ok(true) => drop(flights.pop_front()),
                    Ok(false) if flight.marked => break,
                    Ok(false) => flight.marked = true,
                    Err(error) => {
                        self.drain_errors += 1;
                        tracing::warn!(%error, "cannot query whether a copy has completed");
                        return true;
                    }
                }
                moved = true;
            }
        }
        moved
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let closed = DeviceError::Closed { device: self.ready.ordinal(), why: "was closed" };
        self.settled.end(Err(Failure::Device(closed)));
        if self.is_flying() || self.is_engines() {
            // A copy may still write: its memory is never reused.
            arena::abandon(self.block.take());
            for flight in self.flights_down.drain(..).chain(self.flights_up.drain(..)) {
                drop(flight);
            }
            return;
        }
        drop(self.block.take());
        self.settled.change(|state| state.drained = true);
    }
}

impl DeviceError {
    /// The engine's kind of this error.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::Late { .. } => ErrorKind::TimedOut,
            _ => ErrorKind::Device,
        }
    }
}
