//! A GPU with the engine's operations on its memory.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use hfreduce_engine::communicator::TIMEOUT_MAX;
use hfreduce_engine::{Buffer, Call, CollectiveError, Communicator, Watermarks, Work};

use crate::arena::{self, Arena, Block};
use crate::context::{Context, Event, Stream};
use crate::counters::Counters;
use crate::cuda::Cuda;
use crate::error::DeviceError;
use crate::gdr::{self, Gdr};
use crate::handle::DeviceWork;
use crate::job::{Job, Lane, Parts};
use crate::memory::{Memory, Range};
use crate::numa;
use crate::settled::{Failure, Settled};
use crate::windows::Windows;
use crate::worker::{self, Inbox};

const ALIGNMENT_BYTES: usize = 4096;

/// Settings of a device.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Bytes of one copy. Small ones overlap better, large ones cost fewer calls (about 6 µs each).
    pub chunk_bytes: usize,
    /// Maximum pinned memory.
    pub pinned_bytes_max: usize,
    /// Time after a deadline that the driver has to answer, and that closing waits for queued copies; their
    /// memory is not reused after that.
    pub grace_period: Duration,
    /// GDRCopy's library, for small copies; none disables it.
    pub gdrcopy: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            chunk_bytes: 512 << 10,
            pinned_bytes_max: 1 << 30,
            grace_period: Duration::from_secs(5),
            gdrcopy: Some(gdr::LIBRARY.to_owned()),
        }
    }
}

/// An open GPU. Closed when dropped, within a few seconds.
pub struct Device {
    context: Arc<Context>,
    arena: Arc<Arena>,
    inbox: Arc<Inbox>,
    counters: Arc<Counters>,
    settings: Settings,
    gdrcopy: Result<(), String>,
    worker: Thread,
    join: Mutex<Option<JoinHandle<()>>>,
    /// The process that opened it: forked children have no worker.
    process: u32,
}

impl Device {
    /// Opens a GPU: retains the context that the whole process shares, and starts the worker thread.
    ///
    /// # Errors
    /// The error of the driver or the system.
    pub fn open(cuda: &Arc<Cuda>, ordinal: i32, settings: Settings) -> Result<Self, DeviceError> {
        let context = Context::new(cuda.clone(), ordinal)?;
        let node = numa::node_of(&context.pci()?, Path::new("/sys"));
        let counters = Arc::new(Counters::default());
        let gdr = match &settings.gdrcopy {
            Some(library) => Gdr::open(library),
            None => Err("it is disabled".to_owned()),
        };
        let (gdr, gdrcopy) = match gdr {
            Ok(gdr) => (Some(gdr), Ok(())),
            Err(why) => (None, Err(why)),
        };
        tracing::info!(ordinal, why = gdrcopy.as_ref().err(), "GDRCopy for small copies");
        let mut lane = {
            let _current = context.enter()?;
            let (down, up) = (Stream::new(&context)?, Stream::new(&context)?);
            let (context, counters) = (context.clone(), counters.clone());
            Lane { context, down, up, windows: Windows::new(gdr), counters }
        };
        let inbox = Arc::new(Inbox::default());
        let (jobs, grace_period) = (inbox.clone(), settings.grace_period);
        let thread = std::thread::Builder::new().name(format!("hfreduce-gpu{ordinal}"));
        let thread = thread.spawn(move || {
            worker::run(&jobs, &mut lane, grace_period);
            drop(lane);
            jobs.ended();
        });
        let thread = thread.map_err(|error| DeviceError::Host {
            what: "starting a thread",
            device: ordinal,
            why: error.to_string(),
        })?;
        Ok(Self {
            arena: Arena::new(context.clone(), node, settings.pinned_bytes_max),
            context,
            inbox,
            counters,
            settings,
            gdrcopy,
            worker: thread.thread().clone(),
            join: Mutex::new(Some(thread)),
            process: std::process::id(),
        })
    }

