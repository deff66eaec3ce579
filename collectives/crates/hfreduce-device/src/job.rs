//! One operation on a GPU's memory: its copies, their ends, and what its caller hears.
//!
//! Order for each byte: copied down → `arrived` → summed → `delivered` → copied up → ended. Once the
//! operation has ended in failure no further copy is queued; those that are queued are waited for
//! (*drained*) before the block goes back. A job that is dropped before leaves its block to nobody.

mod small;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hfreduce_engine::{ErrorKind, Watermarks, Work};

use crate::arena::{self, Block};
use crate::context::{Context, Event, Stream};
use crate::cursor::Cursor;
use crate::device::{Counters, Memory};
use crate::error::DeviceError;
use crate::settled::{Failure, Settled};
use crate::windows::Windows;

/// Copies of one operation that are queued at a time and direction: enough to keep a copy engine
/// busy while the worker looks elsewhere.
const QUEUED_MAX: usize = 8;
/// How often the driver is asked again about a copy after it gave an error instead of an answer.
const DRAIN_TRIES: u32 = 3;

/// What all jobs of a device use.
pub struct Lane {
    pub context: Arc<Context>,
    pub down: Stream,
    pub up: Stream,
    pub windows: Windows,
    pub counters: Arc<Counters>,
}

struct Flight {
    event: Event,
    /// The event was recorded after the copy.
    marked: bool,
    end: usize,
}

/// See the module's text.
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
    /// By direction: the processor did not copy it, so the copy engine does.
    engine_copies: [bool; 2],
    /// The caller's stream is asked for what the processor copies then.
    asks_stream: bool,
    pace: Option<Arc<Watermarks>>,
    settled: Arc<Settled>,
    work: Arc<OnceLock<Work>>,
    deadline: Instant,
    drain_errors: u32,
}

/// What a job is made of.
pub struct Parts {
    /// Recorded in the caller's stream: the memory is ready after it.
    pub ready: Event,
    pub memory: Memory,
    pub block: Option<Block>,
    /// Where in the block the output lies.
    pub output_at: usize,
    pub chunk_bytes: usize,
    /// Where copies and the sum overlap.
    pub pace: Option<Arc<Watermarks>>,
    pub settled: Arc<Settled>,
    /// The engine's operation, once it has it.
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

    /// True while copies down are left to queue: the next job's wait for their turn.
    pub fn holds_the_way_down(&self) -> bool {
        !self.down.is_issued() && !self.settled.is_ended()
    }

    /// True while the GPU has something to do for it.
    pub fn is_flying(&self) -> bool {
        !self.flights_down.is_empty() || !self.flights_up.is_empty()
    }

    /// True while the GPU must be asked whether something has ended.
    pub fn is_asking(&self) -> bool {
        self.is_flying() || self.asks_stream
    }

    /// True once nothing is left to do, or nothing can be done.
    pub fn is_over(&self) -> bool {
        self.settled.is_ended()
            && !self.is_engines()
            && (!self.is_flying() || self.drain_errors > DRAIN_TRIES)
    }

    /// True while the engine may touch the block.
    fn is_engines(&self) -> bool {
        self.work.get().map_or_else(|| self.settled.state().claimed, |work| !work.is_done())
    }

    /// Does what can be done now; true if anything moved. The context is current.
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
        let there = match &self.pace {
            _ if summed => usize::MAX,
            Some(pace) => pace.delivered(),
            None => 0,
        };
        moved |= self.queue_up(lane, there)?;
        moved |= self.land_up()?;
        if summed && self.down.is_landed() && self.up.is_landed() {
            self.settled.end(Ok(()));
            return Ok(true);
        }
        if Instant::now() >= self.deadline && (summed || engine.is_none()) {
            // While the engine has it, the engine judges, who also knows whose fault it is.
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

    fn queue_up(&mut self, lane: &mut Lane, there: usize) -> Result<bool, DeviceError> {
        let mut moved = self.copy_at_once(lane, false, there)?;
        while self.flights_up.len() < QUEUED_MAX
            && !self.is_processors(lane, false)
            && !self.settled.is_ended()
            && let Some(range) = self.up.next(there)
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
        // It counts as flying before it is queued: a call that fails may have queued it.
        let event = Event::new(&lane.context)?;
        flights.push_back(Flight { event, marked: false, end: range.end });
        let bytes = range.len();
        if down {
            self.down.issued(&range);
            let from = self.memory.input.pointer + range.start as u64;
            // SAFETY: block and input stay until this job is drained: the block is ours, the input
            // is the caller's promise.
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

    /// The driver could not be asked.
    pub fn trouble(&mut self) {
        self.drain_errors += 1;
    }

    /// Ends it here and, through the engine, on every rank.
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

    /// Waits, without blocking, for copies that are queued; the operation has ended.
    fn drain(&mut self, lane: &Lane) -> bool {
        let mut moved = false;
        let both = [(&mut self.flights_down, &lane.down), (&mut self.flights_up, &lane.up)];
        for (flights, stream) in both {
            while let Some(flight) = flights.front_mut() {
                let asked = match flight.marked {
                    true => flight.event.has_passed(),
                    // Queued or not: whatever is in the stream now ends before this mark.
                    false => flight.event.record(stream).map(|()| false),
                };
                match asked {
                    Ok(true) => drop(flights.pop_front()),
                    Ok(false) if flight.marked => break,
                    Ok(false) => flight.marked = true,
                    Err(error) => {
                        self.drain_errors += 1;
                        tracing::warn!(%error, "the GPU does not say whether a copy has ended");
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
            // A copy may still come: its memory is never used for anything else.
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
    /// The engine's word for it.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::Late { .. } => ErrorKind::TimedOut,
            _ => ErrorKind::Device,
        }
    }
}
