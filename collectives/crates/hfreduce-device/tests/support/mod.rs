//! A stub of the CUDA driver, and groups of ranks as threads with memory on its GPUs.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::ffi::{CString, c_char, c_int, c_long};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Barrier, OnceLock};
use std::time::{Duration, Instant};

use hfreduce_daemon::AnyEndpoint;
use hfreduce_device::{Cuda, Device, DeviceError, DeviceWork, Range, Settings};
use hfreduce_engine::flight::Folders;
use hfreduce_engine::{Call, CollectiveError, Communicator, DType, Kind, Options};
use libloading::Library;

pub const TIMEOUT: Duration = Duration::from_secs(60);
pub const CHUNK_BYTES: usize = 64 << 10;
pub const DOWN: c_int = 0;
pub const UP: c_int = 1;
pub const ALL: c_long = -1;

/// The stub, compiled once for all tests of this program.
fn compiled() -> &'static Path {
    static COMPILED: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let compiled = COMPILED.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libcuda.so.1");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stub/cuda.c");
        let flags = "-std=gnu11 -Wall -Wextra -Werror -O1 -shared -fPIC -pthread";
        let mut compiler = Command::new("cc");
        compiler.args(flags.split(' ')).arg(source).arg("-o").arg(&library);
        let done = compiler.output().expect("a C compiler");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        (folder, library)
    });
    &compiled.1
}

/// A driver that only one test uses, with separate counters and faults.
pub struct Stub {
    pub cuda: Arc<Cuda>,
    library: Library,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Stub {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so.1");
        std::fs::copy(compiled(), &path).unwrap();
        // SAFETY: a library of this test.
        let library = unsafe { Library::new(&path) }.unwrap();
        let cuda = Cuda::load(path.to_str().unwrap()).unwrap();
        Self { cuda, library, path, _folder: folder }
    }

    fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the callers below use the types of the stub's source.
        *unsafe { self.library.get::<T>(name) }.unwrap()
    }

    pub fn fail(&self, call: &str, after: c_long, code: c_int, sticky: bool) {
        let call = CString::new(call).unwrap();
        let fail: unsafe extern "C" fn(*const c_char, c_long, c_int, c_int) =
            self.function("stub_fail");
        // SAFETY: a string that outlives the call.
        unsafe { fail(call.as_ptr(), after, code, c_int::from(sticky)) }
    }

    pub fn allow(&self, direction: c_int, count: c_long) {
        let allow: unsafe extern "C" fn(c_int, c_long) = self.function("stub_allow");
        // SAFETY: plain numbers.
        unsafe { allow(direction, count) }
    }

    /// The next call of this function does not return before [`Stub::open`].
    pub fn stall(&self, call: &str) {
        let call = CString::new(call).unwrap();
        let stall: unsafe extern "C" fn(*const c_char) = self.function("stub_stall");
        // SAFETY: a string that outlives the call.
        unsafe { stall(call.as_ptr()) }
    }

    pub fn delay(&self, delay: Duration) {
        let set: unsafe extern "C" fn(c_long) = self.function("stub_delay");
        // SAFETY: a plain number.
        unsafe { set(delay.as_micros() as c_long) }
    }

    pub fn count(&self, what: &str) -> i64 {
        let name = CString::new(what).unwrap();
        let count: unsafe extern "C" fn(*const c_char) -> c_long = self.function("stub_count");
        // SAFETY: a string that outlives the call.
        let value = unsafe { count(name.as_ptr()) };
        assert!(value >= 0, "{what}: {value}");
        value
    }

    /// Copies queued (`D`, `U`) and completed (`d`, `u`) by the engines, and reads and writes by the processor
    /// (`r`, `w`), in order.
    pub fn journal(&self) -> String {
        let read: unsafe extern "C" fn(c_long, *mut u64, *mut usize) -> c_int =
            self.function("stub_journal");
        let (mut place, mut bytes) = (0, 0);
        (0..self.count("journal"))
            // SAFETY: both places outlive the call.
            .map(|at| unsafe { read(at, &mut place, &mut bytes) } as u8 as char)
            .collect()
    }

    /// A stream of the program under training.
    pub fn stream(&self) -> usize {
        let create: unsafe extern "C" fn(*mut usize, u32) -> c_int =
            self.function("cuStreamCreate");
        let mut stream = 0;
        // SAFETY: a place for the handle.
        assert_eq!(unsafe { create(&mut stream, 0) }, 0);
        stream
    }

    /// Work queued in the stream after this waits for [`Stub::open`].
    pub fn gate(&self, stream: usize) {
        let gate: unsafe extern "C" fn(usize) = self.function("stub_gate");
        // SAFETY: a handle of this stub.
        unsafe { gate(stream) }
    }

    pub fn open(&self) {
        let open: unsafe extern "C" fn() = self.function("stub_open");
        // SAFETY: no arguments.
        unsafe { open() }
    }

    /// Checks that nothing leaked, that no foreign memory was accessed, and that no kernel ran.
    pub fn assert_clean(&self, what: &str) {
        self.assert_sound(what);
        for kind in ["registrations", "streams", "events", "contexts", "depth", "windows"] {
            assert_eq!(self.count(kind), 0, "{kind} are left: {what}");
        }
    }

    pub fn assert_sound(&self, what: &str) {
        assert_eq!(self.count("violations"), 0, "late copies: {what}");
        assert_eq!(self.count("launches"), 0, "kernels: {what}");
    }

    pub fn device(&self, ordinal: i32) -> Result<Device, DeviceError> {
        Device::open(&self.cuda, ordinal, settings())
    }

    /// Path of this stub's library.
    pub fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// A device with GDRCopy.
    pub fn device_with_gdrcopy(&self) -> Device {
        let gdrcopy = Some(self.path().to_owned());
        Device::open(&self.cuda, 0, Settings { gdrcopy, ..settings() }).unwrap()
    }

    /// GPU memory that holds these values.
    pub fn tensor(&self, values: &[f32]) -> Tensor<'_> {
        let allocate: unsafe extern "C" fn(usize) -> u64 = self.function("stub_device_alloc");
        // SAFETY: a plain number.
        let pointer = unsafe { allocate(size_of_val(values)) };
        let tensor = Tensor { stub: self, pointer, numel: values.len() };
        tensor.write(values);
        tensor
    }
}