    /// The device's number in this process.
    pub fn ordinal(&self) -> i32 {
        self.context.ordinal
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether GDRCopy was available when the device was opened.
    ///
    /// # Errors
    /// The reason why it is not.
    pub fn gdrcopy(&self) -> Result<(), &str> {
        self.gdrcopy.as_ref().map_err(String::as_str).copied()
    }

    /// Pinned bytes, in use or cached for the next operation.
    pub fn pinned_bytes(&self) -> usize {
        self.arena.pinned_bytes()
    }

    /// Starts an operation on memory of this device; operations in place use `input` alone.
    /// `stream`: the stream that makes the memory ready (`CUstream`, or the driver's numbers 0, 1,
    /// 2).
    ///
    /// Along the trees, the first chunks are reduced while the last ones are still being copied. The
    /// engine reads the input of point-to-point operations when it is called, so they wait here until
    /// it has been copied from the GPU.
    ///
    /// # Errors
    /// The call is invalid, the communicator is broken, or a failure of the device, which is reported
    /// to all ranks.
    ///
    /// # Safety
    /// The memory must stay allocated, and must not be accessed, until the work is drained.
    pub unsafe fn start(
        &self,
        communicator: &Communicator,
        call: Call<'_>,
        input: Range,
        output: Range,
        stream: usize,
    ) -> Result<DeviceWork, CollectiveError> {
        let (kind, deadline) = (call.kind, Instant::now() + call.timeout.min(TIMEOUT_MAX));
        let broken =
            |error: DeviceError| communicator.fail(error.kind(), kind.name(), error.to_string());
        let memory = Memory::new(kind, communicator.rank() == call.root, input, output);
        let pace =
            kind.uses_trees().then(|| Arc::new(Watermarks::with_watcher(self.worker.clone())));
        let (parts, [input, output]) =
            self.prepare(memory, stream, deadline, pace).map_err(broken)?;
        let submit = || {
            let timeout = deadline.saturating_duration_since(Instant::now());
            communicator.call(Call { input, output, timeout, ..call })
        };
        if kind.uses_trees() {
            return self.start_pipelined(parts, submit);
        }
        self.start_after_copy(parts, broken, submit)
    }

    fn start_pipelined(
        &self,
        parts: Parts,
        submit: impl FnOnce() -> Result<Work, CollectiveError>,
    ) -> Result<DeviceWork, CollectiveError> {
        let work = submit()?;
        let _ = parts.work.set(work.clone());
        let settled = parts.settled.clone();
        self.hand_over(parts);
        Ok(self.handle(work, settled))
    }

    fn start_after_copy(
        &self,
        parts: Parts,
        broken: impl FnOnce(DeviceError) -> CollectiveError,
        submit: impl FnOnce() -> Result<Work, CollectiveError>,
    ) -> Result<DeviceWork, CollectiveError> {
        let (settled, later) = (parts.settled.clone(), parts.work.clone());
        let until = parts.deadline + self.settings.grace_period;
        self.hand_over(parts);
        let end = settled.wait(until, |state| state.arrived || state.end.is_some());
        match end {
            Some(Err(Failure::Collective(error))) => return Err(error),
            Some(Err(Failure::Device(error))) => return Err(broken(error)),
            _ if settled.state().arrived && settled.claim() => {}
            _ => {
                let what = "a copy from the GPU";
                let late = DeviceError::Late { what, device: self.ordinal() };
                settled.end(Err(Failure::Device(late.clone())));
                return Err(broken(late));
            }
        }
        match submit() {
            Ok(work) => {
                let _ = later.set(work.clone());
                self.worker.unpark();
                Ok(self.handle(work, settled))
            }
            Err(error) => {
                settled.end(Err(Failure::Collective(error.clone())));
                settled.disclaim();
                self.worker.unpark();
                Err(error)
            }
        }
    }

    fn prepare(
        &self,
        memory: Memory,
        stream: usize,
        deadline: Instant,
        pace: Option<Arc<Watermarks>>,
    ) -> Result<(Parts, [Buffer; 2]), DeviceError> {
        if self.process != std::process::id() {
            let why = "was opened before this process was forked";
            return Err(DeviceError::Closed { device: self.ordinal(), why });
        }
        let (output_at, input_bytes, output_bytes) = match memory.shared_bytes {
            0 => {
                let at = memory.input.bytes.checked_next_multiple_of(ALIGNMENT_BYTES);
                (at.unwrap_or(usize::MAX), memory.input.bytes, memory.output.bytes)
            }
            bytes => (0, bytes, bytes),
        };
        let bytes = input_bytes.max(output_at.saturating_add(output_bytes));
        let block = (bytes > 0).then(|| self.arena.take(bytes, deadline)).transpose()?;
        let ready = {
            let _current = self.context.enter()?;
            let ready = Event::new(&self.context)?;
            ready.mark(stream)?;
            ready
        };
        let buffer = |at: usize, bytes: usize| {
            let place = block.as_ref().map(|block: &Block| (block.at(at), bytes));
            // SAFETY: the job keeps the block until the engine and the copies have finished with it.
            let buffer = unsafe { Buffer::new(place) };
            match &pace {
                Some(pace) => buffer.pipelined(pace.clone()),
                None => buffer,
            }
        };
        let buffers = [buffer(0, input_bytes), buffer(output_at, output_bytes)];
        let parts = Parts {
            ready,
            memory,
            block,
            output_at,
            chunk_bytes: self.settings.chunk_bytes,
            pace,
            settled: Arc::default(),
            work: Arc::new(OnceLock::new()),
            deadline,
        };
        Ok((parts, buffers))
    }

    fn handle(&self, work: Work, settled: Arc<Settled>) -> DeviceWork {
        let (worker, grace_period) = (self.worker.clone(), self.settings.grace_period);
        DeviceWork { work, settled, worker, device: self.ordinal(), grace_period }
    }

    fn hand_over(&self, parts: Parts) {
        if let Err(mut late) = self.inbox.put(Job::new(parts)) {
            let why = "was closed";
            late.fail(&DeviceError::Closed { device: self.ordinal(), why });
        }
        self.worker.unpark();
    }

    /// Ends the worker thread and releases the memory; operations in progress fail.
    pub fn close(&self) {
        if self.process != std::process::id() {
            return;
        }
        self.inbox.stop();
        self.worker.unpark();
        let join = self.join.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(join) = join else { return };
        // The worker waits that long for copies, and then releases its resources.
        if self.inbox.wait_for_end(self.settings.grace_period * 2) {
            let _ = join.join();
            self.arena.purge();
        } else {
            // A call of the driver does not return, and another call would block too.
            arena::abandon(self.arena.clone());
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The driver works only in the parent; its functions must not be called here.
            std::mem::forget((self.arena.clone(), self.context.clone()));
        }
        self.close();
    }
}
