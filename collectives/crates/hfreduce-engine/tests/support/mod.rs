//! Groups of ranks as threads of one process: real shared memory, real sockets.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod calls;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hfreduce_daemon::{AnyEndpoint, Daemon, Rules};
use hfreduce_engine::flight::Folders;
use hfreduce_engine::{
    Buffer, CollectiveError, Communicator, DType, ErrorKind, Options, ReduceOp, Work,
};

pub use calls::Calls;

pub const KEY: [u8; 32] = [7; 32];
/// A longer operation counts as hung, however busy the host is and whatever sanitizer runs.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// `nodes` nodes with `locals` ranks each, the first half of the nodes in zone A.
pub fn placement(nodes: usize, locals: usize) -> Vec<(String, String)> {
    (0..nodes * locals)
        .map(|rank| {
            let node = rank / locals;
            let zone = if node * 2 < nodes { "A" } else { "B" };
            (format!("n{node}"), zone.to_owned())
        })
        .collect()
}

/// Runs `body` concurrently as every rank and returns the results.
pub fn run<T: Send>(
    placement: &[(String, String)],
    tune: impl Fn(&mut Options) + Sync,
    body: impl Fn(Communicator) -> T + Sync,
) -> Vec<T> {
    try_run(placement, tune, |connected| body(connected.unwrap()))
}

/// The same for bodies that expect a failure: a rank may receive it while it still connects.
pub fn try_run<T: Send>(
    placement: &[(String, String)],
    tune: impl Fn(&mut Options) + Sync,
    body: impl Fn(Result<Communicator, CollectiveError>) -> T + Sync,
) -> Vec<T> {
    run_at(placement, |_| None, tune, body)
}

/// The same with the daemon of each rank, if it has one.
pub fn run_at<T: Send>(
    placement: &[(String, String)],
    daemon: impl Fn(u32) -> Option<PathBuf>,
    tune: impl Fn(&mut Options) + Sync,
    body: impl Fn(Result<Communicator, CollectiveError>) -> T + Sync,
) -> Vec<T> {
    let endpoints: Vec<AnyEndpoint> = (0..placement.len())
        .map(|rank| {
            let mut options = Options::new(rank as u32, placement.to_vec());
            options.job = "test/job".into();
            // A thread is never stopped alone: a silent rank here only waits for a processor.
            options.liveness = TIMEOUT;
            // Recorders without a name, and no dumps: no files remain.
            options.folders = Folders::default();
            tune(&mut options);
            AnyEndpoint::open(options, &KEY, daemon(rank as u32).as_deref()).unwrap()
        })
        .collect();
    let infos: Vec<Vec<u8>> = endpoints.iter().map(AnyEndpoint::info).collect();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = endpoints
            .into_iter()
            .map(|endpoint| {
                let (infos, body) = (&infos, &body);
                scope.spawn(move || body(endpoint.connect(infos, TIMEOUT)))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The rank's communicator, or none if it failed with this kind before the rendezvous was complete.
pub fn unless_ended(
    connected: Result<Communicator, CollectiveError>,
    kind: ErrorKind,
) -> Option<Communicator> {
    connected.map_err(|error| assert_eq!(error.cause.kind, kind, "{error}")).ok()
}

/// The memory of a vector. The caller keeps it until the work has ended.
pub fn buffer(data: &mut [f32]) -> Buffer {
    // SAFETY: the tests wait for the work before they touch or drop the vector.
    unsafe { Buffer::new([(data.as_mut_ptr().cast(), size_of_val(data))]) }
}

pub fn allreduce(comm: &Communicator, data: &mut [f32]) -> Work {
    comm.allreduce(buffer(data), DType::F32, ReduceOp::Sum, 0, TIMEOUT, true).unwrap()
}

/// Values whose sum depends on the order.
pub fn values(rank: u32, salt: u64, count: usize) -> Vec<f32> {
    let mut state = u64::from(rank) * 7919 + salt * 104_729 + 1;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 40) as f32 - 8e6) * 10_f32.powi((state >> 33) as i32 % 9 - 4)
        })
        .collect()
}

/// Small integers: every sum of them is exact, in every order.
pub fn numbers(rank: u32, salt: u64, count: usize) -> Vec<f32> {
    (0..count as u64).map(|at| ((at * 31 + u64::from(rank) * 7 + salt) % 1021) as f32).collect()
}

pub fn digest(data: &[f32]) -> u64 {
    data.iter()
        .flat_map(|value| value.to_bits().to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// A daemon in a separate thread, at a separate socket. Stops when dropped.
pub struct Served {
    pub path: PathBuf,
    ranks: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Served {
    pub fn new(ranks_max: usize) -> Self {
        Self::with(ranks_max, None, None)
    }

    pub fn with_memory(ranks_max: usize, memory_max: usize) -> Self {
        Self::with(ranks_max, Some(memory_max), None)
    }

    pub fn with_descriptors(ranks_max: usize, descriptors_max: usize) -> Self {
        // A user's share is limited only if memory is.
        Self::with(ranks_max, Some(1 << 50), Some(descriptors_max))
    }

    fn with(ranks_max: usize, memory_max: Option<usize>, descriptors_max: Option<usize>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hfreduced.sock");
        let daemon = Daemon::bind(
            &path,
            Rules {
                mode: 0o600,
                ranks_max,
                memory_max,
                descriptors_max,
                folders: Folders::default(),
            },
        )
        .unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let ranks = Arc::new(AtomicUsize::new(0));
        let (stopped, count) = (stop.clone(), ranks.clone());
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                daemon.accept_for(Duration::from_millis(20)).unwrap();
                count.store(daemon.ranks(), Ordering::SeqCst);
            }
        });
        Self { path, ranks, stop, thread: Some(thread), _folder: folder }
    }

    /// Waits until all ranks are unregistered.
    pub fn eventually_empty(&self) {
        let until = Instant::now() + TIMEOUT;
        while self.ranks.load(Ordering::SeqCst) > 0 {
            assert!(Instant::now() < until, "ranks are still registered");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}