pub fn settings() -> Settings {
    let grace_period = Duration::from_secs(60);
    Settings { chunk_bytes: CHUNK_BYTES, pinned_bytes_max: 64 << 20, grace_period, gdrcopy: None }
}

/// Memory of a stub's GPU, which is host memory of this process.
pub struct Tensor<'a> {
    stub: &'a Stub,
    pointer: u64,
    numel: usize,
}

impl Tensor<'_> {
    pub fn range(&self) -> Range {
        Range { pointer: self.pointer, bytes: self.numel * 4 }
    }

    /// Replaces the allocation by another one at the same address, or maps it to other memory.
    pub fn again(&self, same: bool) {
        let remap: unsafe extern "C" fn(u64, c_int) = self.stub.function("stub_device_again");
        // SAFETY: an address of the stub.
        unsafe { remap(self.pointer, c_int::from(same)) }
    }

    pub fn write(&self, values: &[f32]) {
        assert_eq!(values.len(), self.numel);
        // SAFETY: the stub's memory of this size; tests write only while no copy runs.
        unsafe { std::ptr::copy(values.as_ptr(), self.pointer as usize as *mut f32, self.numel) };
    }

    pub fn read(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.numel];
        // SAFETY: as above.
        unsafe {
            std::ptr::copy(self.pointer as usize as *const f32, values.as_mut_ptr(), self.numel)
        };
        values
    }
}

impl Drop for Tensor<'_> {
    fn drop(&mut self) {
        let free: unsafe extern "C" fn(u64) = self.stub.function("stub_device_free");
        // SAFETY: an address of the stub.
        unsafe { free(self.pointer) }
    }
}

/// `nodes` nodes with `locals` ranks each.
pub fn placement(nodes: usize, locals: usize) -> Vec<(String, String)> {
    (0..nodes * locals).map(|rank| (format!("n{}", rank / locals), "A".to_owned())).collect()
}

/// Runs `body` concurrently as every rank and returns the results.
pub fn run<T: Send>(
    placement: &[(String, String)],
    body: impl Fn(&Communicator) -> T + Sync,
) -> Vec<T> {
    run_at(placement, |_| None, body)
}

/// The same with the daemon of each rank, if it has one.
pub fn run_at<T: Send>(
    placement: &[(String, String)],
    daemon: impl Fn(u32) -> Option<PathBuf>,
    body: impl Fn(&Communicator) -> T + Sync,
) -> Vec<T> {
    let key = [7; 32];
    let endpoints: Vec<AnyEndpoint> = (0..placement.len())
        .map(|rank| {
            let mut options = Options::new(rank as u32, placement.to_vec());
            options.folders = Folders::default();
            // A thread is never stopped alone: a silent rank here only waits for a processor.
            options.liveness = TIMEOUT;
            // Several chunks for small tensors.
            options.slot_bytes = CHUNK_BYTES;
            AnyEndpoint::open(options, &key, daemon(rank as u32).as_deref()).unwrap()
        })
        .collect();
    let infos: Vec<Vec<u8>> = endpoints.iter().map(AnyEndpoint::info).collect();
    // A rank that fails immediately must not break ranks that still connect.
    let connected = Barrier::new(placement.len());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = endpoints
            .into_iter()
            .map(|endpoint| {
                let (infos, body, connected) = (&infos, &body, &connected);
                scope.spawn(move || {
                    let comm = endpoint.connect(infos, TIMEOUT);
                    connected.wait();
                    body(&comm.unwrap())
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Values that differ on every rank; their sums are exact.
pub fn values(rank: u32, numel: usize) -> Vec<f32> {
    (0..numel).map(|at| ((at * 31 + rank as usize * 7) % 1021) as f32).collect()
}

/// The result of an allreduce of [`values`].
pub fn sum(world: u32, numel: usize) -> Vec<f32> {
    let mut total = vec![0.0; numel];
    for rank in 0..world {
        total.iter_mut().zip(values(rank, numel)).for_each(|(total, value)| *total += value);
    }
    total
}

pub fn allreduce(
    device: &Device,
    comm: &Communicator,
    tensor: &Tensor<'_>,
    stream: usize,
    timeout: Duration,
) -> Result<DeviceWork, CollectiveError> {
    let call = Call::new(Kind::Allreduce, DType::F32, timeout, false);
    // SAFETY: the tests keep the tensor until the work is drained.
    unsafe { device.start(comm, call, tensor.range(), Range::default(), stream) }
}

/// Waits for a condition that becomes true without further calls.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within the timeout");
        std::thread::sleep(Duration::from_millis(1));
    }
}
