//! Storage of the flight recorder: a file that other processes can read, in a private folder.
//!
//! The folder should be in memory (`/run`, `/dev/shm`): the kernel blocks a process that writes to
//! a mapped file on a disk while it writes that page back. Nothing depends on the file: if it
//! cannot be created, the recorder works without one.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fabric::shm::Segment;
use rustix::fs::FallocateFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::host::{boot_id, host_name, monotonic_ns, pid_namespace, process_start};
use super::seqlock::{self, DoubleRead};
use super::{RankInfo, Snapshot};
use fabric::atomics::Native;

/// File name suffix of flight records.
pub const SUFFIX: &str = ".flight";
/// Name of memory without a file, as shown in `/proc/PID/fd`.
pub const NAMELESS: &str = "hfreduce-flight";
/// Files of processes that have ended are kept for this time.
const KEPT: Duration = Duration::from_secs(3600);
/// Maximum number of files of processes that have ended.
const ENDED_MAX: usize = 128;
/// Maximum number of folder entries that are checked when a recorder is created.
const SWEPT_MAX: usize = 1024;

/// Folders of flight records and dumps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Folders {
    /// Candidate folders for flight records, best first.
    pub run: Vec<PathBuf>,
    /// Folder for dumps; none: no dumps are written.
    pub dumps: Option<PathBuf>,
}

impl Folders {
    /// `HFREDUCE_RUN_DIR` and `HFREDUCE_DUMP_DIR`, or the default folders of this user.
    pub fn from_environment() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let own = format!("hfreduce-{}", rustix::process::geteuid().as_raw());
        let run = match set("HFREDUCE_RUN_DIR") {
            Some(folder) => vec![PathBuf::from(folder)],
            None => {
                let session =
                    set("XDG_RUNTIME_DIR").map(|runtime| PathBuf::from(runtime).join("hfreduce"));
                let shared = ["/dev/shm", "/tmp"].map(|parent| Path::new(parent).join(&own));
                session.into_iter().chain(shared).collect()
            }
        };
        let dumps = set("HFREDUCE_DUMP_DIR")
            .map_or_else(|| std::env::temp_dir().join(&own).join("dumps"), PathBuf::from);
        Self { run, dumps: Some(dumps) }
    }
}

#[derive(Debug)]
enum Backing {
    File { path: PathBuf, base: NonNull<u8>, process: u32, removed: AtomicBool },
    Nameless(Segment),
    Own(Box<[AtomicU64]>),
}

/// Memory of the recorder.
#[derive(Debug)]
pub struct RecorderMemory {
    backing: Backing,
    bytes: usize,
}

// SAFETY: the memory consists of atomics and is reached through shared references.
unsafe impl Send for RecorderMemory {}
// SAFETY: as above.
unsafe impl Sync for RecorderMemory {}

impl RecorderMemory {
    /// `bytes` zeroed bytes in the best available storage.
    pub fn new(folders: &Folders, bytes: usize, about: &RankInfo) -> Self {
        let name = format!("{:016x}-{}-{}{SUFFIX}", about.group, about.rank, std::process::id());
        for folder in &folders.run {
            match in_folder(folder, &name, bytes) {
                Ok(backing) => {
                    sweep(folder);
                    return Self { backing, bytes };
                }
                Err(error) => {
                    tracing::debug!(folder = %folder.display(), %error, "cannot record in this folder")
                }
            }
        }
        let backing = match Segment::create(NAMELESS, bytes) {
            Ok(segment) => Backing::Nameless(segment),
            Err(_) => return Self::private(bytes),
        };
        Self { backing, bytes }
    }

    /// Memory of this process alone.
    pub fn private(bytes: usize) -> Self {
        let words = (0..bytes / 8).map(|_| AtomicU64::new(0)).collect();
        Self { backing: Backing::Own(words), bytes }
    }

    /// All words.
    pub fn words(&self) -> &[AtomicU64] {
        let base = match &self.backing {
            Backing::File { base, .. } => *base,
            Backing::Nameless(segment) => match NonNull::new(segment.base()) {
                Some(base) => base,
                None => return &[],
            },
            Backing::Own(words) => return words,
        };
        // SAFETY: `bytes` mapped bytes at the start of a page, which stay mapped as long as `self`;
        // any bits are a valid AtomicU64.
        unsafe { std::slice::from_raw_parts(base.as_ptr().cast(), self.bytes / 8) }
    }

    /// Reads all bytes twice.
    pub fn reads(&self) -> [Vec<u8>; 2] {
        [(), ()].map(|()| seqlock::read_words::<Native>(self.words()))
    }

    /// Path of the file, if there is one.
    pub fn path(&self) -> Option<&Path> {
        match &self.backing {
            Backing::File { path, .. } => Some(path),
            _ => None,
        }
    }

    /// Removes the file; the memory stays. A forked child removes nothing.
    pub fn remove(&self) {
        if let Backing::File { path, process, removed, .. } = &self.backing
            && *process == std::process::id()
            && !removed.swap(true, Ordering::Relaxed)
        {
            let _ = fs::remove_file(path);
        }
    }
}

impl Drop for RecorderMemory {
    fn drop(&mut self) {
        self.remove();
        if let Backing::File { base, .. } = &self.backing {
            // SAFETY: mapped by `in_folder` with this length, and no reference into it exists.
            let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), self.bytes) };
        }
    }
}

fn in_folder(folder: &Path, name: &str, bytes: usize) -> io::Result<Backing> {
    private_folder(folder)?;
    let path = folder.join(name);
    // A file of that name belongs to an earlier process with the same id.
    let _ = fs::remove_file(&path);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)?;
    match map(&file, bytes) {
        Ok(base) => {
            let (process, removed) = (std::process::id(), AtomicBool::new(false));
            Ok(Backing::File { path, base, process, removed })
        }
        Err(error) => {
            let _ = fs::remove_file(&path);
            Err(error)
        }
    }
}

fn map(file: &File, bytes: usize) -> io::Result<NonNull<u8>> {
    // Allocated now: on a full file system a store would raise SIGBUS later.
    rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes as u64)?;
    // SAFETY: a new mapping at an address chosen by the kernel aliases nothing.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            file,
            0,
        )?
    };
    NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Creates the folder if needed and checks that only this user can write to it.
pub fn private_folder(folder: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let metadata = fs::symlink_metadata(folder)?;
    let own = metadata.uid() == rustix::process::geteuid().as_raw();
    if !metadata.is_dir() || !own || metadata.mode() & 0o022 != 0 {
        return Err(io::Error::other(format!(
            "{} is not a private folder of this user (mode {:o}, owner {})",
            folder.display(),
            metadata.mode() & 0o7777,
            metadata.uid()
        )));
    }
    Ok(())
}

/// Removes files of processes that ended more than an hour ago, and of processes that ended since,
/// all but the newest.
fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut ended: Vec<(Duration, PathBuf)> = entries
        .take(SWEPT_MAX)
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.to_string_lossy().ends_with(SUFFIX))
        .filter_map(|path| Some((silent_for(&path)?, path)))
        .collect();
    ended.sort();
    for (at, (silent, path)) in ended.into_iter().enumerate() {
        if silent > KEPT || at >= ENDED_MAX {
            let _ = fs::remove_file(path);
        }
    }
}

/// Time since the last heartbeat of a recorder whose process has ended; none while it may be alive.
fn silent_for(path: &Path) -> Option<Duration> {
    let modified_at = fs::metadata(path).and_then(|metadata| metadata.modified()).ok()?;
    let age = modified_at.elapsed().unwrap_or_default();
    let reads = [fs::read(path).ok()?, fs::read(path).ok()?];
    let Ok(snapshot) = Snapshot::of(DoubleRead(&reads[0], &reads[1]), None) else {
        // The process was killed while it created the file, or the file has another version.
        return (age > KEPT).then_some(age);
    };
    if snapshot.host != host_name() {
        // A folder shared by machines: the process cannot be checked.
        return (age > KEPT).then_some(age);
    }
    if snapshot.boot_id != boot_id() {
        return Some(Duration::MAX);
    }
    let silent = Duration::from_nanos(monotonic_ns().saturating_sub(snapshot.beat_ns));
    let alive = if snapshot.pid_namespace == pid_namespace() {
        process_start(snapshot.pid) == Some(snapshot.process_start)
    } else {
        // Another container, or the previous one of this pod: a live process has recent heartbeats.
        silent < KEPT
    };
    (!alive).then_some(silent)
}
